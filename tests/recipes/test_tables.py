"""The papers' tables and their coverage, the table that compares compressed rows, and training curves."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from recipes import __main__ as command
from recipes.common import tools
from recipes.common.plot import BLEU, LOSS, PERPLEXITY, PLAIN, read_curves, short_names, validation_curve
from recipes.common.recipe import RECIPES, Recipe, find_recipe, recipe_names
from recipes.common.results import not_run, read_results, write_result
from recipes.common.table import comparison_table, markdown_table
from recipes.common.tools import run_main
from recipes.language_model import evaluate, train
from recipes.papers import MARKER, README, SIZES, coverage_tables, origins, read_papers
from recipes.reconstruction import read_grid
from recipes.report.lines import Line, Point, measured_lines, points_of
from shared_embeddings.utils.errors import UserError
from tests.lm.runs import write_corpus

# Rows of each table in print, counted in the papers. Table 7b of DeFINE is a plot.
PRINTED_ROWS = {
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


def test_tables_have_the_printed_rows_and_untrained_ones_a_reason() -> None:
    assert [paper.name for paper in PAPERS] == list(PRINTED_ROWS)
    for paper in PAPERS:
        names = [f"Table {name}" for name in PRINTED_ROWS[paper.name]]
        names += [f"Figure {number}" for number in range(1, PLOTS[paper.name] + 1)]
        assert [table.name for table in paper.tables] == names
        for table in paper.tables[: len(PRINTED_ROWS[paper.name])]:
            assert len(table.rows) == PRINTED_ROWS[paper.name][table.name.removeprefix("Table ")], table.name
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

    def same(one: str, other: str) -> bool:
        return one == other or (one[-1].isdigit() and other[-1].isdigit() and float(one) == float(other))

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
    assert text.split(begin)[1].split(end)[0] == coverage_tables(PAPERS)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (README.parent / link).is_file(), link


def plotted(figure: str, lines: dict[str, Line]) -> list[Point]:
    """The points of a figure of UnClE."""
    tables = next(paper.tables for paper in PAPERS if paper.name == "UnClE")
    return points_of(next(table for table in tables if table.name == figure), tables, lines)


def test_figures_of_uncle_have_the_printed_points() -> None:
    """Figure 3: Tables 3, 11 and 12 by ratio; Figure 4: Table 13; Figure 5: Table 14, both data sets."""
    third = {(point.method, point.x): point.paper for point in plotted("Figure 3", {})}
    assert Counter(method for method, _ in third) == {PLAIN: 1, "uncle": 4, "projective": 6, "adaptive": 6}
    assert third["uncle", 11.69] == 25.92 and third["projective", 63.2] == 1.91
    assert third["adaptive", 24.06] == 21.85 and third[PLAIN, 1.0] == 27.82
    fourth = {(point.method, point.x): point.paper for point in plotted("Figure 4", {})}
    assert fourth["projective", 8] == 1.91 and fourth["uncle", 8] == 22.75 and len(fourth) == 12
    fifth = {(point.recipe, point.method, point.x): point.paper for point in plotted("Figure 5", {})}
    assert fifth["ptb_awd_lstm", "uncle", 25] == 75.58 and len(fifth) == 16
    assert fifth["wikitext2_awd_lstm", PLAIN, 25] == 708.02
    assert all(point.ours is None for point in plotted("Figure 3", {}))


def test_figures_show_our_results_beside_the_papers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, perplexity in ((1, 70.0), (2, 72.0)):
        write_result(
            tmp_path / "runs" / "ptb_awd_lstm" / str(seed),
            "table4_unique50",
            config={"seed": seed},
            counts={"embedding": 1},
            metrics={"perplexity": perplexity},
            data_checksum="c",
        )
    found = [one for one in plotted("Figure 5", measured_lines(tmp_path / "runs")) if one.ours is not None]
    assert [(one.recipe, one.method, one.x, one.paper) for one in found] == [
        ("ptb_awd_lstm", "uncle", 50, 68.75)
    ]
    assert found[0].ours is not None and (found[0].ours.mean, found[0].ours.runs) == (71.0, 2)
    asked = ["figures", "--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "pictures")]
    assert run_main("figures", command.main, asked) == 0
    pictures = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in pictures] == [f"uncle_figure_{number}.png" for number in (3, 4, 5)]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    assert run_main("figures", command.main, asked) == 2
    assert "--force" in capsys.readouterr().err


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


ROWS = """
kind: language_model
groups:
  common: {common}
variants:
  distilled: {{distill: {{teacher: standard, alpha: 0.1}}, train: {{steps: 9}}}}
  finetuned: {{distill: {{teacher: standard, alpha: 0}}, train: {finetuned}}}
  fitted: {{fit: {{teacher: standard}}}}
rows:
  standard: {{embedding: {{method: standard, output_bias: true}}}}
  f_4x:
    embedding: {{method: funnel, rank: 3, output_bias: true}}
    variants: [distilled, finetuned, fitted]
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    made = Recipe(tmp_path / "recipe")
    made.folder.mkdir()
    text = ROWS.format(common="{train: {seed: 7, steps: 100}}", finetuned="{steps: 9}")
    (made.folder / "rows.yaml").write_text(text)
    return made


def test_comparison_table(recipe: Recipe) -> None:
    def config(name: str) -> dict[str, Any]:
        return {key: value for key, value in recipe.row(name).settings().items() if key != "train"}

    def measured(row: str, config: dict[str, Any], bleu: float, bits: int) -> dict[str, Any]:
        counts = {"total": 1_500_000, "rest": 100, "stored_bits": bits + 3200}  # the rest is in float32
        return {**not_run(row, config), "counts": counts, "metrics": {"bleu": bleu}}

    records = [
        measured("standard", config("standard"), 30.04, 6400),
        not_run("adaptive_4x", {"embedding": {"method": "adaptive"}}),
        not_run("f_4x", config("f_4x")),
        not_run("f_4x_distilled", config("f_4x_distilled")),
        not_run("f_4x_finetuned", {**config("f_4x_finetuned"), "train": {"epochs": 1}}),
        measured("f_4x_fitted", config("f_4x_fitted"), 12.34, 1600),
        not_run("smaller_4x", config("standard")),
    ]
    header, _, *lines = comparison_table(records, "bleu").splitlines()
    assert header.endswith("| fitted | finetuned | distilled | from scratch | finetuned for |")
    assert lines == [
        "| standard | output_bias True | – | 32.00 | 1.50 M | – | – | – | 30.0 | – |",
        "| f_4x | rank 3, output_bias True | 4.0x | 8.00 | 1.50 M | 12.3 | "
        "not run | not run | not run | 1 epoch |",
        "| smaller_4x | output_bias True | not run | not run | not run | – | – | – | not run | – |",
    ]


@pytest.mark.parametrize("name", ["multi30k_ende", "ptb_awd_lstm"])
def test_compared_rows_differ_only_in_their_start(name: str) -> None:
    rows = find_recipe(name).rows
    fitted = [row for row in rows if row.endswith("_fitted")]
    assert len(fitted) >= 12
    for row in fitted:
        base = row.removesuffix("_fitted")
        if base not in rows:
            continue  # rounded and quantized tables are compared after the fit
        first, tuned, distilled = (rows[f"{base}_{way}"] for way in ("fitted", "finetuned", "distilled"))
        teacher = distilled.teacher
        assert first.fit == {"teacher": teacher} and first.embedding == distilled.embedding
        assert distilled.distill == {"teacher": teacher, "alpha": 0.01} and base in rows
        assert tuned == replace(distilled, name=tuned.name, distill={"teacher": teacher, "alpha": 0})


def test_arguments_of_the_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(tools, "run_module", lambda *call: asked.append(" ".join(map(str, call[1]))))
    embedding = {"method": "define", "output": "table", "map_dim": 3, "shape": [2, 3]}
    for fit in ({}, {"fit_steps": 7, "store": "int8"}):
        tools.fit_model(Path("t.pt"), embedding, Path("c.tsv"), 5, tmp_path / "best.pt", fit)
    assert asked[0].startswith("compress --model t.pt --method define --token-counts c.tsv --seed 5 ")
    assert f"--report {tmp_path / 'fit.json'}" in asked[0] and "--fit-steps" not in asked[0]
    assert asked[0].endswith("--embedding-output table --map_dim 3 --shape [2, 3]")
    assert "--fit-steps 7 --store int8 --embedding-output table" in asked[1]


SMALL_MODEL = """
    train: {model: awd_lstm, embedding_dim: 8, hidden_dim: 12, num_layers: 2, steps: 3, seed: 3,
            batch_size: 2, sequence_length: 5, learning_rate: 1.0, valid_batch_size: 1}
    evaluate: {target_length: 7}
"""


@pytest.mark.slow
def test_distilled_language_model_starts_from_the_fit(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("RANK", raising=False)
    recipe.home.mkdir(parents=True)
    write_corpus(tmp_path / "corpus").rename(recipe.data)
    # Without learning, the first step of the finetuned row changes nothing.
    text = ROWS.format(common=SMALL_MODEL, finetuned="{steps: 1, learning_rate: 1.0e-30}")
    (recipe.folder / "rows.yaml").write_text(text)
    row = recipe.row("f_4x_fitted")
    with pytest.raises(UserError, match="starts from standard; .* run recipes/.*/train.sh standard"):
        train(recipe, row, [])
    train(recipe, recipe.row("standard"), [])
    with pytest.raises(UserError, match="fitted, not trained: -steps has no effect"):
        train(recipe, row, ["-steps", "5"])
    train(recipe, row, [])
    train(recipe, recipe.row("f_4x_finetuned"), [])
    first, second = (
        torch.load(recipe.home / name / "best.pt", weights_only=True)["model"]
        for name in ("f_4x_fitted", "f_4x_finetuned")
    )
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor)
    evaluate(recipe, row, [])
    (record,) = read_results(recipe.home)
    assert record["metrics"]["perplexity"] > 1 and record["config"]["fit"] == {"teacher": "standard"}
    (line,) = markdown_table([record], ["options"]).splitlines()[2:]
    assert line == "| rank 3, output_bias True, fitted to standard, not trained |"
    assert json.loads((recipe.home / "f_4x_fitted" / "fit.json").read_text())["method"] == "funnel"


LM_LOG = """Training starts: 2,000 tokens per epoch
step 100 epoch 0.05 loss 8.018075 ppl 3035.33 lr 19.97 | 1,748 tokens/s, 38:52 left
step 200 epoch 0.10 loss 7.235545 ppl 1387.90 lr 19.89 | 2,963 tokens/s, 30:08 left
step 200 valid loss 5.572150 ppl 263.00 (the best so far)
step 300 epoch 0.10 loss nan ppl nan lr 19.89 | 2,963 tokens/s, 30:08 left
"""
NMT_LOG = """[2026 INFO] Step 50/  100; acc: 9.1; ppl: 320.1; xent: 5.8; lr: 0.00003; 5 sec; BLEU: 1.5
[2026 INFO] Validation perplexity: 30.5
[2026 INFO] Step 100/  100; acc: 12.2; ppl: 55.0; xent: 4.0; lr: 0.00003; 20/19 tok/s; 9 sec;
[2026 INFO] Validation perplexity: 20
[2026 INFO] Step 50/  100; acc: 9.1; ppl: 320.1; xent: 5.7; lr: 0.00003; 20/19 tok/s; 5 sec;
[2026 INFO] Validation perplexity: 29.5
[2026 INFO] Validation perplexity: broken
"""


def run_of(folder: Path, log: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "train.log").write_text(log)
    return folder


def test_logs_of_both_hosts(tmp_path: Path) -> None:
    found = read_curves(run_of(tmp_path / "run", LM_LOG))
    assert found[LOSS][:2] == [(100, 8.018075), (200, 7.235545)] and found[LOSS][2][0] == 300
    assert found[PERPLEXITY] == [(200, 263.0)]
    assert read_curves(tmp_path / "run" / "train.log").keys() == found.keys()
    run = run_of(tmp_path / "resumed", NMT_LOG)
    curve = [(50, 29.5), (100, 20.0)]
    assert read_curves(run) == {LOSS: [(50, 5.7), (100, 4.0)], PERPLEXITY: curve, BLEU: [(50, 1.5)]}
    assert validation_curve(run) == curve
    assert validation_curve(tmp_path / "nowhere") == []


def test_event_files_of_both_hosts(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for folder, values in (
        ("lm/tensorboard", {"valid/perplexity": {10: 80.0, 20: 40.0}, "train/rate": {1: 1.0}}),
        ("nmt/Nov-24", {"valid/ppl": {10: 80.0}, "valid/BLEU": {10: 2.5}}),
        ("nmt/Nov-25", {"progress/xent": {5: 4.0}, "valid/ppl": {20: 40.0}}),
    ):
        writer: Any = SummaryWriter(str(tmp_path / folder))
        for tag, points in values.items():
            for step, value in points.items():
                writer.add_scalar(tag, value, step)
        writer.close()
    curve = [(10, 80.0), (20, 40.0)]
    assert validation_curve(tmp_path / "lm") == curve
    assert read_curves(tmp_path / "nmt") == {PERPLEXITY: curve, BLEU: [(10, 2.5)], LOSS: [(5, 4.0)]}


def test_runs_have_the_shortest_names_that_differ() -> None:
    assert short_names([Path("/a/x/run"), Path("/a/y/run")]) == ["x/run", "y/run"]
    assert short_names([Path("/a/x/run")]) == ["run"]


def test_several_runs_are_drawn_in_one_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(run_of(tmp_path / "one", LM_LOG)), str(run_of(tmp_path / "two", NMT_LOG))]
    picture = tmp_path / "curves.png"
    arguments = ["plot", *runs, "--output", str(picture)]
    assert run_main("plot", command.main, arguments) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{picture}\n"
    assert run_main("plot", command.main, arguments) == 2
    assert "--force" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    arguments = ["plot", str(tmp_path / "empty"), "--output", str(tmp_path / "x.png")]
    assert run_main("plot", command.main, arguments) == 2
    assert "empty: no train.log" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
