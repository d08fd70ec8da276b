"""Rows that start from a trained one, the table that compares them, and training curves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.__main__ import main
from recipes.common import tools
from recipes.common.comparison import comparison_table
from recipes.common.curves import BLEU, LOSS, PERPLEXITY, read_curves, short_names, validation_curve
from recipes.common.recipe import Recipe, find_recipe
from recipes.common.results import read_results
from recipes.common.table import markdown_table, not_run
from recipes.common.tools import run_main
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
    """A record of a model with an embedding of this many bits and 100 other parameters in float32."""
    counts = {"total": 1_500_000, "rest": 100, "stored_bits": bits + 3200}
    return {**not_run(row, config), "counts": counts, "metrics": {"bleu": bleu}}


def test_comparison_table(recipe: Recipe) -> None:
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


def write_events(folder: Path, values: dict[str, dict[int, float]]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder))
    for tag, points in values.items():
        for step, value in points.items():
            writer.add_scalar(tag, value, step)
    writer.close()


def test_log_of_a_language_model(tmp_path: Path) -> None:
    found = read_curves(run_of(tmp_path / "run", LM_LOG))
    assert found[LOSS][:2] == [(100, 8.018075), (200, 7.235545)] and found[LOSS][2][0] == 300
    assert found[PERPLEXITY] == [(200, 263.0)]
    assert read_curves(tmp_path / "run" / "train.log").keys() == found.keys()


def test_log_of_a_resumed_translator(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", NMT_LOG)
    curve = [(50, 29.5), (100, 20.0)]
    assert read_curves(run) == {LOSS: [(50, 5.7), (100, 4.0)], PERPLEXITY: curve, BLEU: [(50, 1.5)]}
    assert validation_curve(run) == curve
    assert validation_curve(tmp_path / "nowhere") == []


def test_event_files_of_both_hosts(tmp_path: Path) -> None:
    write_events(
        tmp_path / "lm" / "tensorboard", {"valid/perplexity": {10: 80.0, 20: 40.0}, "train/rate": {1: 1}}
    )
    write_events(tmp_path / "nmt" / "Nov-24", {"valid/ppl": {10: 80.0}, "valid/BLEU": {10: 2.5}})
    write_events(tmp_path / "nmt" / "Nov-25", {"progress/xent": {5: 4.0}, "valid/ppl": {20: 40.0}})
    assert validation_curve(tmp_path / "lm") == [(10, 80.0), (20, 40.0)]
    assert read_curves(tmp_path / "nmt") == {
        PERPLEXITY: [(10, 80.0), (20, 40.0)],
        BLEU: [(10, 2.5)],
        LOSS: [(5, 4.0)],
    }


def test_runs_have_the_shortest_names_that_differ() -> None:
    assert short_names([Path("/a/x/run"), Path("/a/y/run")]) == ["x/run", "y/run"]
    assert short_names([Path("/a/x/run")]) == ["run"]


def test_several_runs_are_drawn_in_one_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(run_of(tmp_path / "one", LM_LOG)), str(run_of(tmp_path / "two", NMT_LOG))]
    picture = tmp_path / "curves.png"
    arguments = ["plot", *runs, "--output", str(picture)]
    assert run_main("plot", main, arguments) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{picture}\n"
    assert run_main("plot", main, arguments) == 2
    assert "--force" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run_main("plot", main, ["plot", str(tmp_path / "empty"), "--output", str(tmp_path / "x.png")]) == 2
    assert "empty: no train.log" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
