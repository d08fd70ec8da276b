"""What every method takes within a budget, as an HTML page to play with that works offline."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib import resources

import torch
from tqdm import tqdm

from shared_embeddings.checkpoints.storage import STORES
from shared_embeddings.method import SearchGrid
from shared_embeddings.registry import build, method_class, methods, num_parameters, search_size
from shared_embeddings.sizing.accounting import stored_bits
from shared_embeddings.sizing.suggest import as_yaml, read_budget

# Steps of each search grid; the command `suggest` searches all of them.
STEPS = 100
Point = list[str | int]


def suggestion_page(vocab_sizes: Sequence[int], dims: Sequence[int], budget: str | None = None) -> str:
    """The page for all combinations of vocabulary sizes V and dimensions D.

    Args:
        vocab_sizes, dims: to choose from.
        budget: number of parameters that the page starts with; an eighth of the plain table if not given.

    Raises:
        OptionError: V or D is impossible.
        ValueError: the budget is not a number.
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
            list(points(method, size, dim, grid)) for grid in method_class(method).search_grids(size, dim)
        ]
        grids.setdefault(f"{size} {dim}", {})[method] = found
    data = {
        "vocab": vocab_sizes,
        "dim": dims,
        "stores": STORES,
        "notes": {method: [method_class(method).summary, method_class(method).paper] for method in methods()},
        "budget": budget,
        "grids": grids,
    }
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return template.replace("/*DATA*/", json.dumps(data, separators=(",", ":")).replace("</", "<\\/"))


def points(method: str, num_embeddings: int, embedding_dim: int, grid: SearchGrid) -> Iterator[Point]:
    """Options from small to large on a search grid: YAML, parameters, and bytes in each of `STORES`."""
    sizes = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
    for step in spread(grid.steps):
        options = grid.options_at(step)
        with torch.device("meta"):
            embedding = build(method, **sizes, **options)  # type: ignore[arg-type]
        count = search_size(method, **sizes, **options)  # type: ignore[arg-type]
        yield [as_yaml(method, options), count, *(-(-stored_bits(embedding, store) // 8) for store in STORES)]


def spread(steps: int) -> list[int]:
    """At most `STEPS` of the numbers below `steps`, with the first and the last, closer together at first."""
    return sorted({min(round(steps ** (number / (STEPS - 1))), steps) - 1 for number in range(STEPS)})
