"""Which options of a method make an embedding small enough in bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared_embeddings.options import OptionError
from shared_embeddings.registry import build, method_class
from shared_embeddings.suggest import STRATEGIES, Ladder, Options


def stored_bytes(method: str, num_embeddings: int, embedding_dim: int, options: Options) -> int:
    """The bytes that it takes to store an embedding of V words in D dimensions, word codes included.

    Allocates no weights.

    Raises:
        OptionError: an impossible option or size.
    """
    sizes = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
    with torch.device("meta"):
        embedding = build(method, **sizes, **options)  # type: ignore[arg-type]
    return -(-embedding.counts()["stored_bits"] // 8)


def options_within(
    method: str, num_embeddings: int, embedding_dim: int, limit: int, output_bias: bool = False
) -> Options:
    """The options with the most bytes, of those that `suggest` searches, that take `limit` bytes at most.

    With `output_bias` those of a bias for all words are among these bytes.

    Raises:
        OptionError: no such method, or none of its options is small enough.
    """
    method_class(method)
    if method not in STRATEGIES:
        raise OptionError(f"{method}: its options are not searched; give them instead of a target")
    bias: Options = {"output_bias": True} if output_bias else {}
    least: int | None = None
    for ladder in STRATEGIES[method].ladders(num_embeddings, embedding_dim):
        first = stored_bytes(method, num_embeddings, embedding_dim, {**ladder.options_at(0), **bias})
        if first <= limit:
            last = _last_within(method, (num_embeddings, embedding_dim), ladder, bias, limit)
            return {**ladder.options_at(last), **bias}
        least = first if least is None else min(least, first)
    needed = "cannot have these sizes" if least is None else f"needs at least {least:,} bytes"
    raise OptionError(
        f"{method}: {needed} for {num_embeddings:,} words in {embedding_dim} dimensions, the target leaves "
        f"{limit:,}; allow more, or take another method"
    )


def _last_within(method: str, sizes: Sequence[int], ladder: Ladder, others: Options, limit: int) -> int:
    """The last step of a ladder within `limit` bytes, by bisection; the first one must be."""
    low, high = 0, ladder.steps
    while high - low > 1:
        middle = (low + high) // 2
        options = {**ladder.options_at(middle), **others}
        fits = stored_bytes(method, sizes[0], sizes[1], options) <= limit
        low, high = (middle, high) if fits else (low, middle)
    return low
