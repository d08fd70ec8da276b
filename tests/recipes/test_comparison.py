"""Rows that are like another or only fitted, and the table that compares them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes.common.config import read_content, read_row, row_names
from recipes.common.model_rows import RECIPES, Recipe, read_model_row
from recipes.common.model_runs import evaluate_model, train_model

from recipes.common import comparison, fitting
from recipes.common.comparison import comparison_table
from recipes.common.errors import UserError, run_main
from recipes.common.results import read_results
from recipes.common.table import markdown_table, not_run
from tests.lm.command_line import write_corpus

FILES = {
    "common": "average: 1\ntrain: {seed: 7, steps: 100}\ntranslate: {}\n",
    "standard": "embedding: {method: standard, output_bias: true}\n",
    "f_4x": "embedding: {method: funnel, rank: 2}\n",
    "f_4x_distilled": "embedding: {method: funnel, rank: 3, output_bias: true}\n"
    "distill: {teacher: standard, alpha: 0.1}\ntrain: {steps: 9}\n",
    "f_4x_finetuned": "like: f_4x_distilled\ndistill: {teacher: standard, alpha: 0}\n",
    "f_4x_fitted": "like: f_4x_distilled\nfit: {teacher: standard}\n",
}


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    folder = tmp_path / "recipe" / "configs"
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def test_row_takes_the_rest_from_the_one_that_it_is_like(configs: Path) -> None:
    tuned, distilled = read_row(configs, "f_4x_finetuned"), read_row(configs, "f_4x_distilled")
    assert (tuned.embedding, tuned.train) == (distilled.embedding, distilled.train)
    assert tuned.train == {"seed": 7, "steps": 9} and tuned.distill == {"teacher": "standard", "alpha": 0}
    fitted = read_row(configs, "f_4x_fitted")
    assert fitted.embedding == distilled.embedding and fitted.fit == {"teacher": "standard"}
    assert fitted.distill is None and fitted.train == {"seed": 7, "steps": 100}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("like: absent\n", "like is 'absent'; it must be another row"),
        ("like: row\n", "like is 'row'; it must be another row"),
        ("like: common\n", "like is 'common'; it must be another row"),
        ("like: f_4x_fitted\n", "which is like another row"),
        ("embedding: {}\nfit: {teacher: row}\n", "fit: teacher is 'row'; it must be one of f_4x,"),
        ("embedding: {}\nfit: {}\n", "fit: teacher is None"),
        ("embedding: {}\nfit: {teacher: standard, alpha: 0}\n", "fit: unknown key 'alpha'"),
        ("embedding: {}\nfit: {teacher: standard}\ntrain: {}\n", "train has no effect on a row that is only"),
        ("like: standard\nfit: {teacher: standard}\ndistill: {teacher: standard}\n", "distill has no effect"),
    ],
)
def test_wrong_rows_are_refused(configs: Path, text: str, message: str) -> None:
    (configs / "row.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_row(configs, "row")


def measured(row: str, config: dict[str, Any], bleu: float, bits: int) -> dict[str, Any]:
    """A record of a model whose embedding takes so many bits beside 100 parameters in float32."""
    counts = {"total": 1_500_000, "rest": 100, "stored_bits": bits + 3200}
    return {**not_run("recipe", row, config), "counts": counts, "metrics": {"bleu": bleu}}


def test_lines_of_the_table(configs: Path) -> None:
    def config(name: str) -> dict[str, Any]:
        return dict(read_content(configs / f"{name}.yaml"))

    records = [
        measured("standard", config("standard"), 30.04, 6400),
        not_run("recipe", "adaptive_4x", {"embedding": {"method": "adaptive"}}),
        not_run("recipe", "f_4x", config("f_4x")),
        not_run("recipe", "f_4x_distilled", config("f_4x_distilled")),
        {**not_run("recipe", "f_4x_finetuned", {**config("f_4x_finetuned"), "train": {"epochs": 1}})},
        measured("f_4x_fitted", config("f_4x_fitted"), 12.34, 1600),
        not_run("recipe", "smaller_4x", config("standard")),
    ]
    header, _, *lines = comparison_table(records, "bleu").splitlines()
    assert header.endswith("| fitted | trained on | distilled | from scratch | trained on for |")
    assert lines == [
        "| standard | output_bias True | – | 1.50 M | – | – | – | 30.0 | – |",
        "| f_4x | rank 3, output_bias True | 4.0x smaller | 1.50 M | 12.3 | "
        "not run | not run | not run | 1 epoch |",
        "| smaller_4x | output_bias True | not run | not run | – | – | – | not run | – |",
    ]


def test_table_goes_into_the_readme(configs: Path, tmp_path: Path) -> None:
    readme, results = configs.parent / "README.md", tmp_path / "results"
    readme.write_text("a\n<!-- BEGIN comparison -->\n<!-- END comparison -->\nb\n")
    results.mkdir()
    arguments = ["--results", str(results), "--readme", str(readme)]
    assert run_main("comparison", comparison.main, arguments) == 0
    text = readme.read_text()
    assert text.startswith("a\n") and text.endswith("\nb\n") and "BLEU:" in text and "| f_4x |" in text
    assert run_main("comparison", comparison.main, [*arguments, "--rows", "other*"]) == 2


@pytest.mark.parametrize("recipe", ["multi30k_ende", "ptb_awd_lstm"])
def test_compared_rows_differ_in_how_they_start_alone(recipe: str) -> None:
    folder = Recipe(RECIPES / recipe).configs
    fitted = [name for name in row_names(folder) if name.endswith("_fitted")]
    assert len(fitted) >= 12
    for name in fitted:
        base = name.removesuffix("_fitted")
        first, tuned, distilled = (
            read_content(folder / f"{base}_{ending}.yaml") for ending in ("fitted", "finetuned", "distilled")
        )
        teacher = distilled["distill"]["teacher"]
        assert first["fit"] == {"teacher": teacher} and first["embedding"] == distilled["embedding"]
        assert tuned == {**distilled, "distill": {"teacher": teacher, "alpha": 0}}
        assert distilled["distill"]["alpha"] == 0.01 and (folder / f"{base}.yaml").exists()


def test_what_the_fit_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(name: str, arguments: Sequence[str | Path]) -> None:
        asked.extend([name, *map(str, arguments)])

    monkeypatch.setattr(fitting, "run_module", run)
    embedding = {"method": "define", "output": "table", "map_dim": 3, "shape": [2, 3]}
    fitting.fit_model(Path("t.pt"), embedding, Path("c.tsv"), 5, tmp_path / "best.pt")
    text = " ".join(asked)
    assert text.startswith(
        "shared_embeddings.cli.main compress --model t.pt --method define --token-counts c.tsv"
    )
    assert "--seed 5 " in text and f"--report {tmp_path / 'fit.json'}" in text
    assert text.endswith("--embedding-output table --map_dim 3 --shape [2, 3]") and "--fit-steps" not in text
    fitting.fit_model(Path("t.pt"), embedding, Path("c.tsv"), 5, tmp_path / "best.pt", 7)
    assert "--fit-steps 7 --embedding-output table" in " ".join(asked)


SMALL_MODEL = """
train: {model: awd_lstm, embedding_dim: 8, hidden_dim: 12, num_layers: 2, steps: 3, batch_size: 2, seed: 3,
        sequence_length: 5, learning_rate: 1.0, valid_batch_size: 1}
evaluate: {target_length: 7}
"""


@pytest.mark.slow
def test_fitted_language_model_is_where_the_distilled_one_starts(
    configs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("RANK", raising=False)
    recipe = Recipe(configs.parent)
    recipe.home.mkdir(parents=True)
    write_corpus(tmp_path / "corpus").rename(recipe.data)
    (configs / "common.yaml").write_text(SMALL_MODEL)
    row = read_model_row(recipe, "f_4x_fitted")
    with pytest.raises(UserError, match="starts from standard; .* run recipes/.*/train.sh standard"):
        train_model(recipe, row, [])
    train_model(recipe, read_model_row(recipe, "standard"), [])
    with pytest.raises(UserError, match="only fitted, not trained: -steps has no effect"):
        train_model(recipe, row, ["-steps", "5"])
    train_model(recipe, row, [])
    # Without learning, the first step of the finetuned row changes nothing.
    (configs / "f_4x_finetuned.yaml").write_text(
        FILES["f_4x_finetuned"] + "train: {steps: 1, learning_rate: 1.0e-30}\n"
    )
    train_model(recipe, read_model_row(recipe, "f_4x_finetuned"), [])
    first, second = (
        torch.load(recipe.home / name / "best.pt", weights_only=True)["model"]
        for name in ("f_4x_fitted", "f_4x_finetuned")
    )
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor)
    evaluate_model(recipe, row, [])
    (record,) = read_results(recipe.home)
    assert record["metrics"]["perplexity"] > 1 and record["config"]["fit"] == {"teacher": "standard"}
    (line,) = markdown_table([record], ["options"]).splitlines()[2:]
    assert line == "| rank 3, output_bias True, fitted to standard, not trained |"
    assert json.loads((recipe.home / "f_4x_fitted" / "fit.json").read_text())["method"] == "funnel"
