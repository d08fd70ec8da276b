"""Target sizes for compressed embeddings, and the options of a method that reach them."""

from __future__ import annotations

import dataclasses

import torch

from shared_embeddings import accounting
from shared_embeddings.compress.suggest import largest_within
from shared_embeddings.registry import build
from shared_embeddings.registry import options as find_spec
from shared_embeddings.spec import Options
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import OptionError


@dataclasses.dataclass(frozen=True)
class Target:
    """The target size of all replaced embeddings together.

    Attributes:
        ratio: the compression ratio in bytes, or None.
        total_bytes: bytes, or None; exactly one of the two is given.
    """

    ratio: float | None = None
    total_bytes: int | None = None

    def __post_init__(self) -> None:
        """Raise UserError for invalid targets."""
        if (self.ratio is None) == (self.total_bytes is None):
            raise UserError("the target is a ratio or a number of bytes; give exactly one of them")
        if self.ratio is not None and not 1.0 < self.ratio < float("inf"):
            raise UserError(f"target ratio is {self.ratio:g}, but it must be above 1, such as 8")
        if self.total_bytes is not None and self.total_bytes < 1:
            raise UserError(f"target bytes is {self.total_bytes}, but it must be at least 1")

    def limit(self, plain: int, total: int) -> int:
        """The bytes of an embedding instead of a table of `plain` bytes, if all tables have `total`."""
        if self.ratio is not None:
            return int(plain / self.ratio)
        assert self.total_bytes is not None
        return self.total_bytes * plain // total


def stored_bytes(
    method: str,
    num_embeddings: int,
    embedding_dim: int,
    options: Options,
    store: str = "fp32",
    dtype: torch.dtype = torch.float32,
) -> int:
    """The bytes of a stored embedding of V words in D dimensions, word codes and scales included.

    Allocates no weights.

    Args:
        dtype: of its floating-point tensors in memory.

    Raises:
        OptionError: an impossible option or size.
    """
    with torch.device("meta"):
        embedding = build(method, num_embeddings=num_embeddings, embedding_dim=embedding_dim, **options).to(
            dtype
        )
    return -(-accounting.stored_bits(embedding, store) // 8)


def options_within(
    method: str,
    num_embeddings: int,
    embedding_dim: int,
    limit: int,
    store: str = "fp32",
    output_bias: bool = False,
    dtype: torch.dtype = torch.float32,
    fixed: Options | None = None,
) -> Options:
    """The options on the method's search grids with the most bytes that take `limit` bytes at most.

    Args:
        method, num_embeddings, embedding_dim: of the embedding.
        limit: bytes.
        store: how floating-point tensors are stored.
        output_bias: whether these bytes include a bias for all words.
        dtype: of floating-point tensors in memory, which they keep unless `store` takes fewer bits.
        fixed: options that the search does not choose.

    Raises:
        OptionError: there is no such method, none of its options is small enough, or a fixed option is on
            the search grids.
    """
    others: Options = {**(fixed or {}), **({"output_bias": True} if output_bias else {})}

    def size(options: Options) -> int:
        return stored_bytes(method, num_embeddings, embedding_dim, {**options, **others}, store, dtype)

    grids = list(find_spec(method).search_grids(num_embeddings, embedding_dim))
    for name in others:
        if any(name in grid.options_at(0) for grid in grids):
            raise OptionError(f"option '{name}' is chosen by the target; remove one of them")
    found = largest_within(grids, size, limit)
    if isinstance(found, tuple):
        grid, step = found
        return {**grid.options_at(step), **others}
    needed = "is impossible" if found is None else f"needs at least {found:,} bytes"
    raise OptionError(
        f"{method}: {needed} for {num_embeddings:,} words in {embedding_dim} dimensions, the target leaves "
        f"{limit:,}; allow more, or choose another method"
    )
