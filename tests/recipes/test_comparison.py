"""Rows that start from a trained one, and the table that compares them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.common import tools
from recipes.common.comparison import comparison_table
from recipes.common.recipe import Recipe, find_recipe
from recipes.common.results import read_results
from recipes.common.table import markdown_table, not_run
from recipes.language_model.evaluate import evaluate
from recipes.language_model.train import train
from shared_embeddings.errors import UserError
from tests.lm.runs import write_corpus

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
    embedding: {{method: funnel, rank: 2}}
    variants: [distilled, finetuned, fitted]
    start: {{embedding: {{method: funnel, rank: 3, output_bias: true}}}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    made = Recipe(tmp_path / "recipe")
    made.folder.mkdir()
    text = ROWS.format(common="{train: {seed: 7, steps: 100}}", finetuned="{steps: 9}")
    (made.folder / "rows.yaml").write_text(text)
    return made


def measured(row: str, config: dict[str, Any], bleu: float, bits: int) -> dict[str, Any]:
    """A record of a model whose embedding takes so many bits beside 100 parameters in float32."""
    counts = {"total": 1_500_000, "rest": 100, "stored_bits": bits + 3200}
    return {**not_run(row, config), "counts": counts, "metrics": {"bleu": bleu}}


def test_lines_of_the_table(recipe: Recipe) -> None:
    def config(name: str) -> dict[str, Any]:
        settings = {key: value for key, value in recipe.row(name).settings().items() if key != "train"}
        return settings

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
    assert header.endswith("| fitted | trained on | distilled | from scratch | trained on for |")
    assert lines == [
        "| standard | output_bias True | – | 32.00 | 1.50 M | – | – | – | 30.0 | – |",
        "| f_4x | rank 3, output_bias True | 4.0x | 8.00 | 1.50 M | 12.3 | "
        "not run | not run | not run | 1 epoch |",
        "| smaller_4x | output_bias True | not run | not run | not run | – | – | – | not run | – |",
    ]


@pytest.mark.parametrize("name", ["multi30k_ende", "ptb_awd_lstm"])
def test_compared_rows_differ_in_how_they_start_alone(name: str) -> None:
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


def test_what_the_fit_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(name: str, arguments: Sequence[str | Path]) -> None:
        asked.extend([name, *map(str, arguments)])

    monkeypatch.setattr(tools, "run_module", run)
    embedding = {"method": "define", "output": "table", "map_dim": 3, "shape": [2, 3]}
    tools.fit_model(Path("t.pt"), embedding, Path("c.tsv"), 5, tmp_path / "best.pt", {})
    text = " ".join(asked)
    assert text.startswith(
        "shared_embeddings.cli.main compress --model t.pt --method define --token-counts c.tsv"
    )
    assert "--seed 5 " in text and f"--report {tmp_path / 'fit.json'}" in text
    assert text.endswith("--embedding-output table --map_dim 3 --shape [2, 3]") and "--fit-steps" not in text
    tools.fit_model(
        Path("t.pt"), embedding, Path("c.tsv"), 5, tmp_path / "best.pt", {"fit_steps": 7, "store": "int8"}
    )
    assert "--fit-steps 7 --store int8 --embedding-output table" in " ".join(asked)


SMALL_MODEL = """
    train: {model: awd_lstm, embedding_dim: 8, hidden_dim: 12, num_layers: 2, steps: 3, seed: 3,
            batch_size: 2, sequence_length: 5, learning_rate: 1.0, valid_batch_size: 1}
    evaluate: {target_length: 7}
"""


@pytest.mark.slow
def test_fitted_language_model_is_where_the_distilled_one_starts(
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
