"""The report and its results, docs/claims.md: verdicts by hand, and the layers of embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes import report
from recipes.__main__ import main
from recipes.common.recipe import Recipe, recipe_names
from recipes.common.results import by_importance, find_measure, flatten, write_result
from recipes.common.table import mean_record
from recipes.common.tools import run_main
from recipes.layers import LayerCorrelation, Moments, layer_correlations, layers
from recipes.papers import read_papers
from recipes.report import (
    CLAIMS,
    CLAIMS_PAGE,
    COMPARISON,
    Noise,
    best_setting,
    claims_table,
    comparisons,
    verdict,
)
from shared_embeddings.embedding import WordEmbedding
from shared_embeddings.utils.reading import read_yaml
from shared_embeddings.words.vectors import WordVectors, write_vectors
from tests.shared_embeddings.cases import PADDING, by_name

ROWS = """
kind: language_model
groups: {common: {hardware: one GPU}}
rows:
  standard: {embedding: {method: standard}}
  small: {embedding: {method: funnel, rank: 2}, seeds: [2, 3]}
tables:
- paper: DeFINE
  table: Table 1a
  title: t
  rows:
  - {row: R3, name: table1_a, figures: {perplexity: 41.17, total: 33.02}, embedding: {method: define}}
  - {row: R4, name: table1_b, figures: {perplexity: 38.01}, embedding: {method: define}}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The only recipe, which has six rows."""
    folder = tmp_path / "recipes" / "task"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("# A task\n")
    (folder / "rows.yaml").write_text(ROWS)
    monkeypatch.setattr(report, "recipe_names", lambda: ["task"])
    monkeypatch.setattr(report, "find_recipe", lambda name: Recipe(folder))
    monkeypatch.setattr(report, "read_papers", lambda: ())
    return Recipe(folder)


def write(folder: Path, row: str, perplexity: float, **changes: Any) -> None:
    """Write a result of a language model."""
    record = {
        "config": {"embedding": {"method": row.split("_")[0]}},
        "counts": {"stored_bits": 32_000_000, "dense_embedding": 2_000_000, "rest": 100_000},
        "metrics": {"perplexity": perplexity, "training_seconds": 90.0},
        "data_checksum": "c",
    }
    write_result(folder, row, **{**record, **changes})


def table_of(page: str, heading: str) -> list[dict[str, str]]:
    """The first table after a heading, as mappings from column to cell."""
    text = page.split(f"# {heading}\n")[1]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    rows = lines[2 : next((n for n, line in enumerate(lines) if len(line) != len(lines[0])), None)]
    return [dict(zip(lines[0], row, strict=True)) for row in rows]


def test_results_of_the_repository_and_of_runs(recipe: Recipe, tmp_path: Path, capsys: Any) -> None:
    write(recipe.folder, "standard", 50.0)
    for row, perplexity in (("small", 44.0), ("small_seed2", 45.0), ("small_seed3", 46.0)):
        write(tmp_path / "runs" / "task", row, perplexity, config={"embedding": {"method": "funnel"}})
    write(tmp_path / "runs" / "task" / "more", "table1_a", 45.25, config={"embedding": {"method": "define"}})
    write(tmp_path / "runs" / "task" / "smoke", "table1_b", 999.0)
    folder = tmp_path / "out"
    asked = ["report", "--runs", str(tmp_path / "runs"), "--output", str(folder)]
    assert run_main("report", main, asked) == 0
    assert capsys.readouterr().out == f"report: {folder / 'report.md'}\n"
    page = (folder / "report.md").read_text()
    [glance] = table_of(page, "Results")
    assert [glance["plain table"], glance["best compressed"]] == ["50.00", "45.00 ± 1.00 (3 seeds)"]
    assert [glance["row"], glance["rows run"]] == ["small", "3 of 4"]
    rows = {row["config"]: row for row in table_of(page, "A task")}
    assert list(rows) == ["standard", "small", "table1_a"]
    assert rows["table1_a"]["test perplexity"] == "45.25"
    assert rows["table1_a"]["test perplexity, paper"] == "41.17"
    assert rows["table1_a"]["source"] == "DeFINE, Table 1a: R3"
    assert rows["standard"]["stored"] == "3.60 MB" and rows["standard"]["times smaller"] == "2.2x"
    assert (folder / "task.png").read_bytes().startswith(b"\x89PNG")
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert run_main("report", main, asked) == 0
    assert content == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_newest_result_of_a_row_counts(recipe: Recipe, tmp_path: Path) -> None:
    write(recipe.folder, "standard", 50.0, date="2026-01-02")
    write(tmp_path / "task" / "old", "standard", 99.0, date="2026-01-01")
    assert report.read_all(tmp_path)["task"][0]["metrics"]["perplexity"] == 50.0
    write(tmp_path / "task" / "new", "standard", 49.0, date="2026-01-03")
    assert report.read_all(tmp_path)["task"][0]["metrics"]["perplexity"] == 49.0


def test_seeds_of_grid_cells_on_the_same_data_are_averaged(recipe: Recipe) -> None:
    (recipe.folder / "rows.yaml").write_text("kind: reconstruction\n")
    for seed, error, data in ((0, 0.1, "a"), (1, 0.2, "b"), (2, 0.4, "b")):
        metrics, config = {"relative_error": error}, {"row": "alone", "hidden": 600, "seed": seed}
        write(recipe.folder, f"alone-600-{seed}", 0, metrics=metrics, config=config, data_checksum=data,
              date=f"2026-01-0{seed + 1}")  # fmt: skip
    [cell] = report.read_all()["task"]
    assert cell["row"] == "alone-600" and sorted(cell["scores"]["relative_error"]) == [0.2, 0.4]


def test_empty_and_unusable_results(recipe: Recipe, tmp_path: Path, capsys: Any) -> None:
    page = report.write_report(tmp_path / "out").read_text()
    assert table_of(page, "Results") == [{"task": "task", "rows run": "0 of 4"}]
    (recipe.folder / "results.jsonl").write_text("{}\n")
    assert run_main("report", main, ["report", "--runs", str(tmp_path)]) == 2
    assert "results.jsonl: line 1: invalid result" in capsys.readouterr().err


def test_measures_and_their_order() -> None:
    rouge = {"recall": {"rouge1": {"mean": 31.5, "low": 30}, "signature": "s"}, "f1": {}}
    similarity = {"LARGE": {"rho": 0.4, "known": 300}, "SMALL": {"rho": None}}
    texts = {"news": {"perplexity": 30.0, "kept": 0.8}}
    flat = flatten({"length_75": rouge, "similarity": similarity, "sentences": 3, "relative_error": 0.2})
    assert flat == {"rouge1": 31.5, "rho LARGE": 0.4, "relative_error": 0.2}
    assert list(flatten({"length_75": rouge, "length_50": rouge})) == ["rouge1 75 bytes", "rouge1 50 bytes"]
    assert flatten({"texts": texts}) == {"kept news": 0.8}
    assert by_importance(["relative_error", "rho LARGE"]) == ["rho LARGE", "relative_error"]
    assert by_importance(["valid_perplexity", "perplexity", "embedding"]) == [
        "perplexity",
        "valid_perplexity",
    ]
    measure = find_measure("rho LARGE")
    assert measure is not None and measure.title == "Spearman's rho, LARGE"
    assert measure.describe([0.5]) == "0.500" and measure.describe([0.5, 0.7]) == "0.600 ± 0.141 (2 seeds)"
    scores = mean_record([{"metrics": flat}, {"metrics": {**flat, "relative_error": 0.4}}])
    assert scores["metrics"]["relative_error"] == pytest.approx(0.3)


@pytest.mark.slow
def test_every_recipe_of_the_repository_is_in_the_report(tmp_path: Path) -> None:
    page = report.write_report(tmp_path).read_text()
    assert {row["task"] for row in table_of(page, "Results")} == set(recipe_names())
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert {"uncle_figure_3.png", "uncle_figure_4.png", "uncle_figure_5.png", "ptb_awd_lstm.png"} <= pictures
    assert all(f"]({name})" in page for name in pictures)


def measured(row: str, rate: float | None = None, **scores: list[float]) -> dict[str, Any]:
    """What a row was measured to be."""
    return {"row": row, "scores": scores, "config": {"train": {"learning_rate": rate}}}


SEEDED = [
    measured("strong", bleu=[30.0]),
    measured("weak", bleu=[29.0]),
    measured("weaker", bleu=[28.8]),
    # A relative standard deviation of 1 % with 2 degrees of freedom: 95 % of differences are below
    # 4.303 * 0.01 * (1 / 1 + 1 / 1)**0.5 = 6.09 % for single trainings, and 4.97 % for three and one.
    measured("seeds", perplexity=[99.0, 100.0, 101.0]),
    measured("low", perplexity=[100.0]),
    measured("high", perplexity=[106.5]),
    measured("near", perplexity=[105.5]),
    measured("tuned", perplexity=[120.0], valid_perplexity=[121.0]),
    measured("tuned_rate_40", perplexity=[108.0], valid_perplexity=[109.0]),
    measured("tuned_adam_8", perplexity=[107.0], valid_perplexity=[110.0]),  # better on the test set only
    measured("tuned_distilled", perplexity=[90.0], valid_perplexity=[90.0]),
    # Seeds of one learning rate differ less: 1.22 % for single trainings.
    measured("sure", 40, perplexity=[99.8, 100.0, 100.2]),
    measured("first", 40, perplexity=[100.0]),
    measured("second", 40, perplexity=[101.3]),
    measured("absent"),
]
RECORDS: dict[str, Any] = {f"task/{row['row']}": row for row in SEEDED} | {
    "other/a": measured("a", perplexity=[50.0]),
    "other/b": measured("b", perplexity=[60.0]),
}


@pytest.mark.parametrize(
    ("here", "within", "expected", "words"),
    [
        (["strong > weak"], None, "within noise", "–"),  # no seeds with BLEU anywhere
        (["seeds > high"], None, "holds", "± 5.0 %"),
        (["high > seeds"], None, "does not hold", "does not hold"),
        (["low > near"], None, "within noise", "within noise"),
        (["first > second"], None, "holds", "± 1.2 %"),
        (["second > first"], None, "does not hold", "± 1.2 %"),
        (["seeds > high", "low > near"], None, "holds (1 of 2, others within noise)", "low"),
        (["seeds > high", "high > seeds", "low > near"], None,
         "mixed: 1 holds, 1 does not hold, 1 within noise", "low"),
        (["low ~ seeds"], "5 %", "holds", "holds"),  # equal, and 5 % more than the noise allows
        (["high ~ low"], "1 %", "within noise", "within noise"),
        (["seeds > tuned"], None, "holds", "`tuned_rate_40` 108.00"),
        (["seeds > absent"], None, "not run", "`absent` (not run)"),
        (["seeds > absent", "seeds > high"], None, "holds", "`high` 106.50"),
    ],
)  # fmt: skip
def test_verdicts(here: list[str], within: str | None, expected: str, words: str) -> None:
    claim: dict[str, Any] = {"here": {"task": here}, "within": within}
    lines, outcome = verdict(claim, RECORDS, Noise(RECORDS))
    assert (len(lines), outcome) == (len(here), expected)
    assert all(len(line) == len(COMPARISON) for line in lines)
    assert words in " ".join(cell for line in lines for cell in line)


def test_perplexity_of_the_validation_set_chooses_the_rate() -> None:
    rows = [
        measured("row", bleu=[30.0], valid_perplexity=[5.0]),
        measured("row_rate_40", bleu=[31.0], valid_perplexity=[6.0]),  # better on the test set only
    ]
    assert best_setting("row", {row["row"]: row for row in rows}, "bleu") == "row"


def test_tasks_without_seeds_have_the_noise_of_others() -> None:
    threshold = Noise(RECORDS).threshold("other/a", "other/b", "perplexity")
    # 4 degrees of freedom, 1 % and 0.2 % pooled.
    assert threshold == pytest.approx(2.776 * ((0.01**2 + 0.002**2) / 2) ** 0.5 * 2**0.5, rel=1e-3)


def test_the_reason_is_given() -> None:
    assert verdict({"reason": "no GPU"}, RECORDS, Noise(RECORDS)) == ([], "not tested: no GPU")


def test_the_figures_of_the_papers_agree_with_their_claims() -> None:
    cells = (cell for paper in read_papers() for _, cell in paper.cells if cell.is_own)
    figures = {cell.trained_by: cell.figures for cell in cells}
    for claim in read_yaml(CLAIMS)["claims"]:
        assert claim.keys() <= {"by", "paper", "claim", "source", "within", "key", "here", "reason"}
        for first, is_close, second in comparisons(claim.get("paper", {})):
            key = by_importance(figures[first])[0]
            better, other = float(figures[first][key]), float(figures[second][key])
            measure = find_measure(key)
            assert measure is not None
            loss = (other - better) * (1 if measure.higher_is_better else -1)
            assert loss < 0 or is_close and loss <= other * float(claim["within"].rstrip("% ")) / 100, claim


def test_the_document_is_up_to_date() -> None:
    assert claims_table() in CLAIMS_PAGE.read_text(encoding="utf-8"), "run `make readme`"


def correlations(vectors: torch.Tensor) -> torch.Tensor:
    """The correlations of vectors in blocks of two."""
    moments = Moments(vectors[:2])
    for block in vectors.split(2):
        moments.add(block)
    return moments.correlations()


def test_correlation_of_three_dimensions_by_hand() -> None:
    # Means 2, 2, 5; around them -1, 0, 1 and -1, 1, 0, so that r = 1 / 2; the third is constant.
    matrix = correlations(torch.tensor([[1.0, 1.0, 5.0], [2.0, 3.0, 5.0], [3.0, 2.0, 5.0]]))
    torch.testing.assert_close(matrix[:2, :2], torch.tensor([[1.0, 0.5], [0.5, 1.0]]).double())
    assert matrix[2].isnan().all() and matrix[:, 2].isnan().all()
    assert LayerCorrelation("output", 3, matrix, 1).means()[0] == pytest.approx(0.5)
    rounded = torch.tensor([[0.1, 1.0], [0.1 + 1e-9, 2.0], [0.1, 3.0]], dtype=torch.float64)
    assert correlations(rounded)[0].isnan().all()


def test_blocks_equal_all_vectors() -> None:
    # Means far larger than the deviations: sums of squares in 64 bits would lose them.
    vectors = torch.randn(500, 4).double() * torch.tensor([1.0, 3.0, 0.1, 1.0]) + 1e4
    vectors[:, 3] = 0.5 * vectors[:, 3] - vectors[:, 1]
    expected = torch.from_numpy(np.corrcoef(vectors.numpy().T))
    torch.testing.assert_close(correlations(vectors), expected, atol=1e-6, rtol=0)


def test_groups_by_hand() -> None:
    matrix = torch.tensor(
        [[1.0, 0.2, 0.4, -0.4], [0.2, 1.0, 0.4, 0.4], [0.4, 0.4, 1.0, -0.6], [-0.4, 0.4, -0.6, 1.0]]
    )
    assert LayerCorrelation("output", 3, matrix, 2).means()[1] == pytest.approx(0.4)


def embedding(name: str) -> WordEmbedding:
    case = by_name(name)
    words = [str(number) for number in range(case.num_embeddings)]
    return WordEmbedding("words", words, case.padding_idx, case.build().eval())


def test_tokens_of_a_band_or_a_group_are_counted() -> None:
    bands = {layer.layer: layer for layer in layer_correlations(embedding("adaptive"))}
    assert [bands[f"words: band {band}"].tokens for band in range(3)] == [9 - 1, 11, 37 - 20]
    assert PADDING < 9
    groups = layer_correlations(embedding("group-reduce"))
    assert sum(layer.tokens for layer in groups[:-1]) == groups[-1].tokens == 36


def test_layers_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vectors = np.array([[3, 4, 0, 0], [4, 3, 0, 0], [0, 0, 0, 0]], dtype=np.float32)
    write_vectors(tmp_path / "v.vec", WordVectors(["year", "month", "zero"], vectors))
    asked = ["--model", tmp_path / "v.vec", "--output", tmp_path / "maps", "--words", "year", "month", "zero"]
    layers([str(argument) for argument in asked])
    printed = capsys.readouterr().out
    assert "words: output" in printed and "0.9600" in printed and "year, zero" in printed
    assert (tmp_path / "maps" / "words-output.png").read_bytes().startswith(b"\x89PNG")
