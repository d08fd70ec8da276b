"""The table that compares ways to compress one trained model: fitted, finetuned, distilled, from scratch.

A line combines the rows ``X``, ``X_fitted``, ``X_finetuned`` and ``X_distilled``; plain tables in networks of
several sizes have separate lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recipes.common.results import Record, embedding_bits
from recipes.common.table import NOT_RUN, describe_options, is_baseline
from recipes.common.tools import option_value

# For plain tables: the one that all others are fitted to, and those of smaller networks.
NONE = "–"
STAGES = {"_fitted": "fitted", "_finetuned": "finetuned", "_distilled": "distilled", "": "from scratch"}
# The option for the length of a training, with its unit.
LENGTHS = {"train_steps": "steps", "epochs": "epochs"}


def comparison_table(records: Sequence[Record], metric: str) -> str:
    """A Markdown table, one line per method and size; ends in a newline.

    Args:
        records: of `records_of`, the baseline first.
        metric: ``bleu`` or ``perplexity``.
    """
    by_name = {record["row"]: record for record in records}
    plain = next((record for record in records if is_baseline(record["row"])), None)
    titles = [
        "row",
        "options",
        "times smaller",
        "bits per weight",
        "total parameters",
        *STAGES.values(),
        "finetuned for",
    ]
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    for name in sorted(_lines(by_name), key=lambda name: -_size(name, by_name)):
        group = {ending: by_name.get(f"{name}{ending}") for ending in STAGES}
        there = [record for record in group.values() if record is not None]
        scores = [NONE if record is None else _score(record, metric) for record in group.values()]
        lasting = group["_finetuned"] or group["_distilled"] or there[0]
        cells = [name, *_sizes(there, plain), *scores, _length(lasting)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _size(name: str, by_name: Mapping[str, Record]) -> float:
    """The bits of the embedding of a line's rows; none measured counts as zero."""
    records = (by_name.get(f"{name}{ending}") for ending in STAGES)
    return max(
        (embedding_bits(record["counts"]) for record in records if record and record["counts"]), default=0
    )


def _lines(by_name: Mapping[str, Record]) -> list[str]:
    """The common part of the names of each line's rows, in the order of their first rows.

    Lines are of rows that start from a trained one, and of plain tables.
    """
    lines: dict[str, bool] = {}
    for name, record in by_name.items():
        base = next(
            (name.removesuffix(ending) for ending in STAGES if ending and name.endswith(ending)), name
        )
        is_plain = (record["config"].get("embedding") or {}).get("method") == "standard"
        starts = record["config"].get("fit") or record["config"].get("distill")
        lines[base] = lines.get(base, False) or is_plain or bool(starts)
    return [base for base, is_shown in lines.items() if is_shown]


def _score(record: Record, metric: str) -> str:
    """The score of a row."""
    return f"{record['metrics'][metric]:.1f}" if metric in record["metrics"] else NOT_RUN


def _sizes(records: Sequence[Record], plain: Record | None) -> list[str]:
    """The options of rows of one size, how many times fewer bits they store, bits per weight, parameters."""
    measured = next((record for record in records if record["counts"]), None)
    options = describe_options({"config": {"embedding": records[0]["config"].get("embedding")}})
    store = (records[0]["config"].get("fit") or {}).get("store")
    options = f"{options}, numbers in {store}" if store else options
    if measured is None:
        return [options, NOT_RUN, NOT_RUN, NOT_RUN]
    counts = measured["counts"]
    total = f"{counts['total'] / 1e6:.2f} M"
    if plain is None or not plain["counts"]:
        return [options, NOT_RUN, NOT_RUN, total]
    smaller = embedding_bits(plain["counts"]) / embedding_bits(counts)
    return [options, NONE if measured is plain else f"{smaller:.1f}x", f"{32 / smaller:.2f}", total]


def _length(record: Record) -> str:
    """How long a line's rows were finetuned, by the results or the settings of one of them."""
    if not record["config"].get("distill"):
        return NONE
    settings = {**record["config"], **(record["config"].get("train") or {})}
    for key, unit in LENGTHS.items():
        given = option_value(record["config"].get("train_options", ()), key)
        if given or key in settings:
            settings[key] = int(given or settings[key])
            return f"{settings[key]:,} {unit if settings[key] != 1 else unit.removesuffix('s')}"
    return NOT_RUN
