"""The tables of READMEs, made from results: every number comes from a results file. A row without one is in
the table if its paper has figures, with "not run"; the others are named below the table.

``readme`` in ``rows.yaml`` lists the tables of a recipe. A table has

- ``marker``: of ``<!-- BEGIN marker -->`` and ``<!-- END marker -->``;
- ``table``: ``results`` (a line per row, the default), ``comparison`` (see `comparison_table`) or
  ``headlines`` (see `headline_table`);
- ``rows``: a pattern of the rows' names (default: all), after ``!`` of the others; ``from_scratch: true``
  leaves out the rows that start from a trained one;
- ``quality``: ``bleu`` or ``perplexity``, by which the models are judged;
- ``columns``: names out of `COLUMNS`, with commas (default: those of the quality);
- ``picture``: also draws this PNG file next to the README, quality against stored bytes of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from nmt.length_control import LENGTH_DEPENDENT
from recipes.common.plot import TITLES, quality_size_plot
from recipes.common.recipe import FILE, Recipe, Row, read_file
from recipes.common.results import (
    BASELINE,
    SEED,
    Record,
    describe_options,
    embedding_bits,
    is_baseline,
    natural,
    not_run,
    read_results,
    times_smaller,
)
from recipes.common.tools import option_value
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_text

NOT_RUN, NONE = "not run", "–"


class Column(NamedTuple):
    """A column: its title, what it shows of a record, and whether it is known before a run."""

    title: str
    value: Callable[[Record], str]
    always: bool = False


def _millions(count: float) -> str:
    return f"{count / 1e6:.2f} M" if count >= 1e6 else f"{count / 1e3:.1f} k"


def _stored(record: Record) -> str:
    size = embedding_bits(record["counts"]) / 8
    return f"{size / 1e6:.2f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"


def _number(metric: str) -> Callable[[Record], str]:
    """A column's metric, with the range of several seeds."""

    def text(record: Record) -> str:
        value = f"{record['metrics'][metric]:.1f}"
        runs = record.get("runs", {}).get(metric) or [record["metrics"][metric]]
        least, most = f"{min(runs):.1f}", f"{max(runs):.1f}"
        return value if least == most else f"{value} ({least} to {most})"

    return text


def _measured_on_gpu(record: Record) -> str:
    return " (GPU)" if record.get("device", "").startswith("cuda") else ""


def _difference(metric: str) -> Callable[[Record], str]:
    """A column's metric minus that of the row's baseline."""
    return lambda record: (
        NONE if is_baseline(record["row"]) else f"{record['metrics'][f'{metric}_difference']:+.1f}"
    )


def _in_paper(title: str, metric: str) -> Column:
    return Column(title, lambda record: str((record.get("paper") or {}).get(metric, NONE)), always=True)


COLUMNS = {
    "row": Column("config", lambda r: r["row"], always=True),
    "method": Column(
        "method", lambda r: (r["config"].get("embedding") or {"method": BASELINE})["method"], always=True
    ),
    "options": Column("options", describe_options, always=True),
    "embedding": Column("embedding parameters", lambda r: _millions(r["counts"]["embedding"])),
    "stored": Column("stored", _stored),
    "smaller": Column("times smaller", lambda r: f"{times_smaller(r['counts']):.1f}x"),
    "total": Column("total parameters", lambda r: _millions(r["counts"]["total"])),
    "bleu": Column("BLEU", _number("bleu")),
    "difference": Column("difference", _difference("bleu")),
    "chrf": Column("chrF", _number("chrf")),
    "valid_perplexity": Column("validation perplexity", _number("valid_perplexity")),  # lowest in training
    "perplexity": Column("test perplexity", _number("perplexity")),
    "perplexity_difference": Column("difference", _difference("perplexity")),
    "pointer_perplexity": Column("with pointer", _number("pointer_perplexity")),
    "paper_perplexity": _in_paper("the paper's", "perplexity"),
    "paper_pointer_perplexity": _in_paper("the paper's with pointer", "pointer_perplexity"),
    "training_ms": Column(  # fitted rows have none
        "training, ms per batch", lambda r: NONE if r["config"].get("fit") else _number("training_ms")(r)
    ),
    "inference_ms": Column("inference, ms per batch", _number("inference_ms")),
    "paper_training_ms": _in_paper("the paper's training, ms per batch", "training_ms"),
    "paper_inference_ms": _in_paper("the paper's inference, ms per batch", "inference_ms"),
    "minutes": Column(
        "training minutes", lambda r: f"{r['metrics']['training_seconds'] / 60:.0f}{_measured_on_gpu(r)}"
    ),
    "speed": Column("tokens/s", lambda r: f"{r['metrics']['tokens_per_second']:.0f}{_measured_on_gpu(r)}"),
    "date": Column("date", lambda r: r["date"][:10]),
}
_SIZES = ("row", "method", "options", "embedding", "stored", "smaller", "total")
_COSTS = ("minutes", "speed", "date")
# The metrics that are averaged over seeds.
QUALITIES = {"bleu", "chrf", "valid_perplexity", "perplexity"}
# The columns of a recipe's table, by what its models are judged by.
RECIPE_COLUMNS = {
    "bleu": (*_SIZES, "bleu", "difference", "chrf", *_COSTS),
    "perplexity": (*_SIZES, "valid_perplexity", "perplexity", "perplexity_difference", *_COSTS),
}


def update_tables(recipe: Recipe, results: Path, readme: Path) -> str:
    """Write all tables of a recipe into a README and draw its picture; return how many rows are measured.

    The results are a ``results.jsonl`` or a folder with one; without it, no row was run.
    """
    tables = read_file(recipe.folder / FILE).get("readme", [])
    if not tables:
        raise UserError(f"{recipe.name} has no tables that this command can make; eval.sh makes them")
    found = read_results(results) if results.exists() else []
    for table in tables:
        records = records_of(recipe.rows, found, table.get("rows", "*"))
        if table.get("from_scratch"):
            records = [record for record in records if recipe.rows[record["row"]].teacher is None]
        idle = [record["row"] for record in records if not record["metrics"] and not record["paper"]]
        records = [record for record in records if record["row"] not in idle]
        kind, quality = table.get("table", "results"), table.get("quality", "")
        if kind == "headlines":
            text = headline_table(recipe, records)
        elif kind == "comparison":
            text = f"{TITLES[quality]}:\n\n{comparison_table(records, quality)}"
        else:
            names = table["columns"].split(",") if "columns" in table else RECIPE_COLUMNS[quality]
            for name in names:
                if name not in COLUMNS:
                    raise UserError(f"no column {name!r}; there are: {', '.join(COLUMNS)}")
            text = markdown_table(records, names) if records else ""
        if idle:
            text = f"{text}\nNot run: {', '.join(f'`{row}`' for row in idle)}.".lstrip()
        update_readme(readme, table["marker"], text)
        measured = [record for record in records if record["metrics"]]
        if table.get("picture") and measured:
            quality_size_plot(measured, readme.with_name(table["picture"]), quality, recipe.title)
    known = sum(record["row"] in recipe.rows for record in found)
    return f"{readme}: {known} of {len(recipe.rows)} rows measured"


def update_readme(readme: str | Path, marker: str, text: str) -> None:
    """Replace the text between ``<!-- BEGIN marker -->`` and ``<!-- END marker -->``, and nothing else."""
    path = Path(readme)
    begin, end = f"<!-- BEGIN {marker} -->", f"<!-- END {marker} -->"
    try:
        old = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if old.count(begin) != 1 or old.count(end) != 1 or old.index(begin) > old.index(end):
        raise UserError(f"{path}: it must hold the lines {begin} and {end}, once each and in this order")
    head, rest = old.split(begin)
    tail = rest.split(end)[1]
    write_text(path, f"{head}{begin}\n{text.rstrip()}\n{end}{tail}")


def records_of(rows: Mapping[str, Row], results: Iterable[Record], pattern: str = "*") -> list[Record]:
    """One record per row whose name matches, with its paper's figures: its results, or that it was not run.

    Metrics of quality are means over the seeds of a row; ``runs`` has those of each. The baseline comes
    first, then the others by name, numbers counted as numbers.
    """
    found = {record["row"]: record for record in results}
    records = []
    for name, row in rows.items():
        if SEED in name or fnmatchcase(name, pattern.lstrip("!")) == pattern.startswith("!"):
            continue
        record = {**(found.get(name) or not_run(name, row.settings())), "paper": row.paper}
        if record["metrics"]:
            seeds = [record, *(other for key, other in found.items() if key.startswith(f"{name}{SEED}"))]
            record["runs"] = {
                metric: [seed["metrics"][metric] for seed in seeds if metric in seed["metrics"]]
                for metric in QUALITIES & record["metrics"].keys()
            }
            means = {metric: fmean(runs) for metric, runs in record["runs"].items()}
            record["metrics"] = {**record["metrics"], **means}
        records.append(record)
    return sorted(records, key=lambda record: (not is_baseline(record["row"]), natural(record["row"])))


def markdown_table(results: Iterable[Record], columns: Sequence[str | Column]) -> str:
    """A Markdown table, one row per record; ends in a newline.

    A record without metrics (`not_run`) says "not run" in every cell that needs a run, and so does any cell
    whose value is missing from its record. Columns may be names out of `COLUMNS`.
    """
    chosen = [COLUMNS[column] if isinstance(column, str) else column for column in columns]
    rows = [[column.title for column in chosen], ["---"] * len(chosen)]
    for record in with_differences(results):
        cells = []
        for column in chosen:
            text = NOT_RUN
            if column.always or record["metrics"]:
                try:
                    text = column.value(record).replace("|", "\\|").replace("\n", " ")
                except (KeyError, TypeError):
                    pass
            cells.append(text)
        rows.append(cells)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def with_differences(results: Iterable[Record]) -> list[Record]:
    """Copies of the records whose metrics have ``bleu_difference`` or ``perplexity_difference``.

    The difference is to the trained row that a row starts from; for others, to the baseline whose name shares
    most with theirs: ``standard``, or ``small_standard`` for ``small_x``.
    """
    records = list(results)
    completed = []
    for record in records:
        metrics = dict(record["metrics"])
        config = record["config"]
        teacher = (config.get("fit") or config.get("distill") or {}).get("teacher")
        for metric in RECIPE_COLUMNS.keys() & metrics.keys():
            compared = [
                other
                for other in records
                if metric in other["metrics"]
                and (
                    other["row"] == teacher
                    if teacher is not None
                    else is_baseline(other["row"])
                    and record["row"].startswith(other["row"].removesuffix(BASELINE))
                )
            ]
            if baseline := max(compared, key=lambda other: len(other["row"]), default=None):
                metrics[f"{metric}_difference"] = metrics[metric] - baseline["metrics"][metric]
        completed.append({**record, "metrics": metrics})
    return completed


# Endings of rows that start from a trained one, and the columns of a comparison.
STAGES = {"_fitted": "fitted", "_finetuned": "finetuned", "_distilled": "distilled", "": "from scratch"}
# The option for the length of a training, with its unit.
LENGTHS = {"train_steps": "steps", "epochs": "epochs"}


def comparison_table(records: Sequence[Record], metric: str) -> str:
    """A Markdown table that compares ways to compress one trained model: fitted, finetuned, distilled, from
    scratch; ends in a newline.

    A line combines the rows ``X``, ``X_fitted``, ``X_finetuned`` and ``X_distilled``; plain tables in
    networks of several sizes have separate lines. The records are those of `records_of`, the baseline first.
    """
    by_name = {record["row"]: record for record in records}
    plain = next((record for record in records if is_baseline(record["row"])), None)
    # Lines are of rows that start from a trained one, and of plain tables.
    shown: dict[str, bool] = {}
    for name, record in by_name.items():
        ending = next((ending for ending in STAGES if ending and name.endswith(ending)), "")
        config = record["config"]
        is_plain = (config.get("embedding") or {}).get("method") == BASELINE
        base = name.removesuffix(ending)
        shown[base] = shown.get(base, False) or is_plain or bool(config.get("fit") or config.get("distill"))
    groups = {
        base: {ending: by_name.get(f"{base}{ending}") for ending in STAGES}
        for base, is_shown in shown.items()
        if is_shown
    }

    def size(base: str) -> float:
        counts = [record["counts"] for record in groups[base].values() if record and record["counts"]]
        return max(map(embedding_bits, counts), default=0)

    titles = ["row", "options", "times smaller", "bits per weight", "total parameters"]
    titles += [*STAGES.values(), "finetuned for"]
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    for base in sorted(groups, key=lambda name: -size(name)):
        group = groups[base]
        there = [record for record in group.values() if record is not None]
        config = there[0]["config"]
        options = describe_options({"config": {"embedding": config.get("embedding")}})
        fit = config.get("fit") or {}
        if store := fit.get("store"):
            options += f", numbers in {store}"
        if fit.get("calibrate"):
            options += ", calibrated"
        times = bits = total = NOT_RUN
        if measured := next((record for record in there if record["counts"]), None):
            total = f"{measured['counts']['total'] / 1e6:.2f} M"
            if plain is not None and plain["counts"]:
                smaller = embedding_bits(plain["counts"]) / embedding_bits(measured["counts"])
                times, bits = NONE if measured is plain else f"{smaller:.1f}x", f"{32 / smaller:.2f}"
        scores = [
            NONE if one is None else f"{one['metrics'][metric]:.1f}" if metric in one["metrics"] else NOT_RUN
            for one in group.values()
        ]
        length = _length(group["_finetuned"] or group["_distilled"] or there[0])
        lines.append(f"| {' | '.join([base, options, times, bits, total, *scores, length])} |")
    return "\n".join(lines) + "\n"


def _length(record: Record) -> str:
    """How long a line's rows were finetuned, by the results or the settings of one of them."""
    if steps := (record["config"].get("fit") or {}).get("recover_steps"):
        return f"{steps:,} steps"
    if not record["config"].get("distill"):
        return NONE
    settings = {**record["config"], **(record["config"].get("train") or {})}
    for key, unit in LENGTHS.items():
        length = option_value(record["config"].get("train_options", ()), key) or settings.get(key)
        if length:
            return f"{int(length):,} {unit if int(length) != 1 else unit.removesuffix('s')}"
    return NOT_RUN


PREFIX = "length_"
ROUGE = {"rouge1": "R-1", "rouge2": "R-2", "rougeL": "R-L"}


def controls_length(row: Row) -> bool:
    """Return whether a row's model has length control."""
    return bool(set(row.train.get("decoder_positions") or ()) & set(LENGTH_DEPENDENT))


def headline_table(recipe: Recipe, records: Sequence[Record]) -> str:
    """Return the Markdown table of a headline recipe with a line for each row and length, rows without length
    control first, with the paper's figures where there are any.
    """

    def rouge(measure: str, metric: str) -> Callable[[Record], str]:
        return lambda record: f"{record['metrics'][measure][metric]['mean']:.1f}"

    def paper(metric: str) -> Callable[[Record], str]:
        return lambda record: f"{record['paper'][metric]:.2f}"

    lines: list[Record] = []
    for record in sorted(records, key=lambda record: controls_length(recipe.rows[record["row"]])):
        metrics = record["metrics"]
        lengths = sorted(int(name.removeprefix(PREFIX)) for name in metrics if name.startswith(PREFIX))
        lines += [
            {**record, "metrics": {**metrics, **metrics[f"{PREFIX}{length}"], "length": length}}
            for length in lengths
        ] or [record]
    columns: list[str | Column] = ["row", "embedding", "smaller"]
    columns += [Column("length", lambda r: str(r["metrics"]["length"]))]
    columns += [
        Column(f"{title} {measure}", rouge(measure, metric))
        for measure in ("recall", "f1")
        for metric, title in ROUGE.items()
    ]
    columns += [Column("within 10 %", lambda r: f"{r['metrics']['within']:.0f} %")]
    columns += [Column("mean difference", lambda r: f"{r['metrics']['difference']:.1f}"), "minutes", "date"]
    if any(record.get("paper") for record in records):
        columns += [Column(f"the paper's {title}", paper(name), always=True) for name, title in ROUGE.items()]
    return markdown_table(lines, columns)
