"""The parts of the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.common.table import describe_options, is_baseline
from recipes.papers.ledger import Figure
from recipes.report import figures
from recipes.report.collect import LeftOut
from recipes.report.commands import commands
from recipes.report.curves import validation_curve
from recipes.report.document import Block, Code, Details, Heading, Items, Paragraph, Picture, Table, anchor
from recipes.report.lines import Line
from recipes.report.measures import NOT_RUN, Measure, chosen, measure, millions
from recipes.report.papers import NONE, by_table, comparison, sizes_table

TITLE = "Compressed word embeddings: results"


@dataclass(frozen=True)
class Task:
    """A recipe and its rows.

    Attributes:
        folder: of the recipe.
        title: of its README.
        lines: its rows.
    """

    folder: Path
    title: str
    lines: Sequence[Line]

    @property
    def measured(self) -> list[Line]:
        """The rows that were run."""
        return [line for line in self.lines if line.runs]

    @property
    def quality(self) -> str | None:
        """The measure that its models are judged by: of its results, or of the papers' figures."""
        keys = dict.fromkeys(key for line in self.measured for key in line.measured)
        return chosen(keys) or chosen(dict.fromkeys(key for line in self.lines for key in line.paper))


def report(tasks: Sequence[Task], sizes: Iterable[Figure], left_out: Sequence[LeftOut]) -> list[Block]:
    """The whole report.

    Args:
        tasks: the recipes.
        sizes: printed sizes and ours, of `recipes.papers.ledger`.
        left_out: results that are not used.
    """
    blocks: list[Block] = [Heading(1, TITLE, "top"), *_introduction(tasks)]
    blocks += [Heading(2, "At a glance", "glance"), *_glance(tasks)]
    blocks += [Heading(2, "Beside the papers", "papers"), *_papers(tasks)]
    found = sizes_table(sizes)
    if found.rows:
        blocks += [Heading(3, "Printed sizes", "printed-sizes"), *_sizes(found)]
    for task in tasks:
        blocks += _task(task)
    if left_out:
        blocks += [
            Heading(2, "Results that were left out", "left-out"),
            Items([f"{one.name}: {one.reason}" for one in left_out]),
        ]
    return blocks


def _introduction(tasks: Sequence[Task]) -> list[Block]:
    """What the page is, and how much of it was run."""
    rows, measured = (sum(len(lines) for lines in each) for each in _row_lists(tasks))
    blocks: list[Block] = [
        Paragraph(
            "The table of word embeddings is often the largest part of a model. The rows of this report "
            "replace it by something smaller that serves the input and the output of a translation or "
            "language model, and differ within a task in nothing but that."
        )
    ]
    if measured == 0:
        return [*blocks, Paragraph("There are no results yet: none of the rows below was run.")]
    summary = f"{measured} of {rows} rows were run; the others say “{NOT_RUN}”. "
    return [
        *blocks,
        Paragraph(
            f"{summary}Each number of ours comes from a results file that an evaluation has written; none is "
            "typed. Over several seeds a number is the mean ± the standard deviation."
        ),
    ]


def _row_lists(tasks: Sequence[Task]) -> tuple[list[Sequence[Line]], list[Sequence[Line]]]:
    """All rows and the measured rows of each task."""
    return [task.lines for task in tasks], [task.measured for task in tasks]


def _glance(tasks: Sequence[Task]) -> list[Block]:
    """One line per task: the plain table, and the best of the compressed."""
    rows = []
    for task in tasks:
        key = task.quality
        known = measure(key) if key else None
        cells = [
            task.folder.name,
            f"{len(task.measured)} of {len(task.lines)}",
            known.title if known else NONE,
        ]
        rows.append([*cells, *(_extremes(task, key, known) if key and known else [NONE, NONE])])
    columns = ["task", "rows run", "judged by", "plain table", "best compressed embedding"]
    return [Table(columns, rows)]


def _extremes(task: Task, key: str, known: Measure) -> list[str]:
    """The plain table's quality, and that of the best embedding that is smaller."""
    there = [line for line in task.measured if key in line.measured]
    plain = [line for line in there if is_baseline(line.row)]
    others = [line for line in there if line.method != "standard"]
    sign = -1 if known.higher_is_better else 1
    best = min(others, key=lambda line: sign * line.measured[key].mean, default=None)
    cells = [line.measured[key].describe(known.decimals) for line in plain[:1]]
    if not cells:
        cells = [NOT_RUN if any(is_baseline(line.row) for line in task.lines) else NONE]
    if best is None:
        return [*cells, NOT_RUN]
    return [*cells, f"{best.measured[key].describe(known.decimals)} ({best.row}, {_compression(best)})"]


def _compression(line: Line) -> str:
    """How many times fewer parameters than a plain table."""
    counts = line.counts
    dense = counts.get("dense_embedding", counts.get("table"))
    factor = counts.get("compression", dense / counts["embedding"] if dense else None)
    return NONE if factor is None else f"{factor:.1f}x smaller"


def _papers(tasks: Sequence[Task]) -> list[Block]:
    """A table for each table of a paper that rows stand for."""
    tables = by_table(line for task in tasks for line in task.lines)
    if not tables:
        return [Paragraph("No row stands for a row of a paper.")]
    blocks: list[Block] = [
        Paragraph(
            "Rows that stand for a row of a published table, with the settings of the paper. Most of them "
            "need GPUs for days. Rows of smaller models are only compared with each other, under their task."
        )
    ]
    for (paper, table), lines in tables.items():
        run = sum(bool(line.runs) for line in lines)
        blocks += [
            Heading(3, f"{paper}, {table}", anchor(paper, table)),
            Paragraph(f"{run} of {len(lines)} rows run."),
            comparison(lines),
        ]
    return blocks


def _sizes(table: Table) -> list[Block]:
    """The summary of printed sizes, which need no training."""
    return [
        Paragraph(
            "Sizes that the papers print, counted again by building the same models here. “quoted” are other "
            "people's models; “digits cut” agrees except for the rounding of the last digit. "
            "`python -m recipes ledger` lists the sizes, and why some differ."
        ),
        table,
    ]


def _task(task: Task) -> list[Block]:
    """Everything about one recipe."""
    name = task.folder.name
    blocks: list[Block] = [Heading(2, task.title, name.replace("_", "-"))]
    if not task.measured:
        blocks.append(Paragraph(f"None of its {len(task.lines)} rows was run."))
    else:
        blocks.append(Paragraph(f"{len(task.measured)} of {len(task.lines)} rows were run."))
        blocks += [*_pictures(task), _results(task)]
    idle = [line for line in task.lines if not line.runs]
    if idle:
        listed = [[line.row, line.method, describe_options({"config": line.config})] for line in idle]
        summary = f"Rows that were not run ({len(idle)})"
        blocks.append(Details(summary, [Table(["row", "method", "options"], listed)]))
    if task.measured:
        blocks.append(Details("Code, machine and date of each row", [_origins(task)]))
    again: list[Block] = [Code(_all_commands(task))]
    blocks.append(Details("Commands to run each row", again))
    return blocks


def _pictures(task: Task) -> list[Block]:
    """Quality against size, parameters, and training curves where there are any."""
    name, key = task.folder.name, task.quality
    sized = [line for line in task.measured if line.counts.get("embedding")]
    scored = [line for line in sized if key in line.measured]
    known = measure(key) if key else None
    blocks: list[Block] = []
    if key and known and scored:
        better = "higher" if known.higher_is_better else "lower"
        blocks.append(
            Picture(
                f"{name}-quality",
                figures.quality_size(scored, key, known),
                f"{known.title} against stored bytes of {len(scored)} rows of {name}",
                f"{known.title} against the size of the embedding; {better} and further left is better. "
                "The table below has the numbers.",
            )
        )
    # Where nothing but the embedding was measured, bars would repeat the table.
    whole = [line for line in sized if line.counts.get("rest")]
    if whole:
        blocks.append(
            Picture(
                f"{name}-parameters",
                figures.parameter_bars(whole),
                f"Parameters of {len(whole)} models of {name}: embedding, output layer, rest",
                "Where the parameters of each model are.",
            )
        )
    curves = {line.row: curve for line in task.measured if (curve := validation_curve(line.runs[0].folder))}
    if curves:
        blocks.append(
            Picture(
                f"{name}-curves",
                figures.training_curves(curves),
                f"Validation perplexity during the training of {len(curves)} rows of {name}",
                "Validation perplexity during training, logarithmic; of several seeds the first.",
            )
        )
    return blocks


def _results(task: Task) -> Table:
    """Sizes, measures and costs of the rows that were run."""
    keys = list(dict.fromkeys(key for line in task.measured for key in line.measured))
    if task.quality in keys:
        keys.insert(0, keys.pop(keys.index(task.quality)))
    titles = {key: found for key in keys if (found := measure(key))}
    # What counts most comes first: on a phone the rest is out of sight.
    columns = ["row", *(known.title for known in list(titles.values())[:1])]
    columns += ["embedding", "compression", "all parameters"]
    columns += [known.title for known in list(titles.values())[1:]]
    columns += ["training minutes", "method", "options"]
    rows = []
    for line in task.measured:
        counts = line.counts
        sizes = [millions(counts[name]) if name in counts else NONE for name in ("embedding", "total")]
        scores = [
            line.measured[key].describe(known.decimals) if key in line.measured else NONE
            for key, known in titles.items()
        ]
        cells = [line.row, *scores[:1], sizes[0], _compression(line).removesuffix(" smaller"), sizes[1]]
        summary = describe_options({"config": line.config})
        rows.append([*cells, *scores[1:], _minutes(line), line.method, summary])
    return Table(columns, rows)


def _minutes(line: Line) -> str:
    """The minutes that the training of a run took, in the mean."""
    seconds = [run.record["metrics"].get("training_seconds") for run in line.runs]
    known = [value for value in seconds if isinstance(value, (int, float))]
    return f"{sum(known) / len(known) / 60:.1f}" if known else NONE


def _origins(task: Task) -> Table:
    """With which code, where and when each run was made."""
    rows = []
    for line in task.measured:
        for run in line.runs:
            record = run.record
            git = record.get("git") or {}
            changed = " with changes" if git.get("dirty") else ""
            commit = f"{str(git.get('commit') or 'unknown')[:10]}{changed}"
            versions = ", ".join(f"{name} {of}" for name, of in (record.get("versions") or {}).items() if of)
            seed = NONE if run.seed is None else str(run.seed)
            date = str(record.get("date", NONE))[:10]
            cells = [line.row, seed, commit, date, str(record.get("device", NONE)), versions]
            rows.append([*cells, record["data_checksum"][:12], run.name])
    return Table(["row", "seed", "commit", "date", "device", "versions", "data", "file"], rows)


def _all_commands(task: Task) -> str:
    """The commands of every row, each below its name; what all have in common comes once, first."""
    each = {line.row: commands(task.folder, line).splitlines() for line in task.lines}
    first = {lines[0] for lines in each.values()}
    text = [*sorted(first)]
    for row, lines in each.items():
        rest = [line for line in lines if line not in first]
        if rest:
            text += ["", f"# {row}", *rest]
    return "\n".join(text)
