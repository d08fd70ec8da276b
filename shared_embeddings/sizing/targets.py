"""How small embeddings shall become, and which options of a method make them so."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from shared_embeddings.checkpoints.adapter import TiedTable
from shared_embeddings.options import OptionError
from shared_embeddings.registry import build, method_class
from shared_embeddings.sizing import accounting
from shared_embeddings.sizing.suggest import STRATEGIES, Ladder, Options


@dataclasses.dataclass(frozen=True)
class Target:
    """How small the replaced embeddings become together.

    Attributes:
        ratio: times smaller in bytes, or None.
        total_bytes: bytes, or None; exactly one of both is given.
    """

    ratio: float | None = None
    total_bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuse targets that mean nothing."""
        if (self.ratio is None) == (self.total_bytes is None):
            raise ValueError("the target is a ratio or a number of bytes; give exactly one of them")
        if self.ratio is not None and not 1.0 < self.ratio < float("inf"):
            raise ValueError(f"target ratio is {self.ratio:g}, but it must be above 1, such as 8")
        if self.total_bytes is not None and self.total_bytes < 1:
            raise ValueError(f"target bytes is {self.total_bytes}, but it must be at least 1")

    def limit(self, table: TiedTable, tables: Sequence[TiedTable]) -> int:
        """The bytes of one table; a total is divided as the plain tables are."""
        plain = table.table.nbytes
        if self.ratio is not None:
            return int(plain / self.ratio)
        assert self.total_bytes is not None
        return self.total_bytes * plain // sum(other.table.nbytes for other in tables)


def stored_bytes(
    method: str,
    num_embeddings: int,
    embedding_dim: int,
    options: Options,
    store: str = "fp32",
    dtype: torch.dtype = torch.float32,
) -> int:
    """The bytes of an embedding of V words in D dimensions in a storage, word codes and scales included.

    Allocates no weights.

    Args:
        dtype: of its floating-point tensors in memory.

    Raises:
        OptionError: an impossible option or size.
    """
    sizes = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
    with torch.device("meta"):
        embedding = build(method, **sizes, **options).to(dtype)  # type: ignore[arg-type]
    return -(-accounting.stored_bits(embedding, store) // 8)


def options_within(
    method: str,
    num_embeddings: int,
    embedding_dim: int,
    limit: int,
    store: str = "fp32",
    output_bias: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Options:
    """The options with the most bytes, of those that `suggest` searches, that take `limit` bytes at most.

    Args:
        method, num_embeddings, embedding_dim: of the embedding.
        limit: bytes.
        store: how floating-point tensors are stored.
        output_bias: whether a bias for all words is among these bytes.
        dtype: of floating-point tensors in memory, which they keep unless `store` takes fewer bits.

    Raises:
        OptionError: no such method, or none of its options is small enough.
    """
    method_class(method)
    if method not in STRATEGIES:
        raise OptionError(f"{method}: its options are not searched; give them instead of a target")
    bias: Options = {"output_bias": True} if output_bias else {}

    def size(ladder: Ladder, step: int) -> int:
        options = {**ladder.options_at(step), **bias}
        return stored_bytes(method, num_embeddings, embedding_dim, options, store, dtype)

    least: int | None = None
    for ladder in STRATEGIES[method].ladders(num_embeddings, embedding_dim):
        first = size(ladder, 0)
        if first <= limit:
            # The last step within the limit, by bisection; the first one is.
            low, high = 0, ladder.steps
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if size(ladder, middle) <= limit else (low, middle)
            return {**ladder.options_at(low), **bias}
        least = first if least is None else min(least, first)
    needed = "cannot have these sizes" if least is None else f"needs at least {least:,} bytes"
    raise OptionError(
        f"{method}: {needed} for {num_embeddings:,} words in {embedding_dim} dimensions, the target leaves "
        f"{limit:,}; allow more, or take another method"
    )
