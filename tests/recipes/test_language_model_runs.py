"""Training and evaluating rows of language model recipes, and their logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes import language_model
from recipes.common.recipe import Recipe
from recipes.common.results import read_results
from recipes.common.table import markdown_table, records_of
from recipes.language_model import evaluate, train
from shared_embeddings.utils.errors import UserError
from tests.lm.runs import write_corpus

ROWS = """
kind: language_model
groups:
  common: {train: {steps: 10, model: awd_lstm}}
  small: {data: {folder: few}, train: {steps: 2, model: lstm}, evaluate: {target_length: 9}}
rows:
  small_uncle: {group: small, embedding: {method: uncle, unique_dim: 2, classes: data/c.npz}}
  small_tuned: {group: small, embedding: {method: standard}, finetune: {optimizer: ntasgd}}
  small_row: {group: small, embedding: {method: funnel, rank: 3}, distill: {teacher: small_tuned, alpha: 0.2}}
tables:
- paper: P
  table: Table 1
  title: t
  rows:
  - row: A
    name: table1
    figures: {perplexity: 57.3}
    embedding: {method: funnel, rank: 3}
    train: {steps: 20}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("RANK", raising=False)
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "rows.yaml").write_text(ROWS)
    made = Recipe(folder)
    for data in (made.data, made.home / "few"):
        data.mkdir(parents=True)
        (data / "data.json").write_text('{"checksum": "abc"}')
    return made


LOG = """step 10 epoch 0.1 loss 6.9 ppl 992.27 lr 1 | 1,200 tokens/s, 41.5 ms per step, 00:10 left
step 20 epoch 0.2 loss 6.8 ppl 897.85 lr 1 | 1,300 tokens/s, 1038.2 ms per step, 00:08 left
step 20 valid loss 6.8 ppl 897.85 (the best so far)
step 30 epoch 0.3 loss 6.7 ppl 812.41 lr 1 | 1,300 tokens/s, 38.5 ms per step, 00:06 left
"""


class Commands:
    """Replaces lm_train and lm_eval: records its arguments, and writes their output files."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.clock, self.seconds, self.trains, self.fails = 1000.0, 7.0, True, False

    def time(self) -> float:
        return self.clock

    def run(self, name: str, arguments: Sequence[str | Path], keep_open: Sequence[int] = ()) -> None:
        given = list(map(str, arguments))
        self.calls.append((name, given))
        if name == "lm.train.command":
            self.train(Path(yaml.safe_load(Path(given[1]).read_text())["output_dir"]))
        else:
            self.evaluate(Path(given[given.index("-output") + 1]), given[given.index("-split") + 1])

    def train(self, folder: Path) -> None:
        self.clock += self.seconds
        if self.trains:
            for name in ("last.pt", "best.pt"):
                (folder / name).touch()
                os.utime(folder / name, (self.clock - 2, self.clock - 2))
            (folder / "train.log").write_text(LOG)
        if self.fails:
            raise UserError("lm.train.command ended with status 1")

    def evaluate(self, output: Path, split: str) -> None:
        perplexity = {"valid": 90.0, "test": 80.0}[split]
        embedding = {"method": "funnel", "rank": 3, "stored": True}
        config = {"embedding": embedding, "embedding_distillation": None, "steps": 20}
        record = {"metrics": {"perplexity": perplexity, "tokens_per_second": 5.0}, "config": config}
        record |= {"counts": {"embedding": 7}, "device": "a machine", "peak_memory_mib": 3.0}
        output.write_text(json.dumps({**record, "output_dir": str(output.parent)}))


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    made = Commands()
    monkeypatch.setattr(language_model, "run_module", made.run)
    monkeypatch.setattr(language_model.time, "time", made.time)
    return made


def log_of(recipe: Recipe, row: str) -> Any:
    return json.loads((recipe.home / row / "training.json").read_text())


def test_distilled_row_starts_from_its_teacher(recipe: Recipe, commands: Commands) -> None:
    row = recipe.row("small_row")
    with pytest.raises(
        UserError, match="starts from small_tuned; .* run recipes/recipe/train.sh small_tuned"
    ):
        train(recipe, row, [])
    train(recipe, recipe.row("small_tuned"), [])
    train(recipe, row, [])
    settings = yaml.safe_load(Path(commands.calls[-1][1][1]).read_text())
    best = recipe.home / "small_tuned/finetune/best.pt"
    assert settings["embedding_distillation"] == {"teacher": str(best), "alpha": 0.2}
    evaluate(recipe, row, [])
    (record,) = read_results(recipe.home)
    assert record["config"]["distill"] == {"teacher": "small_tuned", "alpha": 0.2}
    assert "embedding_distillation" not in record["config"]
    (line,) = markdown_table([record], ["options"]).splitlines()[2:]
    assert line == "| rank 3, distilled from small_tuned, alpha 0.2 |"


def test_results_of_a_row(recipe: Recipe, commands: Commands) -> None:
    row = recipe.row("table1")
    train(recipe, row, ["-device", "cpu"])
    name, arguments = commands.calls[-1]
    settings = yaml.safe_load(Path(arguments[1]).read_text())
    assert name == "lm.train.command" and arguments[2:] == ["-device", "cpu"]
    assert settings == {
        "data": str(recipe.data),
        "output_dir": str(recipe.home / "table1"),
        "embedding": {"method": "funnel", "rank": 3},
        "steps": 20,
        "model": "awd_lstm",
    }
    evaluate(recipe, row, ["-batch_size", "4"])
    (record,) = read_results(recipe.home)
    metrics = record["metrics"]
    assert (metrics["perplexity"], metrics["valid_perplexity"]) == (80.0, 90.0)
    assert metrics["training_seconds"] == 7.0
    assert metrics["training_ms"] == 41.5  # the median
    assert record["data_checksum"] == "abc" and row.paper and row.paper["perplexity"] == 57.3
    assert record["config"]["embedding"] == {"method": "funnel", "rank": 3}
    assert record["config"]["train"] == {"steps": 20} and "average" not in record["config"]
    assert record["config"]["train_options"] == ["-device", "cpu"]
    assert record["device"] == "a machine" and record["counts"] == {"embedding": 7}
    assert [call[1][-2:] for call in commands.calls[1:]] == [["-batch_size", "4"]] * 2


def test_lost_steps_of_a_killed_training_do_not_count(recipe: Recipe, commands: Commands) -> None:
    row = recipe.row("table1")
    commands.fails = True
    with pytest.raises(UserError):
        train(recipe, row, [])
    with pytest.raises(UserError, match="training is not complete"):
        evaluate(recipe, row, [])
    commands.fails = False
    commands.clock += 100
    train(recipe, row, [])
    # Seven seconds of the first run, the last two of them lost; seven of the second.
    assert log_of(recipe, "table1")["seconds"] == 12.0
    commands.trains = False
    train(recipe, row, [])
    assert log_of(recipe, "table1")["seconds"] == 12.0
    (recipe.home / "table1" / "last.pt").unlink()
    commands.trains = True
    train(recipe, row, [])
    assert log_of(recipe, "table1")["seconds"] == 7.0


def test_second_training_starts_from_the_best_of_the_first(recipe: Recipe, commands: Commands) -> None:
    row = recipe.row("small_tuned")
    train(recipe, row, ["-seed", "3"])
    assert [len(call[1]) for call in commands.calls] == [4, 2]
    settings = yaml.safe_load(Path(commands.calls[1][1][1]).read_text())
    assert settings["init_from"] == str(recipe.home / "small_tuned" / "best.pt")
    assert settings["data"] == str(recipe.home / "few")
    assert settings["output_dir"] == str(recipe.home / "small_tuned" / "finetune")
    assert settings["optimizer"] == "ntasgd"
    evaluate(recipe, row, [])
    model = commands.calls[-1][1]
    assert model[model.index("-model") + 1] == str(recipe.home / "small_tuned" / "finetune" / "best.pt")
    assert ["-target_length", "9"] == model[-2:]
    assert read_results(recipe.home)[0]["metrics"]["training_seconds"] == 14.0


def test_files_of_an_embedding_are_relative_to_the_runs(recipe: Recipe, commands: Commands) -> None:
    train(recipe, recipe.row("small_uncle"), [])
    settings = yaml.safe_load(Path(commands.calls[0][1][1]).read_text())
    assert settings["embedding"]["classes"] == str(recipe.home / "data" / "c.npz")


def test_only_the_first_torchrun_process_records_results(
    recipe: Recipe, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    train(recipe, recipe.row("table1"), [])
    assert len(commands.calls) == 1
    assert not (recipe.home / "table1" / "training.json").exists()


def test_changed_data_is_detected(recipe: Recipe, commands: Commands) -> None:
    row = recipe.row("table1")
    train(recipe, row, [])
    (recipe.data / "data.json").write_text('{"checksum": "other"}')
    with pytest.raises(UserError, match="different data"):
        evaluate(recipe, row, [])


def test_missing_prepared_data_is_reported(recipe: Recipe) -> None:
    for text in ("[1]", '{"files": {}}', "half", None):
        (recipe.data / "data.json").unlink() if text is None else (recipe.data / "data.json").write_text(text)
        with pytest.raises(UserError, match="no prepared data; run recipes/recipe/preprocess.sh"):
            train(recipe, recipe.row("table1"), [])


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("train", ["-seed", "3", "--data=other"]),
        ("train", ["-embedding", "{method: standard}"]),
        ("evaluate", ["-split", "valid"]),
    ],
)
def test_options_that_change_the_row_fail(
    task: str, options: list[str], recipe: Recipe, commands: Commands
) -> None:
    train(recipe, recipe.row("table1"), [])
    main = {"train": language_model.train_command, "evaluate": language_model.eval_command}[task]
    done = len(commands.calls)
    with pytest.raises(UserError, match="is set by the row and \\$RUNS; remove it"):
        main(recipe, ["table1", *options])
    assert len(commands.calls) == done
    main(recipe, ["table1", "-device", "cpu"])
    assert len(commands.calls) > done


SAVES_AT_THE_END = """
import pathlib, signal, sys, time

def save(number, frame):
    time.sleep(1)
    pathlib.Path(sys.argv[1]).write_text("saved")
    sys.exit(130)

signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("started", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_an_interrupted_command_can_save_first(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(SAVES_AT_THE_END)
    parent = "from recipes.common.tools import run_module; import sys; run_module('child', sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
    command = [sys.executable, "-c", parent, str(tmp_path / "file")]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert (tmp_path / "file").read_text() == "saved"


SMALL_MODEL = """
    train: {model: awd_lstm, embedding_dim: 8, hidden_dim: 12, num_layers: 2, steps: 3, batch_size: 2,
            sequence_length: 5, learning_rate: 1.0, valid_batch_size: 1}
    evaluate: {target_length: 7, pointer: {window: 4, theta: 0.5, lambda: 0.1}}
"""


@pytest.mark.slow
def test_end_to_end(recipe: Recipe, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus").rename(tmp_path / "prepared")
    for file in (tmp_path / "prepared").iterdir():
        file.rename(recipe.data / file.name)
    text = ROWS.replace("common: {train: {steps: 10, model: awd_lstm}}", f"common: {SMALL_MODEL}")
    (recipe.folder / "rows.yaml").write_text(text)
    row = recipe.row("table1")
    train(recipe, row, ["-steps", "4"])
    evaluate(recipe, row, ["-batch_size", "3"])
    (record,) = records_of(recipe.rows, read_results(recipe.home), "table*")
    assert record["metrics"]["target_length"] == 7 and record["config"]["train"]["steps"] == 4
    assert record["counts"]["total"] == record["counts"]["embedding"] + record["counts"]["rest"]
    (line,) = markdown_table(
        [record], ["method", "options", "perplexity", "pointer_perplexity"]
    ).splitlines()[2:]
    perplexity, mixed = record["metrics"]["perplexity"], record["metrics"]["pointer_perplexity"]
    assert line == f"| funnel | rank 3 | {perplexity:.1f} | {mixed:.1f} |"
    assert 1 < perplexity < 30 and perplexity != mixed
