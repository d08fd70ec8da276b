"""Options of each method that fit into a budget of parameters or bytes: as values, text, JSON and a page."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from shared_embeddings import accounting
from shared_embeddings.quant.storage import STORES
from shared_embeddings.registry import build, get_method_config, methods, num_parameters
from shared_embeddings.spec import Options, SearchGrid
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import OptionError
from shared_embeddings.utils.reading import read_yaml

_MULTIPLIERS = {"": 1, "k": 10**3, "m": 10**6}
# Steps of each search grid on an HTML page; the command `suggest` searches all of them.
PAGE_STEPS = 100
# The quality that models kept, by method and times fewer bytes; `make readme` writes it.
MEASURED = Path(__file__).with_name("measured.yaml")
Point = list[str | int]


@dataclasses.dataclass(frozen=True)
class Target:
    """The target size of all replaced embeddings together."""

    ratio: float | None = None  # the compression ratio in bytes, or None
    total_bytes: int | None = None  # bytes, or None
    bits: float | None = None  # for each number of the tables, or None; exactly one of the three is given

    def __post_init__(self) -> None:
        if sum(one is not None for one in (self.ratio, self.total_bytes, self.bits)) != 1:
            raise UserError("the target is a ratio, a number of bytes or of bits; give exactly one of them")
        if self.ratio is not None and not 1.0 < self.ratio < float("inf"):
            raise UserError(f"target ratio is {self.ratio:g}, but it must be above 1, such as 8")
        if self.total_bytes is not None and self.total_bytes < 1:
            raise UserError(f"target bytes is {self.total_bytes}, but it must be at least 1")
        if self.bits is not None and not 0.0 < self.bits < 32.0:
            raise UserError(f"--bits is {self.bits:g}, but it must be a number above 0 and below 32")

    def limit(self, table: Tensor, tables: Sequence[Tensor]) -> int:
        """The bytes of an embedding instead of one of some tables."""
        if self.bits is not None:
            return int(table.numel() * self.bits / 8)
        if self.ratio is not None:
            return int(table.nbytes / self.ratio)
        assert self.total_bytes is not None
        return self.total_bytes * table.nbytes // sum(one.nbytes for one in tables)


def largest_within(
    grids: Iterable[SearchGrid], size_of: Callable[[Options], int], limit: int
) -> tuple[SearchGrid, int] | int | None:
    """The largest step within a limit, on the first of the grids that has one.

    Args:
        grids: the grids of a method, see `EmbeddingOptions.search_grids`.
        size_of: the size of an embedding with some options.
        limit: the largest size allowed.

    Returns:
        The grid and the step; or the smallest size of all grids if that exceeds the limit; None if there
        are no grids.
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
    """
    with torch.device("meta"):
        embedding = build(method, num_embeddings=num_embeddings, embedding_dim=embedding_dim, **options)
    return -(-accounting.stored_bits(embedding.to(dtype), store) // 8)


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

    grids = list(get_method_config(method).search_grids(num_embeddings, embedding_dim))
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


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """The options of one method for a budget."""

    method: str  # the method
    options: Options | None  # its options, or None if none meet the budget
    count: int | None  # the parameters with these options, or the smallest possible number
    remark: str  # how the options were chosen, or why there are none


def suggest(num_embeddings: int, embedding_dim: int, budget: int) -> list[Suggestion]:
    """For every registered method, the options with the most parameters that are within `budget`."""
    num_parameters("standard", num_embeddings=num_embeddings, embedding_dim=embedding_dim)  # checks V and D
    return [_suggest_one(method, num_embeddings, embedding_dim, budget) for method in methods()]


def _suggest_one(method: str, num_embeddings: int, embedding_dim: int, budget: int) -> Suggestion:
    spec = get_method_config(method)

    def count(options: Options) -> int:
        resolved = spec.resolve(num_embeddings, embedding_dim, options)
        return resolved.search_size(num_embeddings, embedding_dim)

    found = largest_within(spec.search_grids(num_embeddings, embedding_dim), count, budget)
    if isinstance(found, tuple):
        grid, step = found
        options = grid.options_at(step)
        return Suggestion(method, options, count(options), spec.grid_choice)
    if found is None:
        remark = "no suggestion: the vocabulary or the dimension is too small"
    else:
        remark = f"needs at least {found:,} parameters"
    return Suggestion(method, None, found, remark)


def read_budget(text: str) -> int:
    """A budget such as "2M", "500k", "1.5e6" or "2000000" as a number of parameters."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:e\+?[0-9]+)?)\s*([kKmM]?)\s*", text)
    if match is None:
        raise UserError(f"budget '{text}' is not a number of parameters; write e.g. 2M, 500k or 1.5e6")
    budget = float(match[1]) * _MULTIPLIERS[match[2].lower()]
    if not 1 <= budget < 1e15:
        raise UserError(f"budget '{text}' must be at least one parameter and less than 1e15; change it")
    return int(budget)


def describe_suggestions(num_embeddings: int, embedding_dim: int, budget: str, as_json: bool = False) -> str:
    """The suggestions, each as a line to paste into a configuration, or as a JSON object."""
    limit = read_budget(budget)
    dense = num_parameters("standard", num_embeddings=num_embeddings, embedding_dim=embedding_dim)
    table = f"a plain table of {num_embeddings:,} x {embedding_dim:,}"
    if limit >= dense and not as_json:
        return f"Nothing is needed: {table} has {dense:,} parameters, within the budget of {limit:,}."
    lines, objects = [f"# budget {limit:,} parameters; {table} has {dense:,}"], []
    for found in suggest(num_embeddings, embedding_dim, limit):
        factor = None if found.options is None else dense / max(found.count or 1, 1)
        objects.append(
            {
                "method": found.method,
                "options": found.options,
                "count": found.count,
                "compression": factor and round(factor, 2),
                "remark": found.remark,
            }
        )
        if found.options is None:
            lines += ["", f"# {found.method}: {found.remark}"]
        else:
            lines += ["", f"# {found.method}: {found.count:,} parameters, {factor:.2f}x; {found.remark}"]
            lines.append(f"embedding: {as_yaml(found.method, found.options)}")
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


def suggestion_page(vocab_sizes: Sequence[int], dims: Sequence[int], budget: str | None = None) -> str:
    """The page for all combinations of vocabulary sizes V and dimensions D.

    Args:
        vocab_sizes, dims: to choose from.
        budget: number of parameters that the page starts with; an eighth of the plain table if not given.
    """
    shapes = [(size, dim) for size in vocab_sizes for dim in dims]
    for size, dim in shapes:
        num_parameters("standard", num_embeddings=size, embedding_dim=dim)  # rejects impossible sizes
    if budget is not None:
        read_budget(budget)
    tasks = [(size, dim, method) for size, dim in shapes for method in methods()]
    grids: dict[str, dict[str, list[list[Point]]]] = {}
    for size, dim, method in tqdm(tasks, "sizes", disable=None, leave=False):
        found = [
            list(points(method, size, dim, grid))
            for grid in get_method_config(method).search_grids(size, dim)
        ]
        grids.setdefault(f"{size} {dim}", {})[method] = found
    measured = read_yaml(MEASURED)
    data = {
        "vocab": vocab_sizes,
        "dim": dims,
        "stores": STORES,
        "notes": {
            method: [get_method_config(method).summary, get_method_config(method).paper]
            for method in methods()
        },
        "budget": budget,
        "grids": grids,
        "kept": measured["kept"],
    }
    template = MEASURED.with_name("page.html").read_text(encoding="utf-8")
    template = template.replace("/*MEASURED*/", "; ".join(measured["models"]))
    return template.replace("/*DATA*/", json.dumps(data, separators=(",", ":")).replace("</", "<\\/"))


def points(method: str, num_embeddings: int, embedding_dim: int, grid: SearchGrid) -> Iterator[Point]:
    """Options from small to large on a search grid: YAML, parameters, and bytes in each of `STORES`.

    The steps are at most `PAGE_STEPS`, with the first and the last, closer together at first.
    """
    exponents = (number / (PAGE_STEPS - 1) for number in range(PAGE_STEPS))
    for step in sorted({min(round(grid.steps**exponent), grid.steps) - 1 for exponent in exponents}):
        options = grid.options_at(step)
        with torch.device("meta"):
            embedding = build(method, num_embeddings=num_embeddings, embedding_dim=embedding_dim, **options)
        count = embedding.options.search_size(num_embeddings, embedding_dim)
        sizes = (-(-accounting.stored_bits(embedding, store) // 8) for store in STORES)
        yield [as_yaml(method, options), count, *sizes]
