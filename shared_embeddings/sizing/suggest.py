"""Which options of each method meet a budget of parameters."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from shared_embeddings.registry import expected_count, methods

Options = dict[str, object]

_MULTIPLIERS = {"": 1, "k": 10**3, "m": 10**6}


class Ladder(NamedTuple):
    """Options of one method from coarse to fine: each step has at least as many parameters as the one before.

    Attributes:
        steps: how many steps there are, at least one.
        options_at: the options of a step, counted from 0.
    """

    steps: int
    options_at: Callable[[int], Options]


class Strategy(NamedTuple):
    """How the options of a method are chosen.

    Attributes:
        choice: the choice in a few words.
        ladders: gives, for V and D, the ladders in order of preference; none where the sizes allow none.
    """

    choice: str
    ladders: Callable[[int, int], Iterator[Ladder]]


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """What one method can do within a budget.

    Attributes:
        method: the method.
        options: its options, or None where none meet the budget.
        count: the parameters with these options, or the least that the method can do with.
        finer: the next step beyond the options, which breaks the budget; None at the end of a ladder.
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
        ValueError: it is no such number, or less than one parameter.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\+?\d+)?)\s*([kKmM]?)\s*", text)
    if match is None:
        raise ValueError(f"budget '{text}' is no number of parameters; write for example 2M, 500k or 1.5e6")
    budget = float(match[1]) * _MULTIPLIERS[match[2].lower()]
    if not 1 <= budget < 1e15:
        raise ValueError(f"budget '{text}' must be at least one parameter and less than 1e15; change it")
    return int(budget)


def suggest(num_embeddings: int, embedding_dim: int, budget: int) -> list[Suggestion]:
    """For every registered method, the options with the most parameters that are within `budget`.

    Raises:
        OptionError: V or D is impossible.
    """
    # This refuses sizes that no method can have.
    _count("standard", num_embeddings, embedding_dim, {})
    return [_suggest_one(method, num_embeddings, embedding_dim, budget) for method in methods()]


def describe_suggestions(num_embeddings: int, embedding_dim: int, budget: str, as_json: bool = False) -> str:
    """The suggestions, each as a line to paste into a configuration, or as a JSON object.

    Raises:
        ValueError: the budget is no number; OptionError: V or D is impossible.
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


def _suggest_one(method: str, num_embeddings: int, embedding_dim: int, budget: int) -> Suggestion:
    """The step with the most parameters within the budget, on the first ladder that has one."""
    strategy = STRATEGIES.get(method)
    if strategy is None:
        return Suggestion(method, None, None, None, "no suggestion: its options are not searched")
    least: int | None = None
    for ladder in strategy.ladders(num_embeddings, embedding_dim):
        counts = _Counts(method, num_embeddings, embedding_dim, ladder)
        if counts.at(0) <= budget:
            step = _last_within(counts, budget)
            finer = ladder.options_at(step + 1) if step + 1 < ladder.steps else None
            return Suggestion(method, ladder.options_at(step), counts.at(step), finer, strategy.choice)
        least = counts.at(0) if least is None else min(least, counts.at(0))
    if least is None:
        return Suggestion(
            method, None, None, None, "no suggestion: the vocabulary or the dimension is too small"
        )
    return Suggestion(method, None, least, None, f"needs at least {least:,} parameters")


class _Counts(NamedTuple):
    """The parameters of the steps of a ladder."""

    method: str
    num_embeddings: int
    embedding_dim: int
    ladder: Ladder

    def at(self, step: int) -> int:
        """The parameters of one step."""
        return _count(self.method, self.num_embeddings, self.embedding_dim, self.ladder.options_at(step))


def _last_within(counts: _Counts, budget: int) -> int:
    """The last step within the budget, by bisection; the first one must be."""
    low, high = 0, counts.ladder.steps
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if counts.at(middle) <= budget else (low, middle)
    return low


def _count(method: str, num_embeddings: int, embedding_dim: int, options: Options) -> int:
    """The closed form."""
    return expected_count(method, num_embeddings=num_embeddings, embedding_dim=embedding_dim, **options)


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


# How each method's options are chosen.


def _standard(num_embeddings: int, embedding_dim: int) -> Iterator[Ladder]:
    """A single step: there is nothing to choose."""
    yield Ladder(1, lambda step: {})


def _ranks(num_embeddings: int, embedding_dim: int) -> Iterator[Ladder]:
    """All ranks."""
    yield Ladder(embedding_dim, lambda step: {"rank": step + 1})


def _adaptive(num_embeddings: int, embedding_dim: int) -> Iterator[Ladder]:
    """Three bands, the second twice the first, as in most rows of UnClE's table 12, and its two factors."""
    for factor in (4, 8):
        if embedding_dim >= factor**2 and num_embeddings > 3:
            yield Ladder((num_embeddings - 1) // 3, _cutoffs_by_step(factor))


def _cutoffs_by_step(factor: int) -> Callable[[int], Options]:
    """Bands of h, 2 h and all other words, for every step a larger h."""
    return lambda step: {"cutoffs": [step + 1, 3 * (step + 1)], "factor": factor}


def _define(num_embeddings: int, embedding_dim: int) -> Iterator[Ladder]:
    """Units in the proportions of the smallest one of the paper's table 1a, k = 4 n and N = 3."""
    # Hosts of any kind can use an output that is tied to the whole unit.
    if embedding_dim >= 4:
        yield Ladder(
            embedding_dim // 4,
            lambda step: {
                "map_dim": 4 * (step + 1),
                "expand_dim": 16 * (step + 1),
                "depth": 3,
                "max_groups": 4,
                "output": "table",
            },
        )


def _alone(num_embeddings: int, embedding_dim: int) -> Iterator[Ladder]:
    """All widths up to one that is larger than a plain table."""
    yield Ladder(num_embeddings, lambda step: {"hidden_dim": step + 1})


def _uncle(num_embeddings: int, embedding_dim: int) -> Iterator[Ladder]:
    """A bit less than a tenth of V as classes (appendix A.4), and all widths of the unique part."""
    classes = max(num_embeddings // 11, 1)
    if embedding_dim > 1:
        yield Ladder(
            embedding_dim - 1,
            lambda step: {"unique_dim": step + 1, "num_classes": classes, "random_classes": True},
        )


def _group_reduce(num_embeddings: int, embedding_dim: int) -> Iterator[Ladder]:
    """As many groups as in Distilled Embedding, and all ranks up to the default of `max_rank`."""
    groups = min(10, num_embeddings)
    yield Ladder(max(embedding_dim // 2, 1), lambda step: {"num_groups": groups, "min_rank": step + 1})


def _tensor_train(num_embeddings: int, embedding_dim: int) -> Iterator[Ladder]:
    """Three cores, as in Distilled Embedding, and all ranks."""
    words, dims = three_factors_above(num_embeddings), three_factors(embedding_dim)
    # A larger inner rank than this adds nothing to what the product can be.
    highest = min(words[0] * dims[0], words[2] * dims[2])
    yield Ladder(
        highest, lambda step: {"vocab_shape": list(words), "dim_shape": list(dims), "rank": step + 1}
    )


def _structured(num_embeddings: int, embedding_dim: int) -> Iterator[Ladder]:
    """Distilled Embedding's 32 groups or the next smaller divisor of D, and all numbers of clusters."""
    groups = max(number for number in range(1, 33) if embedding_dim % number == 0)
    yield Ladder(num_embeddings, lambda step: {"num_groups": groups, "num_clusters": step + 1})


def _compositional_code(num_embeddings: int, embedding_dim: int) -> Iterator[Ladder]:
    """Codebooks of 16 entries, up to as many as make a plain table."""
    yield Ladder(max(num_embeddings // 16, 1), lambda step: {"num_codebooks": step + 1, "codebook_size": 16})


def three_factors_above(number: int) -> tuple[int, int, int]:
    """Three factors, ascending and alike, whose product is `number` or little more."""
    root = number ** (1 / 3)
    lowest, highest = max(int(0.7 * root), 1), math.ceil(1.4 * root)
    pairs = product(range(lowest, highest + 1), repeat=2)
    shapes = {tuple(sorted((a, b, math.ceil(number / (a * b))))) for a, b in pairs}
    a, b, c = min(shapes, key=lambda shape: (math.prod(shape), shape[2] - shape[0]))
    return a, b, c


def three_factors(number: int) -> tuple[int, int, int]:
    """Three factors, ascending, whose product is `number`, the largest as small as possible."""
    lower = [factor for factor in range(1, math.isqrt(number) + 1) if number % factor == 0]
    divisors = sorted({*lower, *(number // factor for factor in lower)})
    pairs = product(divisors, repeat=2)
    shapes = {tuple(sorted((a, b, number // (a * b)))) for a, b in pairs if number % (a * b) == 0}
    a, b, c = min(shapes, key=lambda shape: (shape[2], shape[2] - shape[0]))
    return a, b, c


STRATEGIES = {
    "standard": Strategy("the table itself", _standard),
    "projective": Strategy("the largest rank", _ranks),
    "funnel": Strategy("the largest rank", _ranks),
    "adaptive": Strategy(
        "bands of h, 2 h and all other words with the largest h; factor 4, or else 8", _adaptive
    ),
    "define": Strategy("the largest n in steps of 4, k = 4 n, N = 3 and 4 groups", _define),
    "alone": Strategy("the largest H", _alone),
    "uncle": Strategy(
        "V / 11 classes, the largest unique part; put your class file in place of random classes",
        _uncle,
    ),
    "group_reduce": Strategy(
        "10 groups, the largest minimum rank; a fit to token counts changes the size", _group_reduce
    ),
    "tensor_train": Strategy("three factors alike with little waste, the largest rank", _tensor_train),
    "structured": Strategy("up to 32 groups, the largest number of clusters; codes come on top", _structured),
    "compositional_code": Strategy("codebooks of 16, as many as fit; codes come on top", _compositional_code),
}
