"""The table that compares ways to compress one trained model: fitted, trained on, distilled, from scratch.

``python -m recipes.common.comparison --results runs/RECIPE --readme recipes/RECIPE/README.md`` puts it
between ``<!-- BEGIN comparison -->`` and ``<!-- END comparison -->``. A line is made of the rows ``X``,
``X_fitted``, ``X_finetuned`` and ``X_distilled``, and of plain tables in networks of several sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recipes.common.errors import UserError, run_main
from recipes.common.results import read_results
from recipes.common.table import NOT_RUN, Record, describe_options, is_baseline, rows_of, update_readme
from recipes.common.training import option_value
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.path_options import PathOption

MARKER = "comparison"
# Not for a plain table: it is the one that all others are fitted to, or a smaller network.
NONE = "–"
STAGES = {"_fitted": "fitted", "_finetuned": "trained on", "_distilled": "distilled", "": "from scratch"}
METRICS = {"bleu": "BLEU", "perplexity": "test perplexity"}
# What a row's training lasts, in its options or in those it was trained with.
LENGTHS = {"train_steps": "steps", "epochs": "epochs"}


def comparison_table(records: Sequence[Record], metric: str) -> str:
    """A Markdown table, one line per method and size; ends in a newline.

    Args:
        records: of `rows_of`, the baseline first.
        metric: out of `METRICS`.
    """
    by_name = {record["row"]: record for record in records}
    plain = next((record for record in records if is_baseline(record["row"])), None)
    titles = ["row", "options", "stored embedding", "total parameters", *STAGES.values(), "trained on for"]
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    for name in _lines(by_name):
        group = {ending: by_name.get(f"{name}{ending}") for ending in STAGES}
        there = [record for record in group.values() if record is not None]
        scores = [NONE if record is None else _score(record, metric) for record in group.values()]
        lasting = group["_finetuned"] or group["_distilled"] or there[0]
        cells = [name, *_sizes(there, plain), *scores, _length(lasting)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _lines(by_name: Mapping[str, Record]) -> list[str]:
    """What the rows of each line have in common: of those that start from a trained one, and of plain tables.

    Lines are in the order of their first rows.
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
    """What a row has reached."""
    return f"{record['metrics'][metric]:.1f}" if metric in record["metrics"] else NOT_RUN


def _sizes(records: Sequence[Record], plain: Record | None) -> list[str]:
    """The options of rows of one size, how many times fewer bits they store, and their parameters in all."""
    measured = next((record for record in records if record["counts"]), None)
    options = describe_options({"config": {"embedding": records[0]["config"].get("embedding")}})
    if measured is None:
        return [options, NOT_RUN, NOT_RUN]
    counts = measured["counts"]
    if plain is None or not plain["counts"]:
        return [options, NOT_RUN, f"{counts['total'] / 1e6:.2f} M"]
    times = _embedding_bits(plain["counts"]) / _embedding_bits(counts)
    smaller = NONE if measured is plain else f"{times:.1f}x smaller"
    return [options, smaller, f"{counts['total'] / 1e6:.2f} M"]


def _embedding_bits(counts: Mapping[str, float]) -> float:
    """The bits that input and output take, codes and other integers included; the rest is in float32."""
    return counts["stored_bits"] - 32 * counts["rest"]


def _length(record: Record) -> str:
    """For how long a line's rows were trained on, as the results or else the configuration of one say."""
    if not (record["config"].get("distill") or record["config"].get("fit")):
        return NONE
    settings = {**record["config"], **(record["config"].get("train") or {})}
    for key, unit in LENGTHS.items():
        given = option_value(record["config"].get("train_options", ()), key)
        if given or key in settings:
            settings[key] = int(given or settings[key])
            return f"{settings[key]:,} {unit if settings[key] != 1 else unit.removesuffix('s')}"
    return NOT_RUN


def main(arguments: Sequence[str]) -> None:
    """Put the comparison of ways to compress one trained model into a recipe's README."""
    parser = Parser("python -m recipes.common.comparison", description=main.__doc__)
    parser.add_argument(
        "--results", type=PathOption.SOURCE, required=True, help="folder of the recipe's results"
    )
    parser.add_argument(
        "--readme", type=PathOption.UPDATED, required=True, help="README with the two markers"
    )
    parser.add_argument("--quality", choices=sorted(METRICS), default="bleu", help="(default: %(default)s)")
    parser.add_argument("--rows", default="*", help="only rows of such names, for instance 'small_*'")
    options = parser.parse_args(arguments)
    records = rows_of(options.readme.parent / "configs", read_results(options.results), options.rows)
    if not any(record["row"].endswith("_fitted") for record in records):
        raise UserError(f"{options.readme}: no row beside it that is called {options.rows} ends in _fitted")
    table = comparison_table(records, options.quality)
    update_readme(options.readme, MARKER, f"{METRICS[options.quality]}:\n\n{table}")
    measured = sum(bool(record["metrics"]) for record in records)
    print(f"{options.readme}: {measured} of {len(records)} rows measured")


if __name__ == "__main__":
    raise SystemExit(run_main("comparison", main))
