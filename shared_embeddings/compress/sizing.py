"""Options of each method that fit into a budget of parameters or bytes: as values, text and JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared_embeddings import accounting
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.registry import build, get_method_config, methods, num_parameters
from shared_embeddings.spec import Options, SearchGrid
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import OptionError

_MULTIPLIERS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


@dataclasses.dataclass(frozen=True)
class Target:
    """The target size of all replaced embeddings together."""

    ratio: float | None = None  # the compression ratio in bytes, or None
    total_bytes: int | None = None  # bytes, or None
    bits: float | None = None  # for each number of the tables, or None; exactly one of the three is given

    def __post_init__(self) -> None:
        if self.bits is not None and not 0.0 < self.bits < 32.0:
            raise UserError(f"bits is {self.bits:g}, but it must be above 0 and below 32")

    def limit(self, table: Tensor, tables: Sequence[Tensor]) -> int:
        """Return the bytes of an embedding that replaces one of several tables."""
        if self.bits is not None:
            return int(table.numel() * self.bits / 8)
        if self.ratio is not None:
            return int(table.nbytes / self.ratio)
        assert self.total_bytes is not None
        return self.total_bytes * table.nbytes // sum(other.nbytes for other in tables)


def parse_size(text: str) -> Target:
    """Return a size from a text: a factor such as 8x, or bytes such as 500kB or 20MB."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) ?(x|([kMG]?)B)", text.strip())
    if match is None or (match[2] == "x" and float(match[1]) <= 1) or not float(match[1]) > 0:
        raise UserError(
            f"size is '{text}'; write a factor above 1 such as 8x, or bytes such as 500kB or 20MB"
        )
    if match[2] == "x":
        return Target(ratio=float(match[1]))
    return Target(total_bytes=max(1, int(float(match[1]) * _MULTIPLIERS[match[3].lower()])))


def largest_within(
    grids: Iterable[SearchGrid], size_of: Callable[[Options], int], limit: int
) -> tuple[SearchGrid, int] | int | None:
    """Return the first grid with a size within a limit, and its largest such step.

    Else the smallest size of all grids; None if there are no grids.
    """
    least: int | None = None
    for grid in grids:
        first = size_of(grid.options_at(0))
        if first <= limit:
            low, high = 0, grid.steps
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if size_of(grid.options_at(middle)) <= limit else (low, middle)
            return grid, low
        least = first if least is None else min(least, first)
    return least


def stored_bytes(embedding: SharedEmbedding, store: str) -> int:
    """Return the bytes of an embedding as stored, word codes and scales included."""
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
        sizes: dict[str, Any] = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
        with torch.device("meta"):
            embedding = build(method, **sizes, **options, **others)
        return stored_bytes(embedding.to(dtype), store)

    grids = list(get_method_config(method).presets(num_embeddings, embedding_dim).grids)
    for name in others:
        if any(name in grid.options_at(0) for grid in grids):
            raise OptionError(f"option '{name}' is chosen by the target; remove one of them")
    largest = largest_within(grids, size, limit)
    if isinstance(largest, tuple):
        grid, step = largest
        return {**grid.options_at(step), **others}
    needed = "is impossible" if largest is None else f"needs at least {largest:,} bytes"
    raise OptionError(
        f"{method}: {needed} for {num_embeddings:,} words in {embedding_dim} dimensions, the target leaves "
        f"{limit:,}; allow more, or choose another method"
    )


class Suggestion(NamedTuple):
    """The options of one method for a budget."""

    method: str  # the method
    options: Options | None  # its options, or None if none meet the budget
    parameters: int | None  # their number with these options, or the smallest possible number
    remark: str  # how the options were chosen, or why there are none


def suggest(num_embeddings: int, embedding_dim: int, budget: int) -> list[Suggestion]:
    """Return the options with the most parameters within `budget` for every registered method."""
    num_parameters("standard", num_embeddings=num_embeddings, embedding_dim=embedding_dim)  # checks V and D
    suggestions = []
    for method in methods():
        spec = get_method_config(method)

        def count(options: Options, spec: Any = spec) -> int:
            resolved = spec.resolve(num_embeddings, embedding_dim, options)
            size: int = resolved.search_size(num_embeddings, embedding_dim)
            return size

        largest = largest_within(spec.presets(num_embeddings, embedding_dim).grids, count, budget)
        if isinstance(largest, tuple):
            grid, step = largest
            options = grid.options_at(step)
            suggestions.append(Suggestion(method, options, count(options), spec.grid_choice))
        elif largest is None:
            remark = "no suggestion: the vocabulary or the dimension is too small"
            suggestions.append(Suggestion(method, None, None, remark))
        else:
            suggestions.append(Suggestion(method, None, largest, f"needs at least {largest:,} parameters"))
    return suggestions


def describe_suggestions(num_embeddings: int, embedding_dim: int, budget: str, as_json: bool = False) -> str:
    """Return the suggestions, each as a line to paste into a configuration, or as a JSON object.

    The budget is a number of parameters such as "2M", "500k", "1.5e6" or "2000000".
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:e\+?[0-9]+)?)\s*([kKmM]?)\s*", budget)
    size = float(match[1]) * _MULTIPLIERS[match[2].lower()] if match is not None else 0.0
    if not 1 <= size < 1e15:
        raise UserError(f"budget '{budget}' is not a number of parameters; write e.g. 2M, 500k or 1.5e6")
    limit = int(size)
    dense = num_parameters("standard", num_embeddings=num_embeddings, embedding_dim=embedding_dim)
    table = f"a plain table of {num_embeddings:,} x {embedding_dim:,}"
    if limit >= dense and not as_json:
        return f"Nothing is needed: {table} has {dense:,} parameters, within the budget of {limit:,}."
    lines, objects = [f"# budget {limit:,} parameters; {table} has {dense:,}"], []
    for method, options, count, remark in suggest(num_embeddings, embedding_dim, limit):
        factor = None if options is None else dense / max(count or 1, 1)
        objects.append(
            {
                "method": method,
                "options": options,
                "parameters": count,
                "compression": factor and round(factor, 2),
                "remark": remark,
            }
        )
        if options is None:
            lines += ["", f"# {method}: {remark}"]
        else:
            lines += ["", f"# {method}: {count:,} parameters, {factor:.2f}x; {remark}"]
            lines.append(f"embedding: {as_yaml(method, options)}")
    sizes = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
    if as_json:
        return json.dumps({**sizes, "budget": limit, "dense": dense, "suggestions": objects}, indent=1)
    return "\n".join(lines)


def as_yaml(method: str, options: Options) -> str:
    """A method and its options as YAML in one line, to stand behind ``embedding:``."""
    # JSON is YAML for numbers, lists and booleans; names and words go without quotes.
    values = [f"method: {method}"]
    values += [f"{name}: {v if isinstance(v, str) else json.dumps(v)}" for name, v in options.items()]
    return "{" + ", ".join(values) + "}"
