"""Results files, tables made of them, the picture, the scores."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from recipes.common.bleu import corpus_scores

from recipes.common import table
from recipes.common.errors import UserError, run_main
from recipes.common.plot import draw_quality_size, label_rows, quality_size_plot
from recipes.common.results import REPOSITORY, read_results, write_results


def write(folder: Path, row: str, bleu: float = 30.0, embedding: int = 1000, **extra: Any) -> Path:
    path = folder / row / "results.json"
    write_results(
        path,
        recipe="recipe",
        row=row,
        config={"embedding": {"method": row.split("_")[0], "rank": 3}},
        counts={"embedding": embedding, "total": 2_500_000, "compression": 4.0},
        metrics={
            "bleu": bleu,
            "chrf": 50.0,
            "bleu_signature": "s",
            "training_seconds": 90.0,
            "tokens_per_second": 99.5,
        },
        data_checksum="c",
        **extra,
    )
    return path


def test_round_trip_adds_where_it_comes_from(tmp_path: Path) -> None:
    path = write(tmp_path, "standard", paper={"bleu": 41.0}, peak_memory_mib=12.5)
    (record,) = read_results(tmp_path)
    assert record == json.loads(path.read_text())
    assert record["metrics"]["bleu"] == 30.0
    assert record["paper"] == {"bleu": 41.0}
    assert record["peak_memory_mib"] == 12.5
    assert set(record["git"]) == {"commit", "dirty"}
    assert record["versions"]["python"] and record["versions"]["torch"]
    assert record["device"] and record["date"]
    assert read_results([path]) == [record]


@pytest.mark.parametrize("bad", [float("nan"), object()])
def test_what_json_cannot_say_is_refused_and_the_old_file_stays(tmp_path: Path, bad: object) -> None:
    path = write(tmp_path, "standard")
    before = path.read_text()
    with pytest.raises(ValueError):
        write(tmp_path, "standard", other=bad)
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("content", ["{", "[]", '{"recipe": "x"}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(UserError, match="not a results file"):
        read_results(tmp_path)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        read_results(tmp_path / "absent")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe with three rows, two of them run."""
    folder = tmp_path / "recipe"
    (folder / "configs").mkdir(parents=True)
    (folder / "configs" / "common.yaml").write_text("average: 4\n")
    for row in ("standard", "funnel_8x", "funnel_16x"):
        (folder / "configs" / f"{row}.yaml").write_text(f"embedding: {{method: {row.split('_')[0]}}}\n")
    (folder / "README.md").write_text("before\n<!-- BEGIN results -->\nold\n<!-- END results -->\nafter\n")
    write(tmp_path / "runs", "standard", bleu=30.0, embedding=1_000_000)
    write(tmp_path / "runs", "funnel_16x", bleu=29.44, embedding=62_500)
    return folder


def test_table_goes_between_the_markers(recipe: Path, tmp_path: Path) -> None:
    arguments = ["--results", str(tmp_path / "runs"), "--readme", str(recipe / "README.md")]
    assert run_main("table", table.main, arguments) == 0
    lines = (recipe / "README.md").read_text().splitlines()
    assert lines[:2] == ["before", "<!-- BEGIN results -->"]
    assert lines[-2:] == ["<!-- END results -->", "after"]
    _, _, standard, small, smaller = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:-2]
    )
    assert standard[:7] == ["standard", "standard", "rank 3", "1.00 M", "4.0x", "2.50 M", "30.0"]
    assert standard[7:9] == ["–", "50.0"]
    assert small == ["funnel_8x", "funnel", "–"] + ["not run"] * 9
    assert smaller[3] == "62.5 k" and smaller[7] == "-0.6" and smaller[9:11] == ["2", "100"]
    assert (recipe / "quality_size.png").read_bytes().startswith(b"\x89PNG")
    assert run_main("table", table.main, arguments) == 0
    assert (recipe / "README.md").read_text().splitlines() == lines


def write_perplexity(folder: Path, row: str, perplexity: float) -> None:
    write_results(
        folder / row / "results.json",
        recipe="recipe",
        row=row,
        config={"embedding": {"method": row.split("_")[1]}},
        counts={"embedding": 1000, "total": 2000, "compression": 4.0},
        metrics={"perplexity": perplexity, "valid_perplexity": 70.0, "pointer_perplexity": 50.0},
        data_checksum="c",
        paper={"perplexity": 57.3},
    )


def test_table_of_language_models(tmp_path: Path) -> None:
    configs = tmp_path / "recipe" / "configs"
    configs.mkdir(parents=True)
    (configs / "common.yaml").write_text("train: {}\n")
    (configs / "common_small.yaml").write_text("train: {}\n")
    for row in ("small_standard", "small_funnel", "small_alone", "table1_standard"):
        (configs / f"{row}.yaml").write_text(
            f"embedding: {{method: {row.split('_')[1]}}}\npaper: {{perplexity: 57.3}}\n"
        )
    readme = tmp_path / "recipe" / "README.md"
    readme.write_text("<!-- BEGIN small -->\n<!-- END small -->\n")
    write_perplexity(tmp_path / "runs", "small_standard", 120.0)
    write_perplexity(tmp_path / "runs", "small_funnel", 124.06)
    write_perplexity(tmp_path / "runs", "table1_standard", 60.0)
    arguments = ["--results", str(tmp_path / "runs"), "--readme", str(readme), "--marker", "small"]
    arguments += ["--rows", "small_*", "--quality", "perplexity"]
    assert run_main("table", table.main, arguments) == 0
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in readme.read_text().splitlines()
    ]
    assert [line[0] for line in lines[3:-1]] == ["small_standard", "small_alone", "small_funnel"]
    assert lines[3][6:9] == ["70.0", "120.0", "–"]
    assert lines[4][3:] == ["not run"] * 9
    assert lines[5][6:9] == ["70.0", "124.1", "+4.1"]
    assert (readme.parent / "quality_size.png").read_bytes().startswith(b"\x89PNG")
    arguments += ["--columns", "row,pointer_perplexity,paper_perplexity"]
    assert run_main("table", table.main, arguments) == 0
    assert "| small_funnel | 50.0 | 57.3 |" in readme.read_text()
    assert "| small_alone | not run | 57.3 |" in readme.read_text()
    (configs / "small_alone.yaml").write_text(
        "embedding: {method: alone}\ndistill: {teacher: small_standard}\n"
    )
    (configs / "small_alone_fitted.yaml").write_text("like: small_alone\nfit: {teacher: small_standard}\n")
    assert run_main("table", table.main, [*arguments, "--from-scratch"]) == 0
    assert "small_funnel" in readme.read_text() and "small_alone" not in readme.read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [(["--rows", "big_*"], "no row is called big_"), (["--columns", "blue"], "no column 'blue'")],
)
def test_tables_that_cannot_be(
    recipe: Path, tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--results", str(tmp_path / "runs"), "--readme", str(recipe / "README.md"), *more]
    assert run_main("table", table.main, arguments) == 2
    assert message in capsys.readouterr().err


def test_baseline_of_each_group(tmp_path: Path) -> None:
    for row, perplexity in [
        ("a_standard", 10.0),
        ("a_b_standard", 20.0),
        ("a_b_x", 26.0),
        ("a_x", 13.0),
        ("c_x", 1.0),
    ]:
        write_perplexity(tmp_path, row, perplexity)
    records = table.with_differences(read_results(tmp_path))
    found = {record["row"]: record["metrics"].get("perplexity_difference") for record in records}
    assert found == {"a_standard": 0.0, "a_b_standard": 0.0, "a_b_x": 6.0, "a_x": 3.0, "c_x": None}


@pytest.mark.parametrize(
    "text", ["none", "<!-- END results --><!-- BEGIN results -->", "<!-- BEGIN results -->" * 2]
)
def test_readme_without_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text)
    with pytest.raises(UserError, match="<!-- BEGIN results -->"):
        table.update_readme(readme, "results", "table")
    assert readme.read_text() == text


def test_columns_of_ones_own_and_missing_values(tmp_path: Path) -> None:
    write(tmp_path, "alone")
    own = table.Column("own", lambda record: record["metrics"]["absent"])
    text = table.markdown_table(read_results(tmp_path), ["row", "difference", own])
    assert text.splitlines()[2] == "| alone | not run | not run |"


def test_plot_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path, "standard")
    path = tmp_path / "plot.png"
    path.write_text("old")
    with pytest.raises(KeyError):
        quality_size_plot([{"config": {}, "row": "x", "counts": {}, "metrics": {}}], path)
    assert path.read_text() == "old"
    quality_size_plot(read_results(tmp_path), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_names_of_rows_do_not_cover_each_other() -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    records = [
        {"row": f"row_{place}", "config": {}, "counts": {"embedding": 1000}, "metrics": {"bleu": 30.0}}
        for place in range(9)
    ]
    far = {"row": "far", "config": {}, "counts": {"embedding": 90_000}, "metrics": {"bleu": 9.0}}
    draw_quality_size(axes, [*records, far], "bleu")
    label_rows(axes, [*records, far], "bleu")
    assert [label.get_text() for label in axes.texts] == ["row_0", "row_1", "row_2", "row_3", "far"]
    boxes = [label.get_window_extent() for label in axes.texts]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_bleu_of_known_cases() -> None:
    perfect = corpus_scores(["the cat sat on the mat ."], ["the cat sat on the mat ."])
    assert perfect["bleu"] == pytest.approx(100.0)
    assert "nrefs:1" in perfect["bleu_signature"] and "version:" in perfect["chrf_signature"]
    # Matches: 5 of 6 words, 3 of 5 pairs, 2 of 4 triples, 1 of 3 quadruples; no brevity penalty.
    scores = corpus_scores(["the cat sat on a mat"], ["the cat sat on the mat"])
    assert scores["bleu"] == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)


def test_bleu_refuses_sides_that_do_not_match() -> None:
    with pytest.raises(UserError, match="1 translations for 2 references"):
        corpus_scores(["a"], ["a", "b"])
    with pytest.raises(UserError, match="empty"):
        corpus_scores([], [])


def test_paths_are_told_from_the_repository_on(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    inside = str(REPOSITORY / "runs" / "model")
    config = {"train": {"save_model": inside, "models": [inside, "/elsewhere"]}, "steps": 3}
    write_results(path, recipe="r", row="a", config=config, counts={}, metrics={}, data_checksum="0")
    (record,) = read_results([path])
    local = str(Path("runs") / "model")
    assert record["config"] == {"train": {"save_model": local, "models": [local, "/elsewhere"]}, "steps": 3}
