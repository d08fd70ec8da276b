"""The recipes of AWD-LSTM: every row can be trained, is as large as it says, and its data are prepared."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import shared_embeddings as se
from lm import models
from lm.config import parse
from lm.corpus import SPLITS, VOCABULARY
from lm.corpus import prepare as prepare_corpus
from lm.datasets import SOURCES
from lm.evaluate import _parser as evaluation_parser
from lm.pointer import PointerOptions
from recipes.common import model_data
from recipes.common.config import row_names
from recipes.common.errors import UserError, run_main
from recipes.common.model_data import read_settings
from recipes.common.model_rows import RECIPES, Recipe, read_model_row
from recipes.common.model_runs import as_options
from shared_embeddings.classes import WordClasses

NAMES = ("ptb_awd_lstm", "wikitext2_awd_lstm")
SCRIPTS = ("preprocess.sh", "train.sh", "eval.sh")
ROWS = [(name, row) for name in NAMES for row in row_names(RECIPES / name / "configs")]


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


@pytest.mark.parametrize(("name", "row_name"), ROWS)
def test_row_can_be_trained_and_evaluated(name: str, row_name: str) -> None:
    row = read_model_row(recipe_of(name), row_name)
    embedding = stored(row.embedding)
    config = parse({"data": "data", "save": "run", "embedding": embedding, **row.train})
    words = [f"word{place}" for place in range(types_of(name))]
    with torch.device("meta"):
        model = models.build(config.training.model, words, embedding, config.model_options())
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    evaluation_parser().parse_args(["-model", "m", "-data", "d", *as_options(row.evaluate)])
    if "pointer" in row.evaluate:
        PointerOptions.parse(row.evaluate["pointer"])
    for name_ in se.file_options(row.embedding["method"]):
        assert row.embedding.get(name_) in {None, *read_settings(recipe_of(name)).classes}


@pytest.mark.parametrize(("name", "row_name"), [pair for pair in ROWS if pair[1].startswith("small_")])
def test_small_row_is_a_quarter_of_the_table_and_says_its_size(name: str, row_name: str) -> None:
    row = read_model_row(recipe_of(name), row_name)
    types, dim = types_of(name), row.train["embedding_dim"]
    options = {key: value for key, value in stored(row.embedding).items() if key != "method"}
    method = row.embedding["method"]
    count = se.expected_count(method, num_embeddings=types, embedding_dim=dim, **options)
    if method != "standard":
        assert 3.8 < types * dim / count < 4.3
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
    """A recipe whose corpus is small, with two class files."""
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    folder = tmp_path / "small_lm"
    folder.mkdir()
    classes = "data/classes.npz: {num_classes: 4, epochs: 2}, data/few.npz: {num_classes: 2, epochs: 1}"
    (folder / "data.yaml").write_text(f"dataset: ptb\nclasses: {{{classes}}}\n")
    texts = {split: [tmp_path / f"{split}.txt"] for split in SPLITS}
    for [path] in texts.values():
        path.write_text("".join(TEXT.format(a=f"a{n % 7}", b=f"b{n % 5}") for n in range(300)))

    def run_module(name: str, arguments: Sequence[str | Path]) -> None:
        assert name == "lm.prepare" and arguments[:3] == ["-dataset", "ptb", "-output"]
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
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("dataset: ptb", "must hold dataset and classes"),
        ("{dataset: ptb, classes: {}, lower: true}", "must hold dataset and classes"),
        ("{dataset: penn, classes: {}}", "dataset is 'penn'; it may be ptb, wikitext2, wikitext103"),
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


def test_arguments_are_refused_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run_main("preprocess", model_data.main, ["ptb_awd_lstm", "extra"])
    assert exit_.value.code == 2 and "usage: preprocess.sh" in capsys.readouterr().err
