"""The tables of READMEs, made from results: every number comes from a results file. A row without one is in
the table if its paper has figures, with "not run"; the others are named below the table.

``readme`` in ``rows.yaml`` lists the tables of a recipe; ``recipes/README.md`` explains the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd

from nmt.length_control import LENGTH_DEPENDENT
from recipes.common.ngrams import bits_of_a_number, ngram_plot, series, table_bits
from recipes.common.plot import quality_size_plot
from recipes.common.recipe import FILE, Recipe, Row, find_recipe, read_file
from recipes.common.results import (
    BASELINE,
    SEED,
    Record,
    describe_options,
    embedding_bits,
    find_measure,
    flatten,
    is_baseline,
    natural,
    read_results,
    times_smaller,
)
from recipes.common.results import FILE as RESULTS
from recipes.common.tools import option_value
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_text
from shared_embeddings.utils.paths import existing_path

NOT_RUN, NONE = "not run", "–"


class Column(NamedTuple):
    """A column: its title, what it shows of a record, and whether it is known before a run."""

    title: str
    value: Callable[[Record], str]
    always: bool = False


def in_units(count: float, unit: str = "") -> str:
    """Format a number of parameters, or of a `unit`, in thousands or millions."""
    return f"{count / 1e6:.2f} M{unit}" if count >= 1e6 else f"{count / 1e3:.1f} k{unit}"


def number(form: str, *keys: str, factor: float = 1) -> Callable[[Record], str]:
    """Return how a column shows the number of a record at nested keys; `NONE` where there is none."""

    def show(record: Record) -> str:
        value: Any = record
        for key in keys:
            value = None if value is None else value[key]
        # Zero has no sign.
        return NONE if value is None else form.format(factor * value).replace("-0.0000", "0.0000")

    return show


def _score(title: str, metric: str) -> Column:
    """Return the column of a metric, with the range of several seeds."""

    def text(record: Record) -> str:
        scores = record.get("scores", {}).get(metric) or [record["metrics"][metric]]
        mean, least, most = (f"{function(scores):.1f}" for function in (fmean, min, max))
        return mean if least == most else f"{mean} ({least} to {most})"

    return Column(title, text)


def _in_paper(title: str, metric: str) -> Column:
    return Column(title, lambda record: str((record.get("paper") or {}).get(metric, NONE)), always=True)


def _difference(metric: str) -> Column:
    show = number("{:+.1f}", "metrics", f"{metric}_difference")
    return Column("difference", lambda record: NONE if is_baseline(record["row"]) else show(record))


def describe_ngrams(record: Record) -> str:
    """Return the options of a row's table of n-grams; `NONE` without one."""
    options = record["config"]["train"]
    names = [name for name in options if name.startswith("ngram_")]
    return ", ".join(f"{name.removeprefix('ngram_')} {options[name]}" for name in names) or NONE


_loss = number("{:+.3f}", "metrics", "perplexity_difference")


def _cost(title: str, metric: str, factor: float = 1) -> Column:
    show = number("{:.0f}", "metrics", metric, factor=factor)
    return Column(title, lambda record: show(record) + " (GPU)" * record.get("device", "").startswith("cuda"))


COLUMNS = {
    "row": Column("config", lambda r: r["row"], always=True),
    "method": Column("method", lambda r: method_of(r), always=True),
    "options": Column("options", describe_options, always=True),
    "embedding": Column("embedding parameters", lambda r: in_units(r["counts"]["embedding"])),
    "stored": Column("stored", lambda r: in_units(embedding_bits(r["counts"]) / 8, "B")),
    "smaller": Column("times smaller", lambda r: f"{times_smaller(r['counts']):.1f}x"),
    "total": Column("total parameters", lambda r: in_units(r["counts"]["total"])),
    "epochs": Column("epochs", lambda r: str(r["config"]["train"]["epochs"]), always=True),
    "ngrams": Column("n-grams", describe_ngrams, always=True),
    "codes": Column("codes", series, always=True),
    "ngram_bits": Column("bits of a number", lambda r: f"{bits_of_a_number(r):.2f}"),
    "ngram_bytes": Column("table of n-grams", lambda r: in_units(table_bits(r) / 8, "B")),
    "bleu": _score("BLEU", "bleu"),
    "difference": _difference("bleu"),
    "chrf": _score("chrF", "chrf"),
    "valid_perplexity": _score("validation perplexity", "valid_perplexity"),  # lowest in training
    "perplexity": _score("test perplexity", "perplexity"),
    "perplexity_difference": _difference("perplexity"),
    "loss": Column("loss", lambda r: _loss(r) if r["config"].get("fit") else NONE),
    "pointer_perplexity": _score("with pointer", "pointer_perplexity"),
    "paper_perplexity": _in_paper("the paper's", "perplexity"),
    "paper_pointer_perplexity": _in_paper("the paper's with pointer", "pointer_perplexity"),
    "training_ms": _score("training, ms per batch", "training_ms"),
    "inference_ms": _score("inference, ms per batch", "inference_ms"),
    "paper_training_ms": _in_paper("the paper's training, ms per batch", "training_ms"),
    "paper_inference_ms": _in_paper("the paper's inference, ms per batch", "inference_ms"),
    "minutes": _cost("training minutes", "training_seconds", 1 / 60),
    "speed": _cost("tokens/s", "tokens_per_second"),
    "date": Column("date", lambda r: r["date"][:10]),
}
_SIZES = ("row", "method", "options", "embedding", "stored", "smaller", "total")
_COSTS = ("minutes", "speed", "date")
# The columns of a recipe's table, by what its models are judged by.
RECIPE_COLUMNS = {
    "bleu": (*_SIZES, "bleu", "difference", "chrf", *_COSTS),
    "perplexity": (*_SIZES, "valid_perplexity", "perplexity", "perplexity_difference", *_COSTS),
}


def method_of(record: Record) -> str:
    """Return the method of a row's embedding."""
    return str((record["config"].get("embedding") or {}).get("method", BASELINE))


def main(arguments: Sequence[str]) -> None:
    """Write the tables of a recipe into its README, and plot its results."""
    parser = Parser("python -m recipes table", description=main.__doc__)
    parser.add_argument("task", help="a recipe")
    parser.add_argument(
        "--results",
        type=existing_path,
        help="results.jsonl, or a folder with one, such as runs/TASK (default: the recipe's)",
    )
    options = parser.parse_args(arguments)
    recipe = find_recipe(options.task)
    if options.results is not None:
        read_results(options.results)  # fails where there are none
    print(update_tables(recipe, options.results or recipe.folder / RESULTS, recipe.page))


def update_tables(recipe: Recipe, results: Path, readme: Path) -> str:
    """Write all tables of a recipe into a README and draw its picture; return how many rows are measured.

    The results are a ``results.jsonl`` or a folder with one; without it, no row was run.
    """
    tables = read_file(recipe.folder / FILE).get("readme", [])
    if not tables:
        raise UserError(f"{recipe.name} has no tables that this command can make; eval.sh makes them")
    measured = read_results(results) if results.exists() else []
    for table in tables:
        records = records_of(recipe.rows, measured, table.get("rows", "*"))
        if table.get("from_scratch"):
            records = [record for record in records if recipe.rows[record["row"]].teacher is None]
        idle = [record["row"] for record in records if not record["metrics"] and not record["paper"]]
        records = [record for record in records if record["row"] not in idle]
        kind, quality = table.get("table", "results"), table.get("quality", "")
        if kind == "headlines":
            text = headline_table(recipe, records)
        elif kind == "comparison":
            measure = find_measure(quality)
            text = f"{measure.title if measure else quality}:\n\n{comparison_table(records, quality)}"
        else:
            names = table["columns"].split(",") if "columns" in table else RECIPE_COLUMNS[quality]
            text = markdown_table(records, names) if records else ""
        if idle:
            text = f"{text}\nNot run: {', '.join(f'`{row}`' for row in idle)}.".lstrip()
        update_readme(readme, table["marker"], text)
        run = [record for record in records if record["metrics"]]
        if table.get("picture") and run:
            draw = ngram_plot if kind == "ngrams" else quality_size_plot
            draw(run, readme.with_name(table["picture"]), quality, recipe.title)
    known = sum(record["row"] in recipe.rows for record in measured)
    return f"{readme}: {known} of {len(recipe.rows)} rows measured"


def update_readme(readme: str | Path, marker: str, text: str) -> None:
    """Replace the text between ``<!-- BEGIN marker -->`` and ``<!-- END marker -->``, and nothing else."""
    path = Path(readme)
    begin, end = f"<!-- BEGIN {marker} -->", f"<!-- END {marker} -->"
    head, has_begin, rest = path.read_text(encoding="utf-8").partition(begin)
    _, has_end, tail = rest.partition(end)
    if not has_begin or not has_end:
        raise UserError(f"{path}: has no lines {begin} and {end}; add them")
    write_text(path, f"{head}{begin}\n{text.rstrip()}\n{end}{tail}")


def records_of(rows: Mapping[str, Row], results: Iterable[Record], pattern: str = "*") -> list[Record]:
    """Return a record per row whose name matches: its results, or that it was not run; with the ``paper``'s
    figures and the ``scores`` of each seed.

    Metrics are means over the seeds of a row. The baseline comes first, then the others by name, numbers
    counted as numbers.
    """
    measured = {record["row"]: record for record in results}
    records = []
    for name, row in rows.items():
        if SEED in name or fnmatchcase(name, pattern.lstrip("!")) == pattern.startswith("!"):
            continue
        missing = {"row": name, "config": row.settings(), "counts": {}, "metrics": {}}
        record = measured.get(name, missing)
        seeds = [other for key, other in measured.items() if key.startswith(f"{name}{SEED}")]
        records.append({**mean_record([record, *seeds]), "paper": row.paper})
    return sorted(records, key=lambda record: (not is_baseline(record["row"]), natural(record["row"])))


def mean_record(records: Sequence[Record]) -> Record:
    """Return the first of the records of several seeds with the mean metrics and the ``scores`` of all."""
    measured = [record["metrics"] for record in records if record["metrics"]]
    scores = pd.DataFrame([flatten(metrics) for metrics in measured])
    columns = {str(key): scores[key].dropna().to_list() for key in scores}
    metrics = records[0]["metrics"]
    if metrics:
        headlines = {key: _mean([seed[key] for seed in measured]) for key in metrics if "length_" in key}
        metrics = {**metrics, **headlines, **{key: fmean(values) for key, values in columns.items()}}
    return {**records[0], "metrics": metrics, "scores": columns}


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, key by key of mappings; the first of other values."""
    first = values[0]
    if isinstance(first, dict):
        return {key: _mean([value[key] for value in values]) for key in first}
    return fmean(values) if isinstance(first, (int, float)) else first


def markdown_table(records: Iterable[Record], columns: Sequence[str | Column], missing: str = NOT_RUN) -> str:
    """Return a Markdown table, one line per record.

    A record without metrics (`not_run`) says "not run" in every cell that needs a run. `missing` is in cells
    whose value is missing from their record. Columns may be names out of `COLUMNS`.
    """
    chosen = [COLUMNS[column] if isinstance(column, str) else column for column in columns]

    def cell(column: Column, record: Record) -> str:
        try:
            return column.value(record) if column.always or record["metrics"] else NOT_RUN
        except (KeyError, TypeError):
            return missing

    cells = [[cell(column, record) for column in chosen] for record in with_differences(records)]
    return markdown(pd.DataFrame(cells, columns=[column.title for column in chosen]))


def markdown(frame: pd.DataFrame, right: Sequence[str] = ()) -> str:
    """Return a frame of texts as a Markdown table; columns named in `right` are aligned to the right."""
    texts = frame.astype(str).replace({r"\|": r"\\|", "\n": " "}, regex=True)
    sides = ["--:" if title in right else "---" for title in texts.columns]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [texts.columns, sides, *texts.to_numpy()])


def with_differences(records: Iterable[Record]) -> list[Record]:
    """Return the records with ``bleu_difference`` or ``perplexity_difference`` among their metrics.

    The difference is to the trained row that a row starts from; for others, to the baseline whose name shares
    most with theirs: ``standard``, or ``small_standard`` for ``small_x``.
    """
    lines = list(records)
    known = {record["row"]: record["metrics"] for record in lines}
    baselines = sorted(filter(is_baseline, known), key=len, reverse=True)
    completed = []
    for record in lines:
        config, metrics = record["config"], dict(record["metrics"])
        teacher = (config.get("fit") or config.get("distill") or {}).get("teacher")
        near = [name for name in baselines if record["row"].startswith(name.removesuffix(BASELINE))]
        for metric in RECIPE_COLUMNS.keys() & metrics.keys():
            compared = [name for name in ([teacher] if teacher else near) if metric in known.get(name, {})]
            if compared:
                metrics[f"{metric}_difference"] = metrics[metric] - known[compared[0]][metric]
        completed.append({**record, "metrics": metrics})
    return completed


# Endings of rows that start from a trained one, and the columns of a comparison.
STAGES = {"_fitted": "fitted", "_finetuned": "finetuned", "_distilled": "distilled", "": "from scratch"}


def comparison_table(records: Sequence[Record], metric: str) -> str:
    """Return a Markdown table that compares ways to compress one trained model: fitted, finetuned, distilled,
    from scratch.

    A line combines the rows ``X``, ``X_fitted``, ``X_finetuned`` and ``X_distilled``; plain tables in
    networks of several sizes have separate lines. The records are those of `records_of`, the baseline first.
    """
    plain = next((record for record in records if is_baseline(record["row"])), None)
    groups: dict[str, dict[str, Record]] = {}
    sizes: dict[str, float] = {}
    for record in records:
        ending = next(ending for ending in STAGES if record["row"].endswith(ending))
        base = record["row"].removesuffix(ending)
        groups.setdefault(base, {})[ending] = record
        sizes[base] = max(sizes.get(base, 0), embedding_bits(record["counts"]) if record["counts"] else 0)
    lines = []
    for base in sorted(groups, key=lambda base: sizes[base], reverse=True):
        group = groups[base]
        configs = [record["config"] for record in group.values()]
        starts = any(config.get("fit") or config.get("distill") for config in configs)
        if not starts and BASELINE not in map(method_of, group.values()):
            continue  # only trained from scratch
        first = next(group[ending] for ending in STAGES if ending in group)
        fit = first["config"].get("fit") or {}
        options = describe_options({"config": {"embedding": first["config"].get("embedding")}})
        options += f", numbers in {fit['store']}" if "store" in fit else ""
        options += ", calibrated" if fit.get("calibrate") else ""
        times = bits = total = NOT_RUN
        if counts := next((group[e]["counts"] for e in STAGES if e in group and group[e]["counts"]), None):
            total = f"{counts['total'] / 1e6:.2f} M"
            if plain and plain["counts"]:
                smaller = embedding_bits(plain["counts"]) / embedding_bits(counts)
                times, bits = NONE if counts is plain["counts"] else f"{smaller:.1f}x", f"{32 / smaller:.2f}"
        known = {ending: record["metrics"].get(metric, NOT_RUN) for ending, record in group.items()}
        shown = (known.get(ending, NONE) for ending in STAGES)
        scores = [score if isinstance(score, str) else f"{score:.1f}" for score in shown]
        # How long the rows were finetuned, by the results or the settings of one of them.
        config = (group.get("_finetuned") or group.get("_distilled") or first)["config"]
        length = NOT_RUN if config.get("distill") else NONE
        if steps := (config.get("fit") or {}).get("recover_steps"):
            length = f"{steps:,} steps"
        elif config.get("distill"):
            settings = {**config, **(config.get("train") or {})}
            for key, unit in (("epochs", "epoch"), ("train_steps", "step")):
                if number := option_value(config.get("train_options", ()), key) or settings.get(key):
                    length = f"{int(number):,} {unit}{'s' * (int(number) != 1)}"
        lines.append([base, options, times, bits, total, *scores, length])
    titles = ["row", "options", "times smaller", "bits per weight", "total parameters", *STAGES.values()]
    return markdown(pd.DataFrame(lines, columns=[*titles, "finetuned for"]))


def controls_length(row: Row) -> bool:
    """Return whether a row's model has length control."""
    return bool(set(row.train.get("decoder_positions") or ()) & set(LENGTH_DEPENDENT))


def headline_table(recipe: Recipe, records: Sequence[Record]) -> str:
    """Return the Markdown table of a headline recipe with a line for each row and length, rows without length
    control first, with the paper's figures where there are any.
    """
    lines: list[Record] = []
    for record in sorted(records, key=lambda record: controls_length(recipe.rows[record["row"]])):
        metrics = record["metrics"]
        lengths = sorted(int(name.removeprefix("length_")) for name in metrics if name.startswith("length_"))
        lines += [
            {**record, "metrics": {**metrics, **metrics[f"length_{length}"], "length": length}}
            for length in lengths
        ] or [record]
    rouge = {"rouge1": "R-1", "rouge2": "R-2", "rougeL": "R-L"}
    columns: list[str | Column] = ["row", "embedding", "stored", "smaller"]
    columns.append(Column("length", number("{}", "metrics", "length")))
    for measure in ("recall", "f1"):
        for metric, title in rouge.items():
            columns.append(Column(f"{title} {measure}", number("{:.1f}", "metrics", measure, metric, "mean")))
    columns.append(Column("seeds", lambda record: str(len(next(iter(record["scores"].values()))))))
    columns.append(Column("within 10 %", number("{:.0f} %", "metrics", "within")))
    columns.append(Column("mean difference", number("{:.1f}", "metrics", "difference")))
    columns += ["valid_perplexity", "minutes"]
    if any(record.get("paper") for record in records):
        for metric, title in rouge.items():
            columns.append(Column(f"the paper's {title}", number("{:.2f}", "paper", metric), always=True))
    return markdown_table(lines, columns, missing=NONE)
