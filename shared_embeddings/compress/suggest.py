"""The options of each method that fit into a budget of parameters, as text, JSON, or an HTML page."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import resources

import torch
from tqdm import tqdm

from shared_embeddings.accounting import stored_bits
from shared_embeddings.quant.storage import STORES
from shared_embeddings.registry import build, methods, num_parameters
from shared_embeddings.registry import options as find_spec
from shared_embeddings.spec import Options, SearchGrid
from shared_embeddings.utils.errors import UserError

_MULTIPLIERS = {"": 1, "k": 10**3, "m": 10**6}
# Steps of each search grid on an HTML page; the command `suggest` searches all of them.
PAGE_STEPS = 100
Point = list[str | int]


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """The options of one method for a budget.

    Attributes:
        method: the method.
        options: its options, or None if none meet the budget.
        count: the parameters with these options, or the smallest possible number.
        finer: the next step after the options, which exceeds the budget; None at the end of a grid.
        remark: how the options were chosen, or why there are none.
    """

    method: str
    options: Options | None
    count: int | None
    finer: Options | None
    remark: str


def read_budget(text: str) -> int:
    """A budget such as "2M", "500k", "1.5e6" or "2000000" as a number of parameters.

    Raises:
        UserError: the text is not such a number, or it is less than one parameter.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:e\+?[0-9]+)?)\s*([kKmM]?)\s*", text)
    if match is None:
        raise UserError(f"budget '{text}' is not a number of parameters; write e.g. 2M, 500k or 1.5e6")
    budget = float(match[1]) * _MULTIPLIERS[match[2].lower()]
    if not 1 <= budget < 1e15:
        raise UserError(f"budget '{text}' must be at least one parameter and less than 1e15; change it")
    return int(budget)


def suggest(num_embeddings: int, embedding_dim: int, budget: int) -> list[Suggestion]:
    """For every registered method, the options with the most parameters that are within `budget`.

    Raises:
        OptionError: V or D is impossible.
    """
    # Rejects sizes that no method can have.
    _count("standard", num_embeddings, embedding_dim, {})
    return [_suggest_one(method, num_embeddings, embedding_dim, budget) for method in methods()]


def describe_suggestions(num_embeddings: int, embedding_dim: int, budget: str, as_json: bool = False) -> str:
    """The suggestions, each as a line to paste into a configuration, or as a JSON object.

    Raises:
        UserError: the budget is not a number.
        OptionError: V or D is impossible.
    """
    limit = read_budget(budget)
    dense = _count("standard", num_embeddings, embedding_dim, {})
    found = suggest(num_embeddings, embedding_dim, limit)
    if as_json:
        return json.dumps(
            {
                "num_embeddings": num_embeddings,
                "embedding_dim": embedding_dim,
                "budget": limit,
                "dense": dense,
                "suggestions": [_as_object(suggestion, dense) for suggestion in found],
            },
            indent=1,
        )
    table = f"a plain table of {num_embeddings:,} x {embedding_dim:,}"
    if limit >= dense:
        return f"Nothing is needed: {table} has {dense:,} parameters, within the budget of {limit:,}."
    lines = [f"# budget {limit:,} parameters; {table} has {dense:,}"]
    for suggestion in found:
        lines += ["", *_lines(suggestion, dense)]
    return "\n".join(lines)


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


def _suggest_one(method: str, num_embeddings: int, embedding_dim: int, budget: int) -> Suggestion:
    """The options of one method with the most parameters within the budget."""

    def count(options: Options) -> int:
        return _count(method, num_embeddings, embedding_dim, options)

    spec = find_spec(method)
    found = largest_within(spec.search_grids(num_embeddings, embedding_dim), count, budget)
    if found is None:
        remark = "no suggestion: the vocabulary or the dimension is too small"
        return Suggestion(method, None, None, None, remark)
    if isinstance(found, int):
        return Suggestion(method, None, found, None, f"needs at least {found:,} parameters")
    grid, step = found
    options = grid.options_at(step)
    finer = grid.options_at(step + 1) if step + 1 < grid.steps else None
    return Suggestion(method, options, count(options), finer, spec.grid_choice)


def _count(method: str, num_embeddings: int, embedding_dim: int, options: Options) -> int:
    """The size of a method that is compared with the budget."""
    num_parameters(
        method, num_embeddings=num_embeddings, embedding_dim=embedding_dim, **options
    )  # checks the sizes
    return (
        find_spec(method)
        .resolve(num_embeddings, embedding_dim, options)
        .search_size(num_embeddings, embedding_dim)
    )


def _lines(suggestion: Suggestion, dense: int) -> Iterator[str]:
    """What is printed about one method."""
    if suggestion.options is None or suggestion.count is None:
        yield f"# {suggestion.method}: {suggestion.remark}"
        return
    factor = dense / max(suggestion.count, 1)
    yield f"# {suggestion.method}: {suggestion.count:,} parameters, {factor:.2f}x; {suggestion.remark}"
    yield f"embedding: {as_yaml(suggestion.method, suggestion.options)}"


def as_yaml(method: str, options: Options) -> str:
    """A method and its options as YAML in one line, to stand behind ``embedding:``."""
    # JSON is YAML for numbers, lists and booleans; names and words go without quotes.
    values = [f"method: {method}"]
    values += [f"{name}: {v if isinstance(v, str) else json.dumps(v)}" for name, v in options.items()]
    return "{" + ", ".join(values) + "}"


def _as_object(suggestion: Suggestion, dense: int) -> dict[str, object]:
    """A suggestion for JSON."""
    fits = suggestion.options is not None and suggestion.count is not None
    return {
        "method": suggestion.method,
        "options": suggestion.options,
        "count": suggestion.count,
        "compression": round(dense / max(suggestion.count or 1, 1), 2) if fits else None,
        "remark": suggestion.remark,
    }


def suggestion_page(vocab_sizes: Sequence[int], dims: Sequence[int], budget: str | None = None) -> str:
    """The page for all combinations of vocabulary sizes V and dimensions D.

    Args:
        vocab_sizes, dims: to choose from.
        budget: number of parameters that the page starts with; an eighth of the plain table if not given.

    Raises:
        OptionError: V or D is impossible.
        UserError: the budget is not a number.
    """
    shapes = [(size, dim) for size in vocab_sizes for dim in dims]
    for size, dim in shapes:
        num_parameters("standard", num_embeddings=size, embedding_dim=dim)  # rejects impossible sizes
    if budget is not None:
        read_budget(budget)
    tasks = [(size, dim, method) for size, dim in shapes for method in methods()]
    grids: dict[str, dict[str, list[list[Point]]]] = {}
    for size, dim, method in tqdm(tasks, "sizes", disable=None, leave=False):
        found = [list(points(method, size, dim, grid)) for grid in find_spec(method).search_grids(size, dim)]
        grids.setdefault(f"{size} {dim}", {})[method] = found
    data = {
        "vocab": vocab_sizes,
        "dim": dims,
        "stores": STORES,
        "notes": {method: [find_spec(method).summary, find_spec(method).paper] for method in methods()},
        "budget": budget,
        "grids": grids,
    }
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return template.replace("/*DATA*/", json.dumps(data, separators=(",", ":")).replace("</", "<\\/"))


def points(method: str, num_embeddings: int, embedding_dim: int, grid: SearchGrid) -> Iterator[Point]:
    """Options from small to large on a search grid: YAML, parameters, and bytes in each of `STORES`."""
    for step in spread(grid.steps):
        options = grid.options_at(step)
        with torch.device("meta"):
            embedding = build(method, num_embeddings=num_embeddings, embedding_dim=embedding_dim, **options)
        count = embedding.options.search_size(num_embeddings, embedding_dim)
        yield [as_yaml(method, options), count, *(-(-stored_bits(embedding, store) // 8) for store in STORES)]


def spread(steps: int) -> list[int]:
    """At most `PAGE_STEPS` of the numbers below `steps`, with first and last, closer together at first."""
    return sorted(
        {min(round(steps ** (number / (PAGE_STEPS - 1))), steps) - 1 for number in range(PAGE_STEPS)}
    )
