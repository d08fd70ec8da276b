"""What all factorizations ask of a table, and its rows block by block.

Axes: ``V`` words, ``D`` dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

# Words that are turned into 64 bits at a time.
BLOCK = 8192


def check_table(table: Tensor) -> None:
    """Raise ValueError unless `table` is ``(V, D)``, not empty, of finite numbers."""
    if table.dim() != 2 or table.numel() == 0 or not table.is_floating_point():
        raise ValueError(
            f"the table has shape {tuple(table.shape)} and type {table.dtype}, but it must be (V, D), one "
            "vector of floating-point numbers for each word"
        )
    for start, block in zip(range(0, len(table), BLOCK), table.split(BLOCK)):
        wrong = ~block.isfinite().all(dim=1)
        if wrong.any():
            word = start + int(wrong.nonzero()[0])
            raise ValueError(
                f"the table's row {word} holds NaN or infinity: only finite tables can be factorized"
            )


def check_counts(counts: Tensor, words: int) -> None:
    """Raise ValueError unless `counts` has one finite number for each word, none negative, not all zero."""
    if counts.shape != (words,):
        raise ValueError(
            f"there are counts of shape {tuple(counts.shape)} for {words} words: give one for each word"
        )
    for wrong, what in ((~counts.isfinite(), "not finite"), (counts < 0, "negative")):
        if wrong.any():
            word = int(wrong.nonzero()[0])
            raise ValueError(f"the count of word {word} is {counts[word].item()}, which is {what}")
    if not (counts > 0).any():
        raise ValueError("all counts are zero: at least one word must have been seen")


def check_rank(rank: int, dim: int) -> None:
    """Raise ValueError unless 1 <= `rank` <= D."""
    if not 1 <= rank <= dim:
        raise ValueError(f"the rank is {rank}, but it must be from 1 to the {dim} dimensions of the table")


def blocks(table: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The rows of the table, a block at a time, in 64 bits."""
    for start in range(0, len(table), BLOCK):
        rows = slice(start, min(start + BLOCK, len(table)))
        yield rows, table[rows].detach().double()
