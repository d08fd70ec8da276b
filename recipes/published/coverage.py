"""Which configuration trains each row of the papers' tables: ``coverage.yaml`` as a list and as Markdown.

``python -m recipes.published.coverage`` prints the list; with ``--write`` it puts the tables into
``recipes/README.md``.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.common.errors import UserError, run_main
from recipes.common.results import REPOSITORY
from recipes.common.table import update_readme
from recipes.glove_reconstruction.grid import read_grid
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.reading import read_yaml_as_text

SOURCE = Path(__file__).with_name("coverage.yaml")
RECIPES = REPOSITORY / "recipes"
README, MARKER = RECIPES / "README.md", "coverage"
GRID = "grid.yaml"
# How the figures that a row may print are told.
FIGURES = {
    "bleu": "BLEU {}",
    "bleu_newstest2014": "BLEU {} on newstest2014",
    "bleu_newstest2017": "BLEU {} on newstest2017",
    "perplexity": "test perplexity {}",
    "valid_perplexity": "validation perplexity {}",
    "pointer_perplexity": "test perplexity {} with pointer",
    "rouge1": "ROUGE-1 {}",
    "rouge2": "ROUGE-2 {}",
    "rougeL": "ROUGE-L {}",
    "reconstruction_loss": "reconstruction loss {}",
    "parameters_in_millions": "{} M parameters",
    "embedding_in_millions": "{} M in the embedding",
}
_PAPER_KEYS = ("paper", "title", "reason", "tables", "figures")
_TABLE_KEYS = ("name", "title", "reason", "note", "rows")
_ROW_KEYS = ("row", "cell", "figures", "config", "reason", "why")


@dataclass(frozen=True)
class Cell:
    """One model of a table: a row, or a column of it.

    Attributes:
        row: label of the row.
        column: which of its columns; empty for the whole row.
        figures: what is printed, by its name in `FIGURES`, as it is printed.
        config: ``RECIPE/CONFIG``; empty where there is none.
        reason: why there is none; empty where there is one.
        why: why a figure is another than that of the configuration.
    """

    row: str
    column: str = ""
    figures: Mapping[str, str] = field(default_factory=dict)
    config: str = ""
    reason: str = ""
    why: str = ""


@dataclass(frozen=True)
class PaperTable:
    """A table or a figure of a paper.

    Attributes:
        name: such as "Table 2a".
        title: what it is about.
        reason: why nothing of it is trained on its own; empty where something is.
        note: what holds for all rows.
        cells: its models in the order of print.
    """

    name: str
    title: str
    reason: str
    note: str
    cells: tuple[Cell, ...]

    @property
    def rows(self) -> list[str]:
        """The labels of the rows, each once, in the order of print."""
        return list(dict.fromkeys(cell.row for cell in self.cells))


@dataclass(frozen=True)
class Paper:
    """A paper with its tables and figures, in the order of print.

    Attributes:
        name: as the configurations call it.
        title: with authors and year.
        reason: why it has no tables here; empty where it has.
        tables: all of them.
        figures: all of them.
    """

    name: str
    title: str
    reason: str
    tables: tuple[PaperTable, ...]
    figures: tuple[PaperTable, ...]

    @property
    def parts(self) -> tuple[PaperTable, ...]:
        """Tables, then figures."""
        return (*self.tables, *self.figures)


def read_coverage(path: Path = SOURCE) -> list[Paper]:
    """Read ``coverage.yaml``, which explains each part.

    Raises:
        UserError: absent or not YAML, an unknown key, a figure without a name in `FIGURES`, two rows that
            cannot be told apart, or a row with neither a configuration nor a reason, or both.
    """
    return [_paper(each) for each in read_yaml_as_text(path, "coverage")["papers"]]


def _paper(content: Mapping[str, Any]) -> Paper:
    """One paper of the file."""
    name = content["paper"]
    _check_keys(name, content, _PAPER_KEYS)
    tables, figures = (
        tuple(_table(name, each) for each in content.get(part, ())) for part in ("tables", "figures")
    )
    return Paper(name, content["title"], content.get("reason", ""), tables, figures)


def _table(paper: str, content: Mapping[str, Any]) -> PaperTable:
    """One table or figure of the file."""
    where = f"{paper}, {content.get('name')}"
    _check_keys(where, content, _TABLE_KEYS)
    reason = content.get("reason", "")
    rows = content.get("rows", ())
    cells = tuple(Cell(label, reason=reason) if reason else _cell(where, label) for label in rows)
    names = [(cell.row, cell.column) for cell in cells]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{SOURCE}: {where}: two rows {' '.join(repeated[0]).strip()!r}; tell them apart")
    return PaperTable(content["name"], content["title"], reason, content.get("note", ""), cells)


def _cell(where: str, content: Mapping[str, Any]) -> Cell:
    """One row of the file."""
    where = f"{where}: {content.get('row')}"
    _check_keys(where, content, _ROW_KEYS)
    figures = content.get("figures", {})
    _check_keys(where, figures, tuple(FIGURES))
    if ("config" in content) == ("reason" in content):
        raise UserError(f"{SOURCE}: {where}: wanted either config or reason")
    text = {key: content.get(key, "") for key in ("config", "reason", "why")}
    return Cell(content["row"], content.get("cell", ""), figures, **text)


def _check_keys(where: str, content: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse a key that is not among the `known` ones."""
    for key in content:
        if key not in known:
            raise UserError(f"{SOURCE}: {where}: unknown key {key!r}; it may hold {', '.join(known)}")


def config_file(config: str) -> Path:
    """The file of a configuration ``RECIPE/CONFIG``, or the grid for cells of one.

    Raises:
        UserError: there is no such configuration, or no such cells.
    """
    recipe, _, name = config.partition("/")
    grid = RECIPES / recipe / GRID
    if grid.exists():
        read_grid(grid).chosen([name])
        return grid
    path = RECIPES / recipe / "configs" / f"{name}.yaml"
    if not path.exists():
        raise UserError(f"{SOURCE}: {config}: there is no {path.relative_to(REPOSITORY)}")
    return path


@functools.cache
def in_config(config: str) -> dict[str, str]:
    """What a configuration holds under ``paper``, as text; nothing for cells of a grid.

    Raises:
        UserError: there is no such configuration.
    """
    path = config_file(config)
    if path.name == GRID:
        return {}
    return dict(read_yaml_as_text(path, "configuration")["paper"])


def table_of(config: str) -> tuple[str, str]:
    """The paper and the table that a configuration has its figures from; empty for cells of a grid."""
    source = in_config(config).get("source", "")
    paper, _, rest = source.partition(", ")
    return paper, rest.partition(": ")[0]


def markdown(papers: Iterable[Paper]) -> str:
    """All papers as Markdown: how much is covered, then a table for each of theirs."""
    papers = list(papers)
    parts = [_summary(papers)]
    for paper in papers:
        parts.append(f"### {paper.title}")
        if paper.reason:
            parts.append(paper.reason)
        for table in paper.parts:
            parts.extend(_table_lines(paper.name, table))
    return "\n\n".join(parts) + "\n"


def _summary(papers: Sequence[Paper]) -> str:
    """How many rows there are, and how many of them have a configuration."""
    cells = [cell for paper in papers for table in paper.parts for cell in table.cells]
    tables = sum(len(paper.tables) for paper in papers)
    configs = {cell.config for cell in cells if cell.config}
    trained = sum(bool(cell.config) for cell in cells)
    return (
        f"{len(cells)} rows (columns that are models of their own counted one by one) of {tables} tables and "
        f"of ALONE's Figure 3: {trained} have one of {len(configs)} configurations or points of the grid, "
        f"{len(cells) - trained} a reason why they have none."
    )


def _table_lines(paper: str, table: PaperTable) -> Iterator[str]:
    """The parts of a table's Markdown."""
    yield f"#### {table.name}: {table.title}"
    if table.reason:
        labels = f" Rows: {'; '.join(table.rows)}." if table.rows else ""
        yield f"Trains nothing of its own: {table.reason}.{labels}"
        return
    if table.note:
        yield table.note
    lines = ["| row | in print | config |", "| --- | --- | --- |"]
    for cell in table.cells:
        columns = (_label(cell), tell_figures(cell) or "–", _told(paper, table.name, cell))
        lines.append("| " + " | ".join(columns) + " |")
    yield "\n".join(lines)


def _label(cell: Cell) -> str:
    """Row and column of a cell."""
    label = f"{cell.row}; {cell.column}" if cell.column else cell.row
    # A minus or a plus in front would make a list.
    return f"\\{label}" if label.startswith(("-", "+")) else label


def tell_figures(cell: Cell) -> str:
    """The printed figures of a cell."""
    return ", ".join(FIGURES[name].format(value) for name, value in cell.figures.items())


def _told(paper: str, table: str, cell: Cell) -> str:
    """A link to the configuration of a cell, with the table that it is from if another; or the reason."""
    if cell.reason:
        return f"not trained: {cell.reason}"
    link = f"[`{cell.config}`]({config_file(cell.config).relative_to(RECIPES).as_posix()})"
    notes = [_other_table(paper, table, cell.config), cell.why]
    told = "; ".join(note for note in notes if note)
    return f"{link} ({told})" if told else link


def _other_table(paper: str, table: str, config: str) -> str:
    """Which table a configuration is from, where that is another one; else nothing."""
    own_paper, own_table = table_of(config)
    if (own_paper, own_table) in ((paper, table), ("", "")):
        return ""
    return f"of {own_table}" if own_paper == paper else f"of {own_table} of {own_paper}"


def listing(papers: Iterable[Paper]) -> Iterator[str]:
    """A line for each row: paper, table, row, figures, and its configuration or why it has none."""
    for paper in papers:
        if paper.reason:
            yield f"{paper.name}: {paper.reason}"
        for table in paper.parts:
            where = f"{paper.name}, {table.name}"
            if not table.cells:
                yield f"{where}: trains nothing of its own: {table.reason}"
            for cell in table.cells:
                told = cell.config or f"not trained: {cell.reason}"
                label = ": ".join(part for part in (where, cell.row, cell.column, tell_figures(cell)) if part)
                yield f"{label}: {told}"


def main(arguments: Sequence[str]) -> None:
    """List every row of the papers' tables with the configuration that trains it, or why there is none."""
    parser = Parser("python -m recipes.published.coverage", description=main.__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into recipes/README.md")
    options = parser.parse_args(arguments)
    papers = read_coverage()
    if options.write:
        update_readme(README, MARKER, markdown(papers))
    for line in listing(papers):
        print(line)


if __name__ == "__main__":
    raise SystemExit(run_main("coverage", main))
