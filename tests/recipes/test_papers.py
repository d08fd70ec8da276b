"""The papers' tables: each row is trained by a row of a recipe or has a reason; none is left out."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from recipes import __main__ as command
from recipes.common.recipe import RECIPES, find_recipe, recipe_names
from recipes.common.tools import run_main
from recipes.glove_reconstruction.grid import read_grid
from recipes.papers.coverage import MARKER, README, markdown, origins
from recipes.papers.tables import SIZES, Cell, read_papers
from shared_embeddings.errors import UserError

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

PAPERS = read_papers()
CELLS = [(paper, table, cell) for paper in PAPERS for table in paper.tables for cell in table.cells]
TRAINED = [(table, cell) for _, table, cell in CELLS if cell.trained_by]
GLOVE = "glove_reconstruction/"


def test_every_table_and_figure_is_listed() -> None:
    assert [paper.name for paper in PAPERS] == list(ROWS)
    for paper in PAPERS:
        names = [f"Table {name}" for name in ROWS[paper.name]]
        names += [f"Figure {number}" for number in range(1, PLOTS[paper.name] + 1)]
        assert [table.name for table in paper.tables] == names
        for prefix in ("", "A."):
            found = {int(n[1]) for name in ROWS[paper.name] if (n := re.match(rf"{prefix}(\d+)", name))}
            assert found == set(range(1, len(found) + 1))


def test_tables_have_the_printed_number_of_rows() -> None:
    for paper in PAPERS:
        for table in paper.tables:
            if table.name.startswith("Table"):
                assert len(table.rows) == ROWS[paper.name][table.name.removeprefix("Table ")], table.name
                assert table.reason or table.cells


def test_untrained_rows_have_a_reason() -> None:
    reasons = [paper.reason for paper in PAPERS if not paper.tables]
    reasons += [table.reason for paper in PAPERS for table in paper.tables if not table.cells]
    reasons += [cell.reason for _, _, cell in CELLS if not cell.trained_by]
    assert len(reasons) > 40 and all(len(reason) > 15 for reason in reasons)


def test_rows_of_recipes_belong_to_one_table_each() -> None:
    own = Counter(cell.trained_by for _, cell in TRAINED if cell.is_own)
    rows = {f"{name}/{row.name}" for name in recipe_names() for row in find_recipe(name).rows.values()}
    published = {row for row in rows if re.match(r"[^/]+/([a-z]+_)?table", row)}
    assert own == dict.fromkeys(published, 1)
    assert {cell.trained_by for _, cell in TRAINED if GLOVE not in cell.trained_by} == published
    for row, (_, table) in origins(PAPERS).items():
        name = re.findall(r"table_?([a-d]?\d+[a-d]?)", row)[0]
        printed = table.removeprefix("Table ").replace(".", "").lower()
        assert name in (printed, printed.rstrip("ab"))


def test_only_sizes_are_printed_in_two_ways() -> None:
    """Every table has the same quality for a model; differing sizes have a note."""
    own = {cell.trained_by: cell for _, cell in TRAINED if cell.is_own}
    for table, cell in TRAINED:
        if cell.is_own or GLOVE in cell.trained_by:
            continue
        first = own[cell.trained_by]
        shared = cell.figures.keys() & first.figures.keys()
        differing = {name for name in shared if not same(cell.figures[name], first.figures[name])}
        assert differing <= SIZES.keys(), (table.name, cell.label)
        assert bool(cell.note) == bool(differing - {"embedding", "compression"}) or table.name == "Table 5"
        assert shared or table.name in ("Table A.3", "Table 5")


def same(one: str, other: str) -> bool:
    """Whether two printed figures are the same number."""
    return one == other or (one[-1].isdigit() and other[-1].isdigit() and float(one) == float(other))


def test_rows_have_the_hardware_of_their_paper() -> None:
    for table, cell in TRAINED:
        if cell.is_own:
            recipe, _, name = cell.trained_by.partition("/")
            row = find_recipe(recipe).row(name)
            assert row.paper is not None and row.paper["source"] == f"{table.paper}, {table.name}: {cell.row}"
            hardware = row.paper["hardware"]
            assert ("tokens" in hardware or "not printed" in hardware) == (row.batch is not None)


def test_every_cell_of_alone_in_the_grid_is_a_point_of_figure_3() -> None:
    grid = read_grid(find_recipe("glove_reconstruction"))
    patterns = [cell.trained_by.removeprefix(GLOVE) for table, cell in TRAINED if table.name == "Figure 3"]
    found = [cell.name for pattern in patterns for cell in grid.chosen([pattern])]
    assert sorted(found) == sorted(cell.name for cell in grid.cells() if cell.row in grid.alone)


def test_readme_matches_the_rows() -> None:
    text = README.read_text(encoding="utf-8")
    begin, end = (f"<!-- {word} {MARKER} -->\n" for word in ("BEGIN", "END"))
    assert text.split(begin)[1].split(end)[0] == markdown(PAPERS)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (README.parent / link).is_file(), link


def test_the_command_lists_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("coverage", command.main, ["coverage"]) == 0
    lines = capsys.readouterr().out.splitlines()
    empty = [table for paper in PAPERS for table in paper.tables if not table.cells]
    assert len(lines) == len(CELLS) + len(empty) + 1
    assert "UnClE, Table 8: 8: Our Method: BLEU 22.75: wmt14_ende/uncle_table8_unique8" in lines
    assert sum("not trained: " in line for line in lines) > 30


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"row": "a"}, "P, Table 1: a: expected one of name, same, cells and reason"),
        ({"row": "a", "same": "t", "reason": "z"}, "P, Table 1: a: expected one of name, same, cells and"),
        ({"row": "a", "reason": "z", "figures": {"bleau": 1}}, "unknown figure 'bleau'; expected bleu, "),
        ({"row": "b", "reason": "z"}, "P, Table 1: two rows 'b'; give them different labels"),
        ({"row": "a", "same": "none", "figures": []}, "P, Table 1: a: there is no row recipe/none"),
        ({"row": "a", "same": "t", "figures": ["total"]}, "P, Table 1: a: t has no figure 'total'"),
    ],
)
def test_invalid_tables_are_named(tmp_path: Path, row: dict[str, object], message: str) -> None:
    own = {"row": "t", "name": "t", "figures": {"bleu": 1}, "embedding": {"method": "standard"}}
    table = {"paper": "P", "table": "Table 1", "title": "x", "rows": [{"row": "b", "reason": "z"}, own, row]}
    content = {"kind": "translation", "groups": {"common": {}}, "tables": [table]}
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "rows.yaml").write_text(yaml.safe_dump(content))
    source = tmp_path / "papers.yaml"
    paper = {"paper": "P", "title": "P", "tables": ["Table 1"]}
    source.write_text(yaml.safe_dump({"recipes": ["recipe"], "papers": [paper]}))
    with pytest.raises(UserError, match=re.escape(message)):
        read_papers(source, tmp_path)


def test_tables_without_a_recipe_are_named(tmp_path: Path) -> None:
    paper = {"paper": "DeFINE", "title": "P", "tables": ["Table 99"]}
    source = tmp_path / "papers.yaml"
    source.write_text(yaml.safe_dump({"recipes": ["ptb_awd_lstm"], "papers": [paper]}))
    with pytest.raises(UserError, match="DeFINE: no recipe has its Table 99"):
        read_papers(source, RECIPES)


def test_labels_combine_row_and_column() -> None:
    assert Cell("256", "BLEU(A)").label == "256; BLEU(A)" and Cell("256").label == "256"
