"""The papers' tables: each row has a configuration with its figures, or a reason; none is left out."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from recipes.common.config import row_names
from recipes.published import coverage
from recipes.published.coverage import RECIPES, config_file, in_config, read_coverage, table_of
from shared_embeddings.ledger import tables

from recipes.common.errors import UserError, run_main
from recipes.glove_reconstruction.grid import read_grid

# Rows of each table in print, counted in the papers. Table 7b of DeFINE is a plot.
ROWS = {
    "DeFINE": {"1a": 5, "1b": 4, "1c": 6, "2a": 9, "2b": 4, "3": 5, "4": 10, "5": 6, "6a": 4, "6b": 3}
    | {"7a": 9, "7b": 0, "8a": 2, "8b": 2, "9": 12},
    "Distilled Embedding": {"1": 8, "2": 8, "3": 8, "4": 3, "5": 4, "6": 5, "7": 3}
    | {"A.1": 2, "A.2": 2, "A.3": 3, "A.4": 7},
    "ALONE": {"1": 4, "2": 14, "3": 7},
    "UnClE": {"1": 5, "2": 3, "3": 6, "4": 10, "5": 5, "6": 3, "7": 3, "8": 6, "9": 6, "10": 10}
    | {"11": 6, "12": 6, "13": 6, "14": 8},
    "Adaptive input": {},
}
PLOTS = {"DeFINE": 11, "Distilled Embedding": 1, "ALONE": 4, "UnClE": 6, "Adaptive input": 0}
# Models that two rows of their own table stand for, trained twice and with the pointer; and what they are
# after the first training, whose size is in print.
TWICE = {
    "ptb_awd_lstm/table5_standard": "ptb_awd_lstm/table4_standard",
    "ptb_awd_lstm/table5_unique200": "ptb_awd_lstm/table4_unique200",
}
# What the papers say of batches, for recipes whose rows are written by hand.
BATCHES = {"wikitext103_lstm": "batches of 60 texts, 140 words at a time"}
NO_BATCHES, NEITHER = "no batches", "neither hardware nor batches"

PAPERS = read_coverage()
CELLS = [
    pytest.param(paper, table, cell, id=f"{paper.name}, {table.name}: {cell.row} {cell.column}")
    for paper in PAPERS
    for table in paper.parts
    for cell in table.cells
]
TRAINED = [
    (paper.name, table.name, cell)
    for paper in PAPERS
    for table in paper.parts
    for cell in table.cells
    if cell.config
]


def published_configs() -> list[str]:
    """All configurations of rows in print, found on disk: those that hold ``paper``."""
    return sorted(
        f"{folder.parent.name}/{name}"
        for folder in RECIPES.glob("*/configs")
        for name in row_names(folder)
        if re.search(r"^paper:", (folder / f"{name}.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    )


CONFIGS = published_configs()


def numbers(config: str) -> dict[str, float]:
    """The figures that a configuration has from its paper; ``bleu`` only where it has no test set's name."""
    found = {name: value for name, value in in_config(config).items() if name not in ("source", "hardware")}
    if any(name.startswith("bleu_") for name in found):
        found.pop("bleu")
    return {name: float(value) for name, value in found.items()}


def test_no_table_and_no_figure_is_left_out() -> None:
    assert [paper.name for paper in PAPERS] == list(ROWS)
    for paper in PAPERS:
        assert [table.name for table in paper.tables] == [f"Table {name}" for name in ROWS[paper.name]]
        assert [figure.name for figure in paper.figures] == [
            f"Figure {number}" for number in range(1, PLOTS[paper.name] + 1)
        ]
        for prefix in ("", "A."):
            found = {int(n[1]) for name in ROWS[paper.name] if (n := re.match(rf"{prefix}(\d+)", name))}
            assert found == set(range(1, len(found) + 1))


@pytest.mark.parametrize(
    ("paper", "name", "count"),
    [(paper, name, count) for paper, tables in ROWS.items() for name, count in tables.items()],
)
def test_a_table_has_as_many_rows_as_in_print(paper: str, name: str, count: int) -> None:
    of_paper = {each.name: {table.name: table for table in each.tables} for each in PAPERS}
    table = of_paper[paper][f"Table {name}"]
    assert len(table.rows) == count
    assert table.reason or table.cells


def test_what_is_not_trained_says_why() -> None:
    reasons = [paper.reason for paper in PAPERS if not paper.tables]
    reasons += [table.reason for paper in PAPERS for table in paper.parts if not table.cells]
    reasons += [
        cell.reason for paper in PAPERS for table in paper.parts for cell in table.cells if not cell.config
    ]
    assert len(reasons) > 40 and all(len(reason) > 15 for reason in reasons)


@pytest.mark.parametrize(("paper", "table", "cell"), CELLS)
def test_figures_are_those_of_the_config(
    paper: coverage.Paper, table: coverage.PaperTable, cell: coverage.Cell
) -> None:
    if not cell.config:
        assert cell.reason and not cell.why
        return
    assert config_file(cell.config).is_file()
    known = numbers(cell.config)
    shared = known.keys() & cell.figures.keys()
    differing = {name for name in shared if float(cell.figures[name]) != known[name]}
    assert bool(differing) == bool(cell.why)
    # Only sizes are printed in two ways; of a model's quality, every table has the same figure.
    assert differing <= {"parameters_in_millions"}
    assert shared or {"Table A.3", "Figure 3"} & {table.name}


def test_every_published_config_is_a_row_of_its_own_table() -> None:
    assert {cell.config for _, _, cell in TRAINED if config_file(cell.config).name != coverage.GRID} == set(
        CONFIGS
    )
    own = Counter(cell.config for paper, table, cell in TRAINED if (paper, table) == table_of(cell.config))
    assert own == {config: 2 if config in TWICE else 1 for config in CONFIGS}


def test_rows_are_called_after_their_tables() -> None:
    named = {
        f"{folder.parent.name}/{name}"
        for folder in RECIPES.glob("*/configs")
        for name in row_names(folder)
        if re.match(r"([a-z]+_)?table", name)
    }
    assert named == set(CONFIGS)
    for config in CONFIGS:
        name = re.findall(r"table_?([a-d]?\d+[a-d]?)", config)[0]
        printed = table_of(config)[1].removeprefix("Table ").replace(".", "").lower()
        assert name in (printed, printed.rstrip("ab"))


@pytest.mark.parametrize("config", CONFIGS)
def test_all_figures_of_a_config_are_in_its_papers_rows(config: str) -> None:
    paper, _ = table_of(config)
    printed: dict[str, set[float]] = {}
    for name, _, cell in TRAINED:
        if cell.config in (config, TWICE.get(config)) and name == paper:
            for figure, value in cell.figures.items():
                printed.setdefault(figure, set()).add(float(value))
    for figure, value in numbers(config).items():
        assert value in printed[figure]


def test_sizes_are_those_of_the_ledger() -> None:
    compared = []
    for ledger in tables():
        cells = [
            cell
            for paper in PAPERS
            for table in paper.tables
            for cell in table.cells
            if paper.name == ledger["paper"] and ledger["table"] in (table.name, table.name.rstrip("ab"))
        ]
        for counted, figure in (("total", "parameters_in_millions"), ("embedding", "embedding_in_millions")):
            if printed := {cell.figures[figure] for cell in cells if figure in cell.figures}:
                assert printed == {row["figures"][counted] for row in ledger["rows"]}
                compared.append((ledger["paper"], ledger["table"]))
    assert len(compared) == 8


@pytest.mark.parametrize("config", CONFIGS)
def test_the_head_says_what_a_row_stands_for_and_how_it_is_run(config: str) -> None:
    recipe, name = config.split("/")
    lines = config_file(config).read_text(encoding="utf-8").splitlines()
    first, *rest = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    title = {paper.name: paper.title for paper in PAPERS}
    paper, table = table_of(config)
    row = in_config(config)["source"].partition(": ")[2]
    assert first.startswith(f"{title[paper]}, {table}")
    assert first.partition(": ")[2] and set(re.findall(r"\d+", row)) <= set(re.findall(r"\d+", first))
    assert f"recipes/{recipe}/train.sh {name} && recipes/{recipe}/eval.sh {name}" in rest
    told = " ".join(rest)
    published = re.search(r"Published: (.*?)\.(?: |$)", " ".join(rest[:2]))
    assert published
    values = {float(value) for value in re.findall(r"(?<![\w-])\d+(?:\.\d+)?", published[1])}
    sizes = ("parameters_in_millions", "embedding_in_millions")
    assert {value for figure, value in numbers(config).items() if figure not in sizes} <= values
    hardware = in_config(config)["hardware"]
    if "batch:" in "\n".join(lines):
        # of the translations, whose hardware is told with their batches
        assert f"In the paper: {hardware}." in told and ("tokens" in hardware or "not printed" in hardware)
    elif hardware == "not in the paper":
        assert f"In the paper: {NEITHER}." in rest
    else:
        assert f"In the paper: {hardware}; {BATCHES.get(recipe, NO_BATCHES)}." in rest


def test_every_cell_of_alone_in_the_grid_is_a_point_of_figure_3() -> None:
    grid = read_grid(RECIPES / "glove_reconstruction" / coverage.GRID)
    patterns = [cell.config.split("/")[1] for _, table, cell in TRAINED if table == "Figure 3"]
    found = [cell.name for pattern in patterns for cell in grid.chosen([pattern])]
    assert sorted(found) == sorted(cell.name for cell in grid.cells() if cell.row in grid.alone)


def test_the_readme_is_made_from_the_coverage() -> None:
    text = coverage.README.read_text(encoding="utf-8")
    begin, end = (f"<!-- {word} {coverage.MARKER} -->\n" for word in ("BEGIN", "END"))
    assert text.split(begin)[1].split(end)[0] == coverage.markdown(PAPERS)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (coverage.README.parent / link).is_file(), link


def test_the_command_lists_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("coverage", coverage.main, []) == 0
    lines = capsys.readouterr().out.splitlines()
    empty = [table for paper in PAPERS for table in paper.parts if not table.cells]
    assert len(lines) == len(CELLS) + len(empty) + 1
    assert "UnClE, Table 8: 8: Our Method: BLEU 22.75: wmt14_ende/uncle_table8_unique8" in lines
    assert sum("not trained: " in line for line in lines) > 30


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"row": "a"}, "Table 1: a: wanted either config or reason"),
        ({"row": "a", "config": "x/y", "reason": "z"}, "Table 1: a: wanted either config or reason"),
        ({"row": "a", "config": "x/y", "figures": {"bleau": 1}}, "unknown key 'bleau'; it may hold bleu, "),
        ({"row": "a", "config": "x/y", "rank": 1}, "Table 1: a: unknown key 'rank'"),
        ({"row": "b", "reason": "z"}, "Table 1: two rows 'b'; tell them apart"),
    ],
)
def test_other_rows_are_refused(tmp_path: Path, row: dict[str, object], said: str) -> None:
    path = tmp_path / "coverage.yaml"
    table = {"name": "Table 1", "title": "t", "rows": [{"row": "b", "reason": "z"}, row]}
    path.write_text(yaml.safe_dump({"papers": [{"paper": "P", "title": "t", "tables": [table]}]}))
    with pytest.raises(UserError, match=re.escape(said)):
        read_coverage(path)


def test_configs_that_are_not_there_are_named() -> None:
    with pytest.raises(UserError, match="there is no recipes/ptb_awd_lstm/configs/table99"):
        config_file("ptb_awd_lstm/table99")
    with pytest.raises(UserError, match="no cell is called 'alone_real-7-"):
        config_file("glove_reconstruction/alone_real-7-*")
