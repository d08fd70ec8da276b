"""``--smoke``: which recipes are run, what their rows become, and what is told of those that fail."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from recipes.common.config import Row, read_row, row_names
from recipes.common.evaluation import read_trained
from recipes.common.model_rows import ModelRow, read_model_row
from recipes.common.model_rows import Recipe as ModelRecipe
from recipes.common.model_smoke import SmokeModelRecipe, smoke_model_row, write_smoke_corpus
from recipes.published import smoke as published
from recipes.published import train as published_training
from recipes.published.settings import classes_file, read_settings

import shared_embeddings as se
from lm.data.corpus import prepare
from lm.data.datasets import SOURCES
from recipes import smoke
from recipes.common import model_runs
from recipes.common.errors import UserError, run_main
from recipes.common.recipe import Recipe
from recipes.common.results import is_smoke, read_results
from recipes.common.smoke import (
    CLASSES,
    FIT_STEPS,
    SMOKE,
    WORDS,
    SmokeRecipe,
    generated_vocabulary,
    generated_words,
    parse,
    smoke_row,
)
from recipes.multi30k_ende import train as multi30k
from recipes.quickstart import run as quickstart
from recipes.report.collect import of_runs

NAMES = smoke.recipe_names()
LANGUAGE_MODELS = ("ptb_awd_lstm", "wikitext2_awd_lstm", "wikitext103_lstm", "wikitext103_transformer_xl")
TRANSLATION = ("iwslt_pten", "wmt14_ende", "wmt14_enfr")
WITH_ROWS = [name for name in NAMES if (smoke.RECIPES / name / "configs").is_dir() and name != "quickstart"]


def any_row(name: str, row: str) -> Row | ModelRow:
    """A row as it is, of a recipe of any kind."""
    folder = smoke.RECIPES / name
    if name in LANGUAGE_MODELS:
        return read_model_row(ModelRecipe(folder), row)
    return read_row(folder / "configs", row)


def small(row: Row | ModelRow) -> Row | ModelRow:
    """A row as ``--smoke`` has it."""
    return smoke_model_row(row) if isinstance(row, ModelRow) else smoke_row(row)


# Which recipes and rows


def test_every_folder_with_scripts_and_a_readme_is_a_recipe(tmp_path: Path) -> None:
    assert {*LANGUAGE_MODELS, *TRANSLATION, "multi30k_ende", "glove_reconstruction", "quickstart"} <= set(
        NAMES
    )
    assert not {"common", "published", "report"} & set(NAMES)
    for name, files in {
        "new": ("README.md", "train.sh"),
        "common": ("a.sh",),
        "told": ("README.md",),
    }.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
    assert smoke.recipe_names(tmp_path) == ["new"]
    assert smoke.chosen([], tmp_path) == smoke.chosen(["new"], tmp_path) == [tmp_path / "new"]
    with pytest.raises(UserError, match="no recipe 'told'; there are: new"):
        smoke.chosen(["told"], tmp_path)


@pytest.mark.parametrize("name", WITH_ROWS)
def test_first_row_compresses_and_starts_from_nothing(name: str) -> None:
    folder = smoke.RECIPES / name
    found = smoke.rows_to_run(folder)[0]
    assert found in row_names(folder / "configs")
    row = any_row(name, found)
    assert row.embedding["method"] != "standard" and row.distill is None and row.fit is None


@pytest.mark.parametrize("name", WITH_ROWS)
def test_rows_of_each_way_to_start_from_another_stand_behind_it(name: str) -> None:
    found = smoke.rows_to_run(smoke.RECIPES / name)
    assert len(found) == len(set(found))
    ways = set()
    for number, row in enumerate(any_row(name, row_name) for row_name in found):
        ways |= {way for way, start in (("fit", row.fit), ("distill", row.distill)) if start is not None}
        for start in (row.fit, row.distill):
            assert start is None or start["teacher"] in found[:number]
    files = [(smoke.RECIPES / name / "configs" / f"{row}.yaml").read_text()
             for row in row_names(smoke.RECIPES / name / "configs")]  # fmt: skip
    assert ways == {way for way in ("fit", "distill") if any(f"\n{way}: " in text for text in files)}


def test_scripts_are_called_in_order_with_a_row_where_there_are_rows() -> None:
    def told(name: str) -> list[list[str]]:
        folder = smoke.RECIPES / name
        found = smoke.commands(folder, smoke.rows_to_run(folder))
        return [[Path(script).name, *rest] for script, *rest in found]

    rows = smoke.rows_to_run(smoke.RECIPES / "ptb_awd_lstm")
    assert told("ptb_awd_lstm") == [
        ["preprocess.sh", SMOKE],
        *([script, row, SMOKE] for row in rows for script in ("train.sh", "eval.sh")),
    ]
    assert told("glove_reconstruction") == [
        [script, SMOKE] for script in ("preprocess.sh", "train.sh", "eval.sh")
    ]
    assert told("quickstart") == [["run.sh", SMOKE]]


@pytest.mark.parametrize("name", NAMES)
def test_scripts_and_readme_tell_of_the_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert SMOKE in (smoke.RECIPES / name / "README.md").read_text(encoding="utf-8")
    for script, *_ in smoke.commands(smoke.RECIPES / name, []):
        found = re.search(r" -m (recipes\.\S+) (.*)\"\$@\"$", Path(script).read_text(), re.MULTILINE)
        assert found, script
        module, arguments = importlib.import_module(found[1]), found[2].split()
        with pytest.raises(SystemExit) as ended:
            module.main([*arguments, "--help"])
        assert ended.value.code == 0 and SMOKE in capsys.readouterr().out, script


# What is told


def recipe(folder: Path, **scripts: str) -> Path:
    """A recipe without rows whose scripts are as given; the others do nothing."""
    folder.mkdir()
    for name in ("preprocess", "train", "eval"):
        path = folder / f"{name}.sh"
        path.write_text(f"#!/bin/sh\nset -e\n{scripts.get(name, '')}\n")
        path.chmod(0o755)
    return folder


RESULTS = "mkdir -p $RUNS/small/smoke/row; echo '{}' > $RUNS/small/smoke/row/results.json"


@pytest.mark.parametrize(
    ("scripts", "fault"),
    [
        ({"eval": RESULTS}, None),
        ({"train": "echo first; echo no option $1 >&2; exit 2"},
         "train.sh --smoke ended with status 2:\nfirst\nno option --smoke"),
        ({}, "wrote no results.json below its folder smoke"),
        ({"eval": f"{RESULTS}; mkdir $RUNS/small/data"},
         "wrote data beside its folder smoke, where real runs lie"),
        ({"preprocess": "test -z $DATA_DIR", "eval": RESULTS}, None),
        ({"preprocess": "exit 3", "train": "touch $RUNS/trained", "eval": RESULTS},
         "preprocess.sh --smoke ended with status 3:"),
    ],
)  # fmt: skip
def test_outcome_tells_what_went_wrong(
    scripts: dict[str, str], fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    runs = tmp_path / "runs"
    runs.mkdir()
    outcome = smoke.run_recipe(recipe(tmp_path / "small", **scripts), runs)
    assert (outcome.recipe, outcome.rows, outcome.fault) == ("small", [], fault)
    assert not (runs / "trained").exists()
    line = smoke.tell(outcome).splitlines()[0]
    assert re.fullmatch(r"small +\d+ s  (ok|failed)", line) and line.endswith("ok") == (fault is None)


def test_every_row_has_results_of_its_own(tmp_path: Path) -> None:
    folder = recipe(tmp_path / "small", train="mkdir -p $RUNS/small/smoke/$1",
                    eval="test $1 = fitted || echo '{}' > $RUNS/small/smoke/$1/results.json")  # fmt: skip
    (folder / "configs").mkdir()
    for name, start in {
        "fitted": "fit: {teacher: table}",
        "funnel": "",
        "table": "",
        "trained": "distill: {teacher: table}",
    }.items():
        text = f"embedding: {{method: {'standard' if name == 'table' else 'funnel'}}}\n{start}\n"
        (folder / "configs" / f"{name}.yaml").write_text(text)
    runs = tmp_path / "runs"
    runs.mkdir()
    outcome = smoke.run_recipe(folder, runs)
    assert outcome.rows == ["funnel", "table", "fitted", "trained"]
    assert outcome.fault == "wrote no results.json below its folder smoke/fitted"
    assert smoke.tell(outcome).splitlines()[0].endswith("failed  funnel, table, fitted, trained")


def test_script_that_is_not_there_and_one_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke, "LONGEST_SECONDS", 0.2)
    folder = recipe(tmp_path / "small", preprocess="sleep 20")
    assert smoke.run_recipe(folder, tmp_path).fault == "preprocess.sh --smoke did not end in 0.2 seconds"
    (folder / "preprocess.sh").unlink()
    assert smoke.run_recipe(folder, tmp_path).fault == "preprocess.sh --smoke: No such file or directory"


def test_command_ends_with_1_and_names_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [recipe(tmp_path / "small", eval=RESULTS), recipe(tmp_path / "other", train="exit 2")]
    monkeypatch.setattr(smoke, "chosen", lambda names: folders)
    with pytest.raises(SystemExit) as ended:
        smoke.main([])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert 'failed: other; make smoke RECIPES="other" runs these alone' in out
    assert re.search(r"^small +\d+ s  ok$", out, re.MULTILINE)
    monkeypatch.setattr(smoke, "chosen", lambda names: folders[:1])
    smoke.main([])


def test_list_has_the_names_alone(capsys: pytest.CaptureFixture[str]) -> None:
    smoke.main(["--list", "wmt14_enfr", "quickstart"])
    assert capsys.readouterr().out == "wmt14_enfr\nquickstart\n"


# Runs of their own


def test_runs_and_results_lie_apart_from_real_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS", str(tmp_path))
    assert SmokeRecipe("multi30k_ende").home == Recipe("multi30k_ende").home / "smoke"
    folder = smoke.RECIPES / "ptb_awd_lstm"
    assert SmokeModelRecipe(folder).home == ModelRecipe(folder).home / "smoke"
    assert SmokeModelRecipe(folder).name == "ptb_awd_lstm"
    for place in ("ptb_awd_lstm/smoke/row", "ptb_awd_lstm/row"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "results.json").write_text("{}")
    assert [name for _, name in of_runs(tmp_path)] == [f"{tmp_path.name}/ptb_awd_lstm/row/results.json"]
    with pytest.raises(UserError, match=f"{tmp_path}/ptb_awd_lstm/row/results.json: not a results file"):
        read_results(tmp_path)
    (tmp_path / "ptb_awd_lstm/row/results.json").unlink()
    assert read_results(tmp_path) == []
    # A folder of runs may lie below one of this name.
    assert not is_smoke(tmp_path / "smoke" / "row", tmp_path / "smoke")


def test_option_chooses_the_recipe_and_leaves_the_others() -> None:
    real = Recipe("multi30k_ende")
    recipe, row, options = parse(real, "usage", ["uncle_4x", "-seed", "3", SMOKE])
    assert type(recipe) is SmokeRecipe and recipe.name == real.name and options == ["-seed", "3"]
    assert row.train["train_steps"] == 4
    recipe, row, options = parse(real, "usage", ["uncle_4x", "-seed", "3"])
    assert type(recipe) is Recipe and row == read_row(real.folder / "configs", "uncle_4x")


FITTED, DISTILLED = "small_funnel_fitted", "small_funnel_distilled"


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (model_runs.main, ["train", "ptb_awd_lstm", FITTED]),
        (model_runs.main, ["train", "ptb_awd_lstm", DISTILLED]),
        (multi30k.main, ["funnel_4x_fitted"]),
        (multi30k.main, ["funnel_4x_distilled"]),
        (published_training.main, ["iwslt_pten", "distilled_table3_distilled"]),
    ],
)
def test_missing_data_and_then_a_missing_teacher_are_told_with_the_command(
    main: Callable[[Sequence[str]], None],
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command says --smoke where that was asked for, and does not where it was not."""
    monkeypatch.setenv("RUNS", str(tmp_path))
    *_, name, row_name = ["multi30k_ende", *arguments]
    row = any_row(name, row_name)
    teacher = (row.fit or row.distill or {})["teacher"]
    for options, folder in (([SMOKE], tmp_path / name / "smoke"), ([], tmp_path / name)):
        if name not in TRANSLATION:
            assert run_main("train", main, [*arguments, *options]) == 2
            error = capsys.readouterr().err
            assert error.endswith(" ".join(["", f"recipes/{name}/preprocess.sh", *options]) + "\n")
            assert error.count("\n") == 1
        (folder / "data").mkdir(parents=True)
        (folder / "data" / "data.json").write_text('{"source": "a", "target": "b", "checksum": "c"}')
        assert run_main("train", main, [*arguments, *options]) == 2
        error = capsys.readouterr().err
        assert f"{row_name} starts from {teacher}" in error and error.count("\n") == 1
        assert error.endswith(" ".join(["", f"recipes/{name}/train.sh", teacher, *options]) + "\n")


def test_missing_training_is_told_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS", str(tmp_path))
    for recipe, command in (
        (Recipe("multi30k_ende"), "recipes/multi30k_ende/{} standard"),
        (SmokeRecipe("multi30k_ende"), "recipes/multi30k_ende/{} standard --smoke"),
    ):
        row = read_row(recipe.folder / "configs", "standard")
        missing = command.replace(" standard", "").format("preprocess.sh")
        with pytest.raises(UserError, match=f"no prepared data; run {missing}$"):
            read_trained(recipe, row, recipe.data)
        recipe.data.mkdir(parents=True)
        (recipe.data / "data.json").write_text('{"checksum": "c"}')
        with pytest.raises(UserError, match=f"not trained to the end; run {command.format('train.sh')}$"):
            read_trained(recipe, row, recipe.data)


def test_classes_of_published_rows_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RUNS", str(tmp_path))
    name = "wmt14_ende"
    settings = published.smoke_settings(read_settings(smoke.RECIPES / name / "data.yaml"))
    made = {classes_file(number) for pieces in settings.pieces.values() for number in pieces.classes}
    assert made == {classes_file(CLASSES)}
    configs = smoke.RECIPES / name / "configs"
    taking = [row for row in row_names(configs) if "classes" in read_row(configs, row).embedding]
    assert taking
    for row_name in taking:
        _, row, _ = published.parse(Recipe(name), "usage", [row_name, SMOKE])
        assert row.embedding["classes"] in made and row.embedding["num_classes"] == CLASSES
        _, row, _ = published.parse(Recipe(name), "usage", [row_name])
        assert row == read_row(configs, row_name)


def test_quickstart_is_short_where_nothing_else_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RUNS", str(tmp_path))
    asked = quickstart.parse([SMOKE])
    assert asked.output == tmp_path / "quickstart" / "smoke" and asked.rows == "standard,funnel"
    assert asked.steps == 20 and asked.train < 1000
    assert quickstart.parse([SMOKE, "--steps", "3"]).steps == 3
    usual = quickstart.parse([])
    assert usual.output == tmp_path / "quickstart" and usual.steps is usual.rows is None


# Rows and texts


@pytest.mark.parametrize("name", WITH_ROWS)
def test_every_row_keeps_its_method_and_fits_a_small_vocabulary(name: str) -> None:
    for row_name in row_names(smoke.RECIPES / name / "configs"):
        before, after = any_row(name, row_name), small(any_row(name, row_name))
        width = after.train.get("embedding_dim") or after.train["word_vec_size"]
        old, embedding = before.embedding, after.embedding
        assert embedding.keys() == old.keys() and embedding["method"] == old["method"]
        options = {key: se.STORED if key in se.file_options(old["method"]) else value
                   for key, value in embedding.items() if key != "method"}  # fmt: skip
        count = se.expected_count(
            embedding["method"], num_embeddings=WORDS // 2, embedding_dim=width, **options
        )
        assert 0 < count
        for start, real in ((after.fit, before.fit), (after.distill, before.distill)):
            fitted = real is not None and real.get("embedding_start") != "random"
            assert start == ({**real, "fit_steps": FIT_STEPS} if real is not None and fitted else real)
        if "cutoffs" in old:
            assert len(embedding["cutoffs"]) == len(old["cutoffs"])
        assert embedding.get("num_classes", CLASSES) == CLASSES


def test_generated_words_are_seeded_different_and_many() -> None:
    words = generated_vocabulary()
    assert len(words) == len(set(words)) == WORDS
    lines = list(generated_words(300, seed=1))
    assert lines == list(generated_words(300, seed=1)) != list(generated_words(300, seed=2))
    assert {word for line in lines for word in line} <= set(words) and {len(line) for line in lines} <= {
        *range(3, 16)
    }


@pytest.mark.parametrize("dataset", sorted(SOURCES))
def test_generated_corpora_have_the_layout_of_the_real_ones(dataset: str, tmp_path: Path) -> None:
    texts = write_smoke_corpus(dataset, tmp_path / "raw")
    assert {split: path.name for split, path in texts.items()} == SOURCES[dataset].files
    lines = texts["train"].read_text().splitlines()
    if dataset == "ptb":
        assert all(line.startswith(" <unk> ") and line.endswith(" N ") for line in lines)
    else:
        assert lines[0] == lines[2] == " " and re.fullmatch(r" = [A-Z].* = ", lines[1])
        assert re.fullmatch(r" [A-Z].* \. .* @\.@ 5 <unk> ", lines[3])
    made = prepare({split: [path] for split, path in texts.items()}, tmp_path / "data")
    assert made["types"] > WORDS // 2 and made["unknown"]["train"] > 0
