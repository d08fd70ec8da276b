"""The recipes of language models: their rows and published sizes, training, evaluation and logs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import shared_embeddings as se
from lm import models
from lm.data.corpus import SPLITS, VOCABULARY, load_corpus
from lm.data.corpus import prepare as prepare_corpus
from lm.data.datasets import SOURCES
from lm.evaluation import PointerOptions
from lm.evaluation import _parser as evaluation_parser
from lm.models import LanguageModel
from lm.train.config import parse
from recipes import language_model
from recipes.common.recipe import Recipe, Row, find_recipe
from recipes.common.results import read_results
from recipes.common.table import markdown_table
from recipes.language_model import as_options, evaluate, read_settings, train
from shared_embeddings.utils.errors import UserError
from shared_embeddings.words.classes import WordClasses, train_word_vectors
from tests.helpers import times_fewer
from tests.lm.runs import write_corpus

PTB, WIKITEXT2 = "ptb_awd_lstm", "wikitext2_awd_lstm"
LSTM, XL = "wikitext103_lstm", "wikitext103_transformer_xl"
ALL_ROWS = [(name, row) for name in (PTB, WIKITEXT2, LSTM, XL) for row in find_recipe(name).rows]
CODES = [(name, row) for name, row in ALL_ROWS if row.endswith("_codes")]
PUBLISHED = [(name, row) for name, row in ALL_ROWS if row.startswith("table") and (name, row) not in CODES]
# The allowed difference of DeFINE's totals: its own tables differ by 2 % for the same unit.
UNIT, UNEXPLAINED = 0.05, dict.fromkeys(("table7_n512_k2048", "table8a_residual"), 0.07)
# An error in the paper: 27.01 instead of 27.10.
MISTAKE = {(WIKITEXT2, "table4_unique200"): 27.10}
# DeFINE, Tables 1a and 2, in millions: the widest network is R5's, and 8b's takes all of k = 1024.
CONTEXT = {
    (LSTM, "table1a_standard"): 23.36,
    (LSTM, "table1a_define_n256"): 23.36,
    (LSTM, "table1a_define_n384"): 24.73,
    (LSTM, "table1a_define_n512"): 26.24,
    (XL, "table2_standard_n410"): 41.07,
    (XL, "table2_standard"): 36.25,
    (XL, "table2_define_n64"): 36.25,
}


def read(recipe: str, row: str) -> Row:
    return find_recipe(recipe).row(row)


def types_of(recipe: str, row: Row) -> int:
    """The words of the corpus of a row."""
    settings = read_settings(find_recipe(recipe))
    dataset = str(settings.small) if row.data.get("folder") == "data_small" else settings.dataset
    return SOURCES[dataset].published.types


def build(recipe: str, row: Row) -> LanguageModel:
    """The model of a row, checked as by lm_train, on the meta device; its files need not exist."""
    files = se.get_method_config(row.embedding["method"]).file_options
    embedding = {key: se.STORED if key in files else value for key, value in row.embedding.items()}
    config = parse({"data": "d", "output_dir": "s", "embedding": embedding, **row.train})
    words = [str(number) for number in range(types_of(recipe, row))]
    with torch.device("meta"):
        return models.build(config.training.model, words, embedding, vars(config.model))


@pytest.mark.slow_except(
    "ptb_awd_lstm-small_projective_8x",
    "ptb_awd_lstm-small_projective_finetuned",
    "ptb_awd_lstm-small_projective_fitted",
    "ptb_awd_lstm-small_structured",
    "ptb_awd_lstm-table14_unique25",
    "wikitext2_awd_lstm-small_uncle",
    "wikitext2_awd_lstm-table4_unique100",
    "wikitext103_lstm-small_standard",
)
@pytest.mark.parametrize(("recipe", "name"), ALL_ROWS)
def test_row_can_be_trained_and_evaluated(recipe: str, name: str) -> None:
    row = read(recipe, name)
    assert build(recipe, row).embedding.num_embeddings == types_of(recipe, row)
    if row.distill is not None:
        option = {"embedding_distillation": {**row.distill, "teacher": "best.pt"}}
        parse({"data": "d", "output_dir": "s", "embedding": row.embedding, **row.train, **option})
    if row.finetune is not None:
        parse({"data": "d", "output_dir": "s", "init_from": "b", "embedding": row.embedding, **row.finetune})
    evaluation_parser().parse_args(["-model", __file__, "-data", __file__, *as_options(row.evaluate)])
    if "pointer" in row.evaluate:
        PointerOptions.parse(row.evaluate["pointer"])
    classes = read_settings(find_recipe(recipe)).classes
    for file in se.get_method_config(row.embedding["method"]).file_options:
        assert row.embedding.get(file) in {None, *classes}
    if "classes" in row.embedding:
        assert classes[row.embedding["classes"]].num_classes == row.embedding["num_classes"]


@pytest.mark.parametrize(("recipe", "name"), PUBLISHED)
def test_published_rows_have_the_printed_sizes(recipe: str, name: str) -> None:
    row = read(recipe, name)
    assert row.paper is not None and {"source", "perplexity", "hardware"} <= set(row.paper)
    table = name.split("_")[0].removeprefix("table")
    assert table in row.paper["source"].split("Table ")[1]
    if "total" not in row.paper:
        assert recipe in (PTB, WIKITEXT2) and table in ("5", "7", "14")
        return
    model = build(recipe, row)
    total, rest = (se.accounting.count_parameters(part) / 1e6 for part in (model, model.embedding))
    printed = str(row.paper["total"])
    wanted = MISTAKE.get((recipe, name), float(printed))
    allowed = 0.5 * 10 ** -len(printed.partition(".")[2])
    if row.embedding["method"] == "define":
        allowed = UNEXPLAINED.get(name, UNIT) * wanted
    assert total == pytest.approx(wanted, abs=max(allowed, 0.01 if recipe in (LSTM, XL) else 0.0))
    if (recipe, name) in CONTEXT:
        assert total - rest == pytest.approx(CONTEXT[recipe, name], abs=0.005)


@pytest.mark.parametrize(
    ("recipe", "name", "network"),
    # By hand: 4 H (I + H + 2) for each layer of widths I -> H, between the embedding and its scores.
    [
        (PTB, "table4_standard", 20_211_600),
        (PTB, "table1c_define", 7_139_200 + 10_589_200 + 512 * (1150 + 128 + 2)),
        (PTB, "table14_unique25", 4600 * (25 + 1152) + 10_589_200 + 100 * (1150 + 25 + 2)),
        (WIKITEXT2, "table14_unique200", 4600 * (200 + 1152) + 10_589_200 + 800 * 1352),
    ],
)
def test_last_layer_has_the_width_of_its_tied_table(recipe: str, name: str, network: int) -> None:
    model = build(recipe, read(recipe, name))
    count = se.accounting.count_parameters
    assert count(model) - count(model.embedding) == network


def test_finetuned_rows_average_from_the_first_step() -> None:
    twice = {pair[1]: row for pair in PUBLISHED if (row := read(*pair)).finetune}
    assert set(twice) == {"table1c_finetuned_standard", "table5_standard", "table5_unique200"}
    assert all(row.finetune == {**row.train, "optimizer": "asgd", "patience": 5} for row in twice.values())


def test_small_rows_have_the_size_that_their_names_tell() -> None:
    for recipe, name in [pair for pair in ALL_ROWS if pair[1].startswith("small_")]:
        row = read(recipe, name)
        words, method = types_of(recipe, row), row.embedding["method"]
        times = times_fewer(row, words)
        if method in ("structured", "group_reduce"):  # sizes also depend on codes or word counts
            assert 3.7 < times < 12
        elif method not in ("standard", "quantized"):  # fewer bits, not fewer parameters
            # A deeper unit is larger; fewer classes, or unique dimensions, are smaller.
            others = {"_8x": (7.7, 8.3), "define_half": (1.7, 2.0), "_half": (1.9, 2.2)}
            others |= {"_deep": (3.0, 3.3), "_classes": (5.0, 6.0), "_12_": (6.5, 7.1)}
            least, most = next((others[part] for part in others if part in name), (3.6, 4.4))
            assert least <= times < most, name


# Words of two kinds in different contexts, so that classes can be found.
TEXT = "the {a} eats a {b}\na {b} sees the {a}\n"


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe with a small corpus and three class files."""
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    folder = tmp_path / "small_lm"
    folder.mkdir()
    classes = (
        "data/classes.npz: {num_classes: 4, epochs: 2}, data/few.npz: {num_classes: 2, epochs: 1}, "
        "data/many.npz: {num_classes: 5, epochs: 2}"
    )
    (folder / "rows.yaml").write_text(f"data: {{dataset: ptb, classes: {{{classes}}}}}\n")
    texts = {split: [tmp_path / f"{split}.txt"] for split in SPLITS}
    for [path] in texts.values():
        path.write_text("".join(TEXT.format(a=f"a{n % 7}", b=f"b{n % 5}") for n in range(300)))

    def run_command(name: str, arguments: Sequence[str | Path]) -> None:
        assert name == "lm_prepare" and arguments[:3] == ["-dataset", "ptb", "-output"]
        prepare_corpus(texts, Path(arguments[3]))

    monkeypatch.setattr(language_model, "run_command", run_command)
    monkeypatch.setattr(language_model, "locate", lambda *_: texts)
    return Recipe(folder)


def test_class_files_are_made_once_and_share_word_vectors_of_the_same_epochs(
    corpus: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = []

    def train(*arguments: Any, **options: Any) -> np.ndarray:
        trained.append(arguments)
        return train_word_vectors(*arguments, **options)

    monkeypatch.setattr("shared_embeddings.words.classes.train_word_vectors", train)
    language_model.preprocess(corpus, [])
    files = [WordClasses.load(corpus.home / "data" / f"{name}.npz") for name in ("classes", "few", "many")]
    words = [line.split("\t")[0] for line in (corpus.data / VOCABULARY).read_text().splitlines()]
    assert all(list(made.words) == words for made in files)
    assert len(trained) == 2
    assert [made.num_classes for made in files] == [4, 2, 5]
    assert np.array_equal(files[0].vectors, files[2].vectors)
    assert not np.array_equal(files[0].vectors, files[1].vectors)
    capsys.readouterr()
    language_model.preprocess(corpus, [])
    assert re.findall(r"(\w+): up to date", capsys.readouterr().out) == ["classes", "few", "many"]


@pytest.mark.slow_except("wikitext103_transformer_xl-table5_projective_codes")
@pytest.mark.parametrize(("recipe", "name"), CODES)
def test_codes_take_four_bits_each(recipe: str, name: str) -> None:
    row = read(recipe, name)
    assert row.fit is not None and row.paper is not None and "Table 5" in row.paper["source"]
    teacher = build(recipe, read(recipe, row.fit["teacher"])).embedding
    options = {key: value for key, value in row.embedding.items() if key != "method"}
    replaced = teacher.inner_embedding()
    with torch.device("meta"):
        sizes = {"num_embeddings": replaced.num_embeddings, "embedding_dim": replaced.embedding_dim}
        new = se.build(row.embedding["method"], **sizes, **options)
    assert new.counts()["total"] == 32 * 16 * replaced.embedding_dim
    books = 2 * new.counts()["total"]
    codes = new.counts()["stored_bits"] // 8 - books
    assert codes == 267_735 * 32 * 4 // 8


# Training and evaluation

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
    """Replaces lm_train and lm_evaluate: records its arguments, and writes their output files."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.clock, self.seconds, self.trains, self.fails = 1000.0, 7.0, True, False

    def time(self) -> float:
        return self.clock

    def run(self, name: str, arguments: Sequence[str | Path]) -> None:
        words = list(map(str, arguments))
        self.calls.append((name, words))
        if name == "lm_train":
            self.train(Path(yaml.safe_load(Path(words[1]).read_text())["output_dir"]))
        else:
            self.evaluate(Path(words[words.index("-output") + 1]), words[words.index("-split") + 1])

    def train(self, folder: Path) -> None:
        self.clock += self.seconds
        if self.trains:
            for name in ("last.pt", "best.pt"):
                (folder / name).touch()
                os.utime(folder / name, (self.clock - 2, self.clock - 2))
            (folder / "train.log").write_text(LOG)
        if self.fails:
            raise UserError("lm_train ended with status 1")

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
    monkeypatch.setattr(language_model, "run_command", made.run)
    monkeypatch.setattr(language_model.time, "time", made.time)
    return made


def log_of(recipe: Recipe, row: str) -> Any:
    return json.loads((recipe.home / row / "training.json").read_text())


def test_distilled_row_starts_from_its_teacher(recipe: Recipe, commands: Commands) -> None:
    row = recipe.row("small_row")
    with pytest.raises(
        UserError, match="starts from small_tuned; .* run recipes/recipe/train.sh small_tuned"
    ):
        train(recipe, [row.name])
    train(recipe, ["small_tuned"])
    train(recipe, [row.name])
    settings = yaml.safe_load(Path(commands.calls[-1][1][1]).read_text())
    best = recipe.home / "small_tuned/finetune/best.pt"
    assert settings["embedding_distillation"] == {"teacher": str(best), "alpha": 0.2}
    evaluate(recipe, [row.name])
    (record,) = read_results(recipe.home)
    assert record["config"]["distill"] == {"teacher": "small_tuned", "alpha": 0.2}
    assert "embedding_distillation" not in record["config"]
    (line,) = markdown_table([record], ["options"]).splitlines()[2:]
    assert line == "| rank 3, distilled from small_tuned, alpha 0.2 |"


def test_results_of_a_row(recipe: Recipe, commands: Commands) -> None:
    row = recipe.row("table1")
    train(recipe, [row.name, "-device", "cpu"])
    name, arguments = commands.calls[-1]
    settings = yaml.safe_load(Path(arguments[1]).read_text())
    assert name == "lm_train" and arguments[2:] == ["-device", "cpu"]
    assert settings == {
        "data": str(recipe.data),
        "output_dir": str(recipe.home / "table1"),
        "embedding": {"method": "funnel", "rank": 3},
        "steps": 20,
        "model": "awd_lstm",
    }
    evaluate(recipe, [row.name, "-batch_size", "4"])
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
        train(recipe, [row.name])
    with pytest.raises(UserError, match="training is not complete"):
        evaluate(recipe, [row.name])
    commands.fails = False
    commands.clock += 100
    train(recipe, [row.name])
    # Seven seconds of the first run, the last two of them lost; seven of the second.
    assert log_of(recipe, "table1")["seconds"] == 12.0
    commands.trains = False
    train(recipe, [row.name])
    assert log_of(recipe, "table1")["seconds"] == 12.0
    (recipe.home / "table1" / "last.pt").unlink()
    commands.trains = True
    train(recipe, [row.name])
    assert log_of(recipe, "table1")["seconds"] == 7.0


def test_second_training_starts_from_the_best_of_the_first(recipe: Recipe, commands: Commands) -> None:
    row = recipe.row("small_tuned")
    train(recipe, [row.name, "-seed", "3"])
    assert [len(call[1]) for call in commands.calls] == [4, 2]
    settings = yaml.safe_load(Path(commands.calls[1][1][1]).read_text())
    assert settings["init_from"] == str(recipe.home / "small_tuned" / "best.pt")
    assert settings["data"] == str(recipe.home / "few")
    assert settings["output_dir"] == str(recipe.home / "small_tuned" / "finetune")
    assert settings["optimizer"] == "ntasgd"
    evaluate(recipe, [row.name])
    model = commands.calls[-1][1]
    assert model[model.index("-model") + 1] == str(recipe.home / "small_tuned" / "finetune" / "best.pt")
    assert ["-target_length", "9"] == model[-2:]
    assert read_results(recipe.home)[0]["metrics"]["training_seconds"] == 14.0


def test_files_and_data_of_a_row_and_the_first_process(
    recipe: Recipe, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe, ["small_uncle"])
    settings = yaml.safe_load(Path(commands.calls[0][1][1]).read_text())
    assert settings["embedding"]["classes"] == str(recipe.home / "data" / "c.npz")
    monkeypatch.setenv("RANK", "1")  # of torchrun; only the first process records results
    train(recipe, ["table1"])
    assert len(commands.calls) == 2 and not (recipe.home / "table1" / "training.json").exists()
    monkeypatch.delenv("RANK")
    train(recipe, ["table1"])
    (recipe.data / "data.json").write_text('{"checksum": "other"}')
    with pytest.raises(UserError, match="different data"):
        evaluate(recipe, ["table1"])
    (recipe.data / "data.json").unlink()
    with pytest.raises(UserError, match="no prepared data; run recipes/recipe/preprocess.sh"):
        train(recipe, ["table1"])


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
    parent = "from recipes.common.tools import run_command; import sys; run_command('python', sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", parent, str(tmp_path / "child.py"), str(tmp_path / "file")]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert (tmp_path / "file").read_text() == "saved"


SMALL_MODEL = """
    train: {model: awd_lstm, embedding_dim: 8, hidden_dim: 12, num_layers: 2, steps: 3, seed: 3,
            batch_size: 2, sequence_length: 5, learning_rate: 1.0, valid_batch_size: 1}
    evaluate: {target_length: 7, pointer: {window: 4, theta: 0.5, lambda: 0.1}}
"""


STARTED = """
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
  q_calibrated:
    embedding: {{method: quantized, bits: 2, output_bias: true}}
    fit: {{teacher: standard, calibrate: true}}
"""


@pytest.mark.slow
def test_distilled_language_model_starts_from_the_fit(recipe: Recipe, tmp_path: Path) -> None:
    (recipe.data / "data.json").unlink()
    write_corpus(tmp_path / "corpus").rename(recipe.data)
    # Without learning, the first step of the finetuned row changes nothing.
    text = STARTED.format(common=SMALL_MODEL, finetuned="{steps: 1, learning_rate: 1.0e-30}")
    (recipe.folder / "rows.yaml").write_text(text)
    row = recipe.row("f_4x_fitted")
    with pytest.raises(UserError, match="starts from standard; .* run recipes/.*/train.sh standard"):
        train(recipe, [row.name])
    train(recipe, ["standard"])
    with pytest.raises(UserError, match="fitted, not trained: -steps has no effect"):
        train(recipe, [row.name, "-steps", "5"])
    train(recipe, [row.name])
    train(recipe, ["f_4x_finetuned"])
    first, second = (
        torch.load(recipe.home / name / "best.pt", weights_only=True)["model"]
        for name in ("f_4x_fitted", "f_4x_finetuned")
    )
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor)
    evaluate(recipe, [row.name])
    (record,) = read_results(recipe.home)
    assert record["metrics"]["perplexity"] > 1 and record["config"]["fit"] == {"teacher": "standard"}
    (line,) = markdown_table([record], ["options"]).splitlines()[2:]
    assert line == "| rank 3, output_bias True, fitted to standard, not trained |"
    assert json.loads((recipe.home / "f_4x_fitted" / "fit.json").read_text())["method"] == "funnel"
    row = recipe.row("q_calibrated")
    train(recipe, [row.name])
    assert "train.txt" in json.loads((recipe.home / row.name / "fit.json").read_text())["kept"]["how"]
    corpus, text = load_corpus(recipe.data), (recipe.home / row.name / "train.txt").read_text()
    read = [corpus.vocabulary.words[token] for token in corpus.train]
    assert text.split() == [word for word in read if word != "<eos>"]
    assert len(text.splitlines()) >= read.count("<eos>")
