"""The measures of results, their mean over seeds, and how they are printed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

NOT_RUN = "not run"


class Measure(NamedTuple):
    """A measure: its title, decimals, and whether higher is better."""

    title: str
    decimals: int
    higher_is_better: bool


class Spread(NamedTuple):
    """A measure over seeds; `deviation` is that of the sample, None of a single run."""

    mean: float
    deviation: float | None
    runs: int

    def describe(self, decimals: int) -> str:
        """Mean, deviation and number of runs."""
        if self.deviation is None:
            return f"{self.mean:.{decimals}f}"
        return f"{self.mean:.{decimals}f} ± {self.deviation:.{decimals}f} ({self.runs} seeds)"


_ROUGE = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
_LENGTH = "length_"
_RHO = "rho "
# In the order of importance: a recipe is judged by the first that its results have.
_PLAIN = {
    "bleu": Measure("BLEU", 2, True),
    "perplexity": Measure("test perplexity", 2, False),
    "valid_perplexity": Measure("validation perplexity", 2, False),
    "pointer_perplexity": Measure("test perplexity with pointer", 2, False),
    "valid_pointer_perplexity": Measure("validation perplexity with pointer", 2, False),
    "chrf": Measure("chrF", 2, True),
    "relative_error": Measure("relative error", 3, False),
}


def measure(key: str) -> Measure | None:
    """The measure of a key of `flatten` or of a row's ``paper``; None for other figures."""
    name, _, length = key.partition("_")
    if name in _ROUGE:
        return Measure(f"{_ROUGE[name]} recall" + (f", {length} bytes" if length else ""), 2, True)
    if key.startswith(_RHO):
        return Measure(f"Spearman's rho, {key.removeprefix(_RHO)}", 3, True)
    return _PLAIN.get(key)


def flatten(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that models are judged by, of the ``metrics`` of a results file.

    ROUGE recall of headlines at a length is ``rouge1_75``, Spearman's rho of a set is ``rho SET``.
    """
    flat = {key: metrics[key] for key in _PLAIN if key in metrics}
    for key, scores in metrics.items():
        if key.startswith(_LENGTH) and isinstance(scores, Mapping):
            recall = scores.get("recall", {})
            length = key.removeprefix(_LENGTH)
            flat |= {f"{name}_{length}": recall[name].get("mean") for name in _ROUGE if name in recall}
    similarity = metrics.get("similarity")
    if isinstance(similarity, Mapping):
        flat |= {f"{_RHO}{name}": found.get("rho") for name, found in similarity.items()}
    return {key: float(value) for key, value in flat.items() if isinstance(value, (int, float))}


def spreads(all_metrics: Iterable[Mapping[str, float]]) -> dict[str, Spread]:
    """Mean and deviation of each measure that all runs have."""
    runs = list(all_metrics)
    if not runs:
        return {}
    shared = [key for key in runs[0] if all(key in run for run in runs)]
    return {key: _spread([run[key] for run in runs]) for key in shared}


def _spread(values: list[float]) -> Spread:
    """The spread of the values of several runs."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), deviation, len(values))


def chosen(keys: Iterable[str]) -> str | None:
    """The measure among `keys` that a recipe is judged by: of those without an order, the first."""
    known = [key for key in keys if measure(key) is not None]
    order = list(_PLAIN)
    # Between the measures of whole models and those that only say how far vectors are apart.
    other = order.index("relative_error") - 0.5
    return min(known, key=lambda key: order.index(key) if key in _PLAIN else other, default=None)


def in_order(keys: Iterable[str]) -> list[str]:
    """The keys that have a measure, the most important first."""
    order = {key: number for number, key in enumerate(_PLAIN)}
    return sorted(filter(measure, keys), key=lambda key: order.get(key, len(order)))


def of_paper(key: str, found: Mapping[str, Spread]) -> Spread | None:
    """Our figure for a paper's: the same measure, or the only one of ROUGE at some length."""
    if key in found:
        return found[key]
    near = [name for name in found if name.startswith(f"{key}_") and key in _ROUGE]
    return found[near[0]] if len(near) == 1 else None


def millions(count: float) -> str:
    """A count of parameters in millions."""
    return f"{count / 1e6:.2f} M" if count >= 1e5 else f"{count / 1e6:.4f} M"
