"""Results, tables made of them, pictures, and the scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes import __main__ as command
from recipes.common import plot, table, tools
from recipes.common.ngrams import bits_of_a_number, ngram_plot, series
from recipes.common.recipe import Recipe, find_recipe, read_file, recipe_names
from recipes.common.results import FILE, REPOSITORY, Record, find_result, read_results, write_result
from recipes.common.table import (
    comparison_table,
    update_tables,
)
from recipes.common.tools import run_main
from recipes.translation.train import corpus_scores
from shared_embeddings.utils.errors import UserError


def tables_of(name: str) -> list[Any]:
    return list(read_file(find_recipe(name).folder / "rows.yaml").get("readme", []))


def write(folder: Path, row: str, bleu: float = 30.0, embedding: int = 1000, **extra: Any) -> Path:
    counts = {"embedding": embedding, "stored_bits": 32 * embedding}
    metrics = {"bleu": bleu, "chrf": 50.0, "bleu_signature": "s", "training_seconds": 90.0}
    return write_result(
        folder,
        row,
        config={"embedding": {"method": row.split("_")[0], "rank": 3}},
        counts={**counts, "total": 2_500_000, "dense_embedding": 4_000_000},
        metrics={**metrics, "tokens_per_second": 99.5},
        data_checksum="c",
        **extra,
    )


def test_round_trip_adds_provenance_and_relative_paths(tmp_path: Path) -> None:
    inside = REPOSITORY / "runs" / "model"
    path = write(tmp_path / "runs", "standard", peak_memory_mib=12.5, models=[str(inside), "/elsewhere"])
    (record,) = read_results(tmp_path / "runs")
    assert path == tmp_path / "runs" / FILE and record == json.loads(path.read_text())
    assert record["metrics"]["bleu"] == 30.0 and record["peak_memory_mib"] == 12.5
    assert set(record["git"]) == {"commit", "dirty"}
    assert record["versions"]["python"] and record["versions"]["torch"]
    assert record["device"] and record["date"]
    assert record["models"] == [str(Path("runs") / "model"), "/elsewhere"]
    assert read_results(path) == [record] == [find_result(tmp_path / "runs", "standard")]
    assert find_result(tmp_path / "runs", "funnel") is find_result(tmp_path, "standard") is None


def test_a_row_has_one_line_in_natural_order(tmp_path: Path) -> None:
    for number, row in enumerate(("funnel_16x", "funnel_8x", "standard", "funnel_8x")):
        path = write(tmp_path, row, bleu=number)
    scores = {record["row"]: record["metrics"]["bleu"] for record in read_results(tmp_path)}
    assert list(scores.items()) == [("funnel_8x", 3), ("funnel_16x", 0), ("standard", 2)]
    assert [json.loads(line)["row"] for line in path.read_text().splitlines()] == list(scores)


@pytest.mark.parametrize("content", ["{", "[]", '{"row": "x"}', '{"row": 3, "config": {}}'])
def test_invalid_lines_are_named(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, "standard")
    path.write_text(path.read_text() + content)
    with pytest.raises(UserError, match="results.jsonl: line 2"):
        read_results(tmp_path)


# Tables

ROWS = """
kind: translation
readme:
- {marker: results, quality: bleu, picture: quality_size.png}
- {marker: scratch, rows: funnel*, from_scratch: true, columns: "row,paper_perplexity"}
groups: {common: {average: 4}}
variants: {fitted: {fit: {teacher: standard}}}
rows:
  standard: {embedding: {method: standard}}
  funnel_8x: {embedding: {method: funnel}, variants: [fitted]}
  funnel_16x: {embedding: {method: funnel}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A recipe with four rows, two of them run."""
    write(tmp_path / "runs", "standard", bleu=30.0, embedding=1_000_000)
    write(tmp_path / "runs", "funnel_16x", bleu=29.44, embedding=62_500)
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "rows.yaml").write_text(ROWS)
    parts = [f"before\n<!-- BEGIN {name} -->\nold\n<!-- END {name} -->\n" for name in ("results", "scratch")]
    (folder / "README.md").write_text("".join(parts) + "after\n")
    return Recipe(folder)


def test_tables_are_written_between_the_markers(recipe: Recipe, tmp_path: Path) -> None:
    readme = recipe.folder / "README.md"
    printed = update_tables(recipe, tmp_path / "runs", readme)
    assert printed == f"{readme}: 2 of 4 rows measured"
    lines = readme.read_text().splitlines()
    end = lines.index("<!-- END results -->")
    assert lines[:2] == ["before", "<!-- BEGIN results -->"] and lines[-1] == "after"
    *table, empty, missing = lines[2:end]
    _, _, standard, smaller = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    assert standard[:7] == ["standard", "standard", "rank 3", "1.00 M", "4.00 MB", "4.0x", "2.50 M"]
    assert standard[7:10] == ["30.0", "–", "50.0"]
    assert (empty, missing) == ("", "Not run: `funnel_8x`, `funnel_8x_fitted`.")
    assert smaller[3:6] == ["62.5 k", "250.0 kB", "64.0x"]
    assert smaller[8] == "-0.6" and smaller[10:12] == ["2", "100"]
    assert "| funnel_16x | – |" in lines[end:] and "funnel_8x_fitted" not in " ".join(lines[end:])
    assert (recipe.folder / "quality_size.png").read_bytes().startswith(b"\x89PNG")
    update_tables(recipe, tmp_path / "runs", readme)
    assert readme.read_text().splitlines() == lines
    update_tables(recipe, tmp_path / "nowhere", readme)
    assert "Not run: `standard`, `funnel_8x`, `funnel_8x_fitted`, `funnel_16x`.\n" in readme.read_text()


def test_tables_show_the_mean_and_the_range_of_seeds(recipe: Recipe, tmp_path: Path) -> None:
    rows = (recipe.folder / "rows.yaml").read_text()
    seeded = rows.replace("{method: funnel}}", "{method: funnel}, seeds: [2, 3]}")
    (recipe.folder / "rows.yaml").write_text(seeded)
    write(tmp_path / "runs", "funnel_16x_seed2", bleu=28.0)
    write(tmp_path / "runs", "funnel_16x_seed3", bleu=30.0, device="cuda: 1 x X")
    readme = recipe.folder / "README.md"
    update_tables(recipe, tmp_path / "runs", readme)
    text = readme.read_text()
    assert "| 29.1 (28.0 to 30.0) | -0.9 | 50.0 |" in text and "_seed" not in text
    write(tmp_path / "runs", "standard", device="cuda: 1 x X")
    update_tables(recipe, tmp_path / "runs", readme)
    assert "| 2 (GPU) | 100 (GPU) |" in readme.read_text()


def test_headlines_of_several_seeds_have_mean_scores(recipe: Recipe, tmp_path: Path) -> None:
    rows = (
        (recipe.folder / "rows.yaml")
        .read_text()
        .replace("quality: bleu, picture: quality_size.png", "table: headlines")
    )
    (recipe.folder / "rows.yaml").write_text(
        rows.replace("{method: standard}}", "{method: standard}, seeds: [2]}")
    )
    for row, score in (("standard", 20.0), ("standard_seed2", 23.0)):
        rouge = {name: {"mean": score} for name in ("rouge1", "rouge2", "rougeL")}
        length = {"f1": rouge, "recall": rouge, "within": 90.0, "difference": 1.0}
        counts = {"embedding": 1000, "stored_bits": 32_000, "dense_embedding": 1000}
        metrics = {"length_30": length, "length_50": length, "training_seconds": 60.0}
        config = {"embedding": {"method": "standard"}}
        write_result(tmp_path / "runs", row, config=config, counts=counts, metrics=metrics, data_checksum="c")
    update_tables(recipe, tmp_path / "runs", recipe.folder / "README.md")
    scores = " | ".join(["21.5"] * 6)
    assert f"| 1.0x | 50 | {scores} | 2 | 90 % | 1.0 | – | 1 |" in (recipe.folder / "README.md").read_text()


def test_tables_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["glove_reconstruction"], "glove_reconstruction has no tables"),
        (["quickstart", "--results", str(tmp_path)], "no such file"),
    ):
        assert run_main("table", command.main, ["table", *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow_except("gigaword_headline")
@pytest.mark.parametrize("name", [name for name in recipe_names() if tables_of(name)])
def test_readme_tables_match_the_results(name: str, tmp_path: Path) -> None:
    recipe, readme = find_recipe(name), tmp_path / "README.md"
    original = recipe.page.read_text(encoding="utf-8")
    readme.write_text(original, encoding="utf-8")
    update_tables(recipe, recipe.folder / FILE, readme)
    assert readme.read_text(encoding="utf-8") == original


def test_bits_of_tables_of_ngrams_and_their_picture(tmp_path: Path) -> None:
    """Rows with codes of 2 bits and FP8, beside the model that they start from, and one without a table."""

    def record(row: str, perplexity: float, bits: int = 0, fit: Any = None, **embedding: str) -> Record:
        config = {"fit": fit, "embedding": embedding, "train": {"ngram_rows": 10}}
        counts = {"dense_ngrams": 100, "ngram_bits": bits}
        return {"row": row, "metrics": {"perplexity": perplexity}, "config": config, "counts": counts}

    start = {"teacher": "ptb_ngrams"}
    records = [
        record("ptb_standard", 50.0),
        record("ptb_ngrams", 40.0, 3200),
        record("ptb_a_fitted", 41.0, 212, start, method="quantized"),
        record("ptb_b_fitted", 40.5, 212, {**start, "calibrate": True}, method="quantized"),
        record("ptb_c_fitted", 45.0, 250, start, method="quantized", codec="uniform"),
        record("ptb_d_fitted", 40.1, 3200, {**start, "fp8": True}, method="standard"),
    ]
    assert [series(line) for line in records] == [
        *("–", "fp32", "trellis", "trellis, calibrated", "rounded in groups", "FP8, one scale"),
    ]
    assert [bits_of_a_number(line) for line in records[1:]] == [32.0, 2.12, 2.12, 2.5, 8.32]
    assert table.describe_ngrams(records[1]) == "rows 10"
    ngram_plot(records, tmp_path / "x.png", "perplexity", "Tables")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_rows_are_compared_with_their_teacher_or_the_nearest_baseline() -> None:
    teacher = {"row": "fp32", "config": {}, "metrics": {"bleu": 30.0}}
    plain = {"row": "standard", "config": {}, "metrics": {"bleu": 35.0}}
    for key in ("fit", "distill"):
        student = {"row": "funnel", "config": {key: {"teacher": "fp32"}}, "metrics": {"bleu": 29.0}}
        *_, compared = table.with_differences([plain, teacher, student])
        assert compared["metrics"]["bleu_difference"] == -1.0
        *_, compared = table.with_differences([plain, student])
        assert "bleu_difference" not in compared["metrics"]
    scores = {"a_standard": 10.0, "a_b_standard": 20.0, "a_b_x": 26.0, "a_x": 13.0, "c_x": 1.0}
    records = [
        {"row": name, "config": {}, "metrics": {"perplexity": score}} for name, score in scores.items()
    ]
    compared = {record["row"]: record["metrics"] for record in table.with_differences(records)}
    differences = {name: metrics.get("perplexity_difference") for name, metrics in compared.items()}
    assert differences == {"a_standard": 0.0, "a_b_standard": 0.0, "a_b_x": 6.0, "a_x": 3.0, "c_x": None}


# The comparison

COMPARED = """
kind: language_model
groups: {common: {train: {seed: 7, steps: 100}}}
variants:
  distilled: {distill: {teacher: standard, alpha: 0.1}, train: {steps: 9}}
  finetuned: {distill: {teacher: standard, alpha: 0}, train: {steps: 9}}
  fitted: {fit: {teacher: standard}}
rows:
  standard: {embedding: {method: standard, output_bias: true}}
  f_4x: {embedding: {method: funnel, rank: 3, output_bias: true}, variants: [distilled, finetuned, fitted]}
"""


def test_comparison_table(tmp_path: Path) -> None:
    (tmp_path / "rows.yaml").write_text(COMPARED)
    recipe = Recipe(tmp_path)

    def config(name: str) -> dict[str, Any]:
        return {key: value for key, value in recipe.row(name).settings().items() if key != "train"}

    def measured(row: str, config: dict[str, Any], bleu: float, bits: int) -> dict[str, Any]:
        counts = {"total": 1_500_000, "rest": 100, "stored_bits": bits + 3200}  # the rest is in float32
        return {**not_run(row, config), "counts": counts, "metrics": {"bleu": bleu}}

    def not_run(row: str, config: dict[str, Any]) -> dict[str, Any]:
        return {"row": row, "config": config, "counts": {}, "metrics": {}}

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


def test_arguments_of_the_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(tools, "run_command", lambda *call: asked.append(" ".join(map(str, call[1]))))
    embedding = {"method": "define", "output": "table", "map_dim": 3, "shape": [2, 3]}
    texts = [Path("a.txt"), Path("b.txt")]
    for fit in ({}, {"fit_steps": 7, "store": "int8"}, {"calibrate": True, "recover_steps": 9}):
        tools.fit_model(Path("t.pt"), embedding, Path("c.tsv"), texts, 5, tmp_path / "best.pt", fit)
    assert asked[0].startswith(f"compress --model t.pt --method {json.dumps(embedding)} --token-counts c.tsv")
    assert f"--report {tmp_path / 'fit.json'}" in asked[0] and "--fit-steps" not in asked[0]
    assert asked[1].endswith("--fit-steps 7 --store int8")
    assert "--text a.txt b.txt --seed 5" in asked[2] and asked[2].endswith("--recover 9steps")
    assert "--token-counts" not in asked[2]


# Pictures


def row(name: str, size: int = 1000, quality: float = 30.0, **config: Any) -> dict[str, Any]:
    """The record of a row with an embedding of `size` parameters."""
    counts = {"embedding": size, "stored_bits": 32 * size}
    metrics = {"bleu": quality, "perplexity": quality}
    return {"row": name, "config": config, "counts": counts, "metrics": metrics}


def test_methods_show_their_best_row_at_each_size() -> None:
    records = [row("a", 1000, 1.0), row("b", 1010, 2.0), row("c", 2000, 0.5)]
    assert [best["row"] for best in plot.best_of_each_size(records, "bleu")] == ["b"]  # c is larger and worse
    assert [best["row"] for best in plot.best_of_each_size(records, "perplexity")] == ["a", "c"]
    assert len(plot.best_of_each_size(records, "bleu", records)) == 3
    # A kept row stays beside a better one of its method and size.
    assert {best["row"] for best in plot.best_of_each_size(records, "bleu", records[:1])} == {"a", "b"}


def test_bleu_of_known_cases() -> None:
    perfect = corpus_scores(["the cat sat on the mat ."], ["the cat sat on the mat ."])
    assert perfect["bleu"] == pytest.approx(100.0)
    assert "nrefs:1" in perfect["bleu_signature"] and "version:" in perfect["chrf_signature"]
    # Matches: 5 of 6 words, 3 of 5 pairs, 2 of 4 triples, 1 of 3 quadruples; no brevity penalty.
    scores = corpus_scores(["the cat sat on a mat"], ["the cat sat on the mat"])
    assert scores["bleu"] == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    for hypotheses, message in ((["a"], "1 translations for 2 references"), ([], "0 references")):
        with pytest.raises(UserError, match=message):
            corpus_scores(hypotheses, ["a", "b"] if hypotheses else [])
