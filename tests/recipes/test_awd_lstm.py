"""The recipes of AWD-LSTM: every row can be trained, is as large as it says, and its data are prepared."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from recipes.common.config import distillation_options, row_names
from recipes.common.model_data import read_settings
from recipes.common.model_rows import RECIPES, Recipe, read_model_row
from recipes.common.model_runs import as_options

import shared_embeddings as se
from lm import models
from lm.data.corpus import SPLITS, VOCABULARY
from lm.data.corpus import prepare as prepare_corpus
from lm.data.datasets import SOURCES
from lm.evaluate.command import _parser as evaluation_parser
from lm.evaluate.pointer import PointerOptions
from lm.models import LanguageModel
from lm.train.config import parse
from recipes.common import model_data
from recipes.common.errors import UserError, run_main
from shared_embeddings.classes import WordClasses
from shared_embeddings.classes.skipgram import train_word_vectors

NAMES = ("ptb_awd_lstm", "wikitext2_awd_lstm")
SCRIPTS = ("preprocess.sh", "train.sh", "eval.sh")
ROWS = [(name, row) for name in NAMES for row in row_names(RECIPES / name / "configs")]
PUBLISHED = [(name, row) for name, row in ROWS if row.startswith("table")]
# What UnClE calls the corpora in its tables of sizes.
IN_PRINT = {"ptb_awd_lstm": "PTB", "wikitext2_awd_lstm": "WT2"}
# Share that DeFINE's total may differ by; and a slip of the paper, see its ledger: 27.01 for 27.10.
UNIT, SLIP = 0.05, {("wikitext2_awd_lstm", "table4_unique200"): 27.10}


def recipe_of(name: str) -> Recipe:
    return Recipe(RECIPES / name)


def types_of(name: str) -> int:
    return SOURCES[read_settings(recipe_of(name)).dataset].published.types


def stored(embedding: dict[str, Any]) -> dict[str, Any]:
    """An embedding whose files are not there yet."""
    files = se.file_options(embedding["method"])
    return {key: se.STORED if key in files else value for key, value in embedding.items()}


def test_small_rows_are_there() -> None:
    methods = {"standard", "projective", "adaptive", "define", "uncle", "alone", "funnel"}
    for name in NAMES:
        assert {f"small_{method}" for method in methods} <= {row for recipe, row in ROWS if recipe == name}


def model_of(name: str, embedding: dict[str, Any], settings: dict[str, Any]) -> LanguageModel:
    """The model of these settings, checked as lm_train does, without memory for its parameters."""
    config = parse({"data": "data", "output_dir": "run", "embedding": embedding, **settings})
    words = [f"word{place}" for place in range(types_of(name))]
    with torch.device("meta"):
        return models.build(config.training.model, words, embedding, config.model_options())


@pytest.mark.parametrize(("name", "row_name"), ROWS)
def test_row_can_be_trained_and_evaluated(name: str, row_name: str) -> None:
    row = read_model_row(recipe_of(name), row_name)
    assert sum(p.numel() for p in model_of(name, stored(row.embedding), row.train).parameters()) > 0
    if row.distill is not None:
        option = distillation_options(row.distill, Path("best.pt"))
        parse({"data": "d", "output_dir": "s", "embedding": row.embedding, **row.train, **option})
    if row.finetune is not None:
        parse({"data": "d", "output_dir": "s", "init_from": "b", "embedding": row.embedding, **row.finetune})
    evaluation_parser().parse_args(["-model", __file__, "-data", __file__, *as_options(row.evaluate)])
    if "pointer" in row.evaluate:
        PointerOptions.parse(row.evaluate["pointer"])
    for name_ in se.file_options(row.embedding["method"]):
        assert row.embedding.get(name_) in {None, *read_settings(recipe_of(name)).classes}


@functools.cache
def ledger_figures() -> dict[tuple[str, str, str], dict[str, str]]:
    """The printed figures in the ledger, by paper, table and row."""
    ledger = yaml.safe_load((resources.files(se) / "data" / "ledger.yaml").read_text(encoding="utf-8"))
    return {
        (part["paper"], part["table"], line["row"]): line["figures"]
        for part in ledger["tables"]
        for line in part["rows"]
    }


def ledger_total(name: str, row_name: str) -> str | None:
    """What the ledger says that the paper prints as the total of a row, in millions; None for nothing."""
    table, _, row = row_name.partition("_")
    if table == "table1c":
        titles = {
            "standard": "AWD-LSTM (Merity et al.)",
            "finetuned_standard": "AWD-LSTM + finetune",
            "define": "AWD-LSTM + DeFINE",
        }
        wanted = "DeFINE", "Table 1c", titles[row]
    elif table in ("table4", "table5"):
        width = row.removeprefix("unique").replace("standard", "400")
        wanted = "UnClE", "Table 10", f"{IN_PRINT[name]}, unique {width}"
    else:
        return None
    return str(ledger_figures()[wanted]["total"])


@pytest.mark.parametrize(("name", "row_name"), PUBLISHED)
def test_published_rows_have_the_sizes_in_print(name: str, row_name: str) -> None:
    row = read_model_row(recipe_of(name), row_name)
    printed = ledger_total(name, row_name)
    paper = row.paper or {}
    assert paper.get("parameters_in_millions") == (None if printed is None else float(printed))
    if printed is None:
        return
    method = row.embedding["method"]
    model = model_of(name, stored(row.embedding), row.train)
    total = se.accounting.count_parameters(model)
    wanted = SLIP.get((name, row_name), float(printed))
    digits = len(printed.partition(".")[2])
    allowed = UNIT * wanted if method == "define" else 0.5 * 10**-digits
    assert total / 1e6 == pytest.approx(wanted, abs=allowed)


@pytest.mark.parametrize(("name", "row_name"), PUBLISHED)
def test_published_rows_say_where_their_figures_are_from(name: str, row_name: str) -> None:
    paper = read_model_row(recipe_of(name), row_name).paper
    assert paper is not None and {"source", "perplexity", "hardware"} <= set(paper)
    table = row_name.partition("_")[0].removeprefix("table")
    assert f"Table {table}: " in paper["source"]
    head = (recipe_of(name).configs / f"{row_name}.yaml").read_text().partition("\n")[0]
    assert f"Table {table}" in head and head.startswith("# " + paper["source"].partition(",")[0])


@pytest.mark.parametrize(
    ("name", "row_name", "network"),
    # By hand: 4 H (I + H + 2) for each layer of widths I -> H, between the embedding and its scores.
    [
        ("ptb_awd_lstm", "table4_standard", 20_211_600),
        ("ptb_awd_lstm", "table1c_define", 7_139_200 + 10_589_200 + 512 * (1150 + 128 + 2)),
        ("ptb_awd_lstm", "table14_unique25", 4600 * (25 + 1152) + 10_589_200 + 100 * (1150 + 25 + 2)),
        ("wikitext2_awd_lstm", "table14_unique200", 4600 * (200 + 1152) + 10_589_200 + 800 * 1352),
    ],
)
def test_last_layer_is_as_wide_as_what_it_is_tied_to(name: str, row_name: str, network: int) -> None:
    row = read_model_row(recipe_of(name), row_name)
    model = model_of(name, stored(row.embedding), row.train)
    count = se.accounting.count_parameters
    assert count(model) - count(model.embedding) == network


def test_rows_of_two_trainings_average_from_the_first_step_until_validation_stalls() -> None:
    twice = [pair for pair in PUBLISHED if read_model_row(recipe_of(pair[0]), pair[1]).finetune]
    assert {row for _, row in twice} == {"table1c_finetuned_standard", "table5_standard", "table5_unique200"}
    for name, row_name in twice:
        row = read_model_row(recipe_of(name), row_name)
        assert row.finetune == {**row.train, "optimizer": "asgd", "patience": 5}


@pytest.mark.parametrize(("name", "row_name"), [pair for pair in ROWS if pair[1].startswith("small_")])
def test_small_row_is_a_quarter_of_the_table_and_says_its_size(name: str, row_name: str) -> None:
    row = read_model_row(recipe_of(name), row_name)
    types, dim = types_of(name), row.train["embedding_dim"]
    options = {key: value for key, value in stored(row.embedding).items() if key != "method"}
    method = row.embedding["method"]
    count = se.expected_count(method, num_embeddings=types, embedding_dim=dim, **options)
    if method in ("structured", "group_reduce"):  # codes, or counts of words, decide, too
        assert 3.8 < types * dim / count < 12
    elif method != "standard":
        least, most = (7.8, 8.3) if "_8x" in row_name else (3.8, 4.3)
        assert least < types * dim / count < most
    head = (recipe_of(name).configs / f"{row_name}.yaml").read_text()
    times = types * dim / count
    assert (
        f"# Size: {count:,} embedding parameters, {times:.1f} times fewer than {types:,} x {dim}.\n" in head
    )


@pytest.mark.parametrize("name", NAMES)
def test_class_files_have_as_many_classes_as_the_rows_say(name: str) -> None:
    recipe = recipe_of(name)
    settings = read_settings(recipe)
    used = [read_model_row(recipe, row).embedding for row in row_names(recipe.configs)]
    for embedding in used:
        if "classes" in embedding:
            assert settings.classes[embedding["classes"]]["num_classes"] == embedding["num_classes"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_explain_themselves(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [RECIPES / NAMES[0] / script, "--help"], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {script}") and NAMES[0] in done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_of_all_recipes_are_alike(script: str) -> None:
    first = (RECIPES / NAMES[0] / script).read_text()
    for name in NAMES[1:]:
        assert (RECIPES / name / script).read_text() == first.replace(NAMES[0], name)
        assert os.access(RECIPES / name / script, os.X_OK)


# Words of two kinds that stand in different places, for classes to be found.
TEXT = "the {a} eats a {b}\na {b} sees the {a}\n"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe whose corpus is small, with three class files."""
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    folder = tmp_path / "small_lm"
    folder.mkdir()
    classes = (
        "data/classes.npz: {num_classes: 4, epochs: 2}, data/few.npz: {num_classes: 2, epochs: 1}, "
        "data/many.npz: {num_classes: 5, epochs: 2}"
    )
    (folder / "data.yaml").write_text(f"dataset: ptb\nclasses: {{{classes}}}\n")
    texts = {split: [tmp_path / f"{split}.txt"] for split in SPLITS}
    for [path] in texts.values():
        path.write_text("".join(TEXT.format(a=f"a{n % 7}", b=f"b{n % 5}") for n in range(300)))

    def run_module(name: str, arguments: Sequence[str | Path]) -> None:
        assert name == "lm.data.prepare" and arguments[:3] == ["-dataset", "ptb", "-output"]
        prepare_corpus(texts, Path(arguments[3]))

    monkeypatch.setattr(model_data, "run_module", run_module)
    monkeypatch.setattr(model_data, "locate", lambda *_: texts)
    return Recipe(folder)


def test_classes_are_of_the_vocabulary_and_made_once(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    model_data.prepare(recipe)
    first = WordClasses.load(recipe.home / "data" / "classes.npz")
    words = [line.split("\t")[0] for line in (recipe.data / VOCABULARY).read_text().splitlines()]
    assert list(first.words) == words and first.num_classes == 4
    assert WordClasses.load(recipe.home / "data" / "few.npz").num_classes == 2
    capsys.readouterr()
    model_data.prepare(recipe)
    assert re.findall(r"\w+: up to date", capsys.readouterr().out) == [
        "classes: up to date",
        "few: up to date",
        "many: up to date",
    ]


def test_word_vectors_are_trained_once_for_all_classes_of_the_same_epochs(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []

    def train(*arguments: Any, **options: Any) -> np.ndarray:
        trained.append(arguments)
        return train_word_vectors(*arguments, **options)

    monkeypatch.setattr("shared_embeddings.classes.making.train_word_vectors", train)
    model_data.prepare(recipe)
    files = [WordClasses.load(recipe.home / "data" / f"{name}.npz") for name in ("classes", "few", "many")]
    assert len(trained) == 2
    assert [made.num_classes for made in files] == [4, 2, 5]
    assert np.array_equal(files[0].vectors, files[2].vectors)
    assert not np.array_equal(files[0].vectors, files[1].vectors)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("dataset: ptb", "must hold dataset and classes"),
        ("{dataset: ptb, classes: {}, lower: true}", "must hold dataset and classes"),
        ("{dataset: penn, classes: {}}", "dataset is 'penn'; it may be ptb, wikitext2, wikitext103"),
        (
            "{dataset: ptb, classes: {}, small: penn}",
            "small is 'penn'; it may be ptb, wikitext2, wikitext103",
        ),
        ("{dataset: ptb, classes: [a]}", r"classes is \['a'\]"),
        ("{dataset: ptb, classes: {a: 3}}", "classes a: wanted num_classes and epochs"),
        ("{dataset: ptb, classes: {a: {num_classes: 0, epochs: 1}}}", "num_classes is 0"),
        ("{dataset: ptb, classes: {a: {num_classes: 3, epochs: 1.5}}}", "epochs is 1.5"),
    ],
)
def test_other_settings_are_refused(recipe: Recipe, content: str, said: str) -> None:
    (recipe.folder / "data.yaml").write_text(content)
    with pytest.raises(UserError, match=said):
        read_settings(recipe)


def test_recipe_without_small_data_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("preprocess", model_data.main, ["ptb_awd_lstm", "small"]) == 2
    assert capsys.readouterr().err.startswith("preprocess: ptb_awd_lstm has no small data; ")


def test_arguments_are_refused_in_one_line_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("preprocess", model_data.main, ["ptb_awd_lstm", "--extra"]) == 2
    told = "preprocess: '--extra' is no argument of preprocess.sh; see preprocess.sh --help\n"
    assert capsys.readouterr().err == told
