"""Rows of recipes, steps that run once, texts, ``python -m recipes run``, and ``--smoke``."""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import shared_embeddings as se
from lm.data.corpus import prepare
from lm.data.datasets import SOURCES
from recipes import run
from recipes.__main__ import main
from recipes.common import tools
from recipes.common.recipe import (
    KINDS,
    RECIPES,
    Recipe,
    Row,
    find_recipe,
    parse_row,
    read_file,
    recipe_names,
    run_step,
)
from recipes.common.results import write_result
from recipes.common.tools import (
    CLASSES,
    FIT_STEPS,
    SMOKE,
    WORDS,
    run_main,
)
from recipes.language_model import write_smoke_corpus
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_text

FILE = """
kind: language_model
groups:
  common: {average: 2, train: {seed: 7, steps: 100}, translate: {beam_size: 4}, hardware: one GPU}
  small: {extends: common, data: {folder: few}, train: {steps: 2}, finetune: {optimizer: ntasgd}}
  far: {extends: other/common, train: {steps: 3}}
variants:
  distilled: {distill: {teacher: standard, alpha: 0.1}, train: {steps: 9}, average: 5}
  fitted: {fit: {teacher: standard}}
rows:
  standard: {embedding: {method: standard}}
  funnel:
    note: A note.
    embedding: {method: funnel, rank: 2}
    train: {steps: 50}
    variants: [distilled, fitted]
  tiny: {group: small, embedding: {method: uncle, classes: data/c.npz}}
  away: {group: far, embedding: {method: standard}}
tables:
- paper: P
  table: Table 1
  title: models
  hardware: two GPUs
  rows:
  - {row: A, name: table1_a, figures: {perplexity: 60.90}, embedding: {method: standard}, train: {steps: 5}}
  - {row: B, reason: not trained here}
- paper: P
  table: Table 2
  title: sizes
  rows:
  - {row: A, same: table1_a, figures: [perplexity, {total: 24.2}]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (
        ("other", "kind: translation\ngroups: {common: {train: {seed: 1, steps: 10}}}\n"),
        ("recipe", FILE),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.yaml").write_text(text)
    return tmp_path / "recipe"


def test_rows_have_the_settings_of_their_groups_and_papers(folder: Path) -> None:
    rows = Recipe(folder).rows
    assert rows["standard"] == Row(
        name="standard",
        embedding={"method": "standard"},
        train={"seed": 7, "steps": 100},
        average=2,
        translate={"beam_size": 4},
    )
    assert rows["away"].train == {"seed": 1, "steps": 3}
    tiny = rows["tiny"]
    assert tiny.train == {"seed": 7, "steps": 2} and tiny.data == {"folder": "few"}
    assert tiny.finetune == {"seed": 7, "steps": 2, "optimizer": "ntasgd"}
    assert tiny.settings()["data"] == {"folder": "few"} and "paper" not in tiny.settings()
    figures = {"perplexity": 60.9, "total": 24.2}
    assert rows["table1_a"].paper == {"source": "P, Table 1: A", "hardware": "two GPUs", **figures}


def test_variants_start_from_the_embedding_of_their_row(folder: Path) -> None:
    rows = Recipe(folder).rows
    assert list(rows)[:4] == ["standard", "funnel", "funnel_distilled", "funnel_fitted"]
    assert rows["funnel"].train["steps"] == 50 and rows["funnel"].teacher is None
    distilled, fitted = rows["funnel_distilled"], rows["funnel_fitted"]
    assert distilled.embedding == fitted.embedding == {"method": "funnel", "rank": 2}
    assert distilled.train == {"seed": 7, "steps": 9} and distilled.average == 5
    assert distilled.distill == {"teacher": "standard", "alpha": 0.1}
    assert fitted.fit == {"teacher": "standard"} and fitted.distill is None
    assert fitted.train == {"seed": 7, "steps": 100} and fitted.teacher == "standard"


def test_seeds_are_rows_that_differ_in_their_seed_only(folder: Path) -> None:
    path = folder / "rows.yaml"
    content = yaml.safe_load(path.read_text())
    content["rows"]["funnel"]["seeds"] = [2, 3]
    path.write_text(yaml.safe_dump(content))
    rows = Recipe(folder).rows
    first, second = rows["funnel"], rows["funnel_seed2"]
    assert second.train == {**first.train, "seed": 2} and "funnel_seed3" in rows
    assert {**first.settings(), "train": None} == {**second.settings(), "train": None}


def test_invalid_rows_are_named(folder: Path) -> None:
    (folder / "rows.yaml").write_text(FILE.replace("  away:", "  x: {embedding: {}, embeding: {}}\n  away:"))
    with pytest.raises(UserError, match="embeding"):
        Recipe(folder).rows  # noqa: B018


def test_unknown_rows_and_recipes(folder: Path) -> None:
    with pytest.raises(UserError, match="recipe has no row 'common'; there are: standard, funnel, "):
        Recipe(folder).row("common")
    with pytest.raises(UserError, match="no recipe 'common'; there are: debian_headline, "):
        find_recipe("common")


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_have_the_steps_of_their_scripts_and_use_their_groups(name: str) -> None:
    recipe, content = find_recipe(name), read_file(RECIPES / name / "rows.yaml")
    scripts = sorted(path.stem for path in recipe.folder.glob("*.sh"))
    for step in scripts:
        assert step in KINDS[content["kind"]]
        text = (recipe.folder / f"{step}.sh").read_text()
        assert f'-m recipes {name} {step} "$@"\n' in text
    with pytest.raises(UserError, match=f"{name} has no step 'fly'; it has (run|pre)"):
        run_step(recipe, "fly", [])
    text = yaml.safe_dump({key: value for key, value in content.items() if key not in ("groups", "variants")})
    others = "".join((RECIPES / recipe / "rows.yaml").read_text() for recipe in recipe_names())
    for group in content.get("groups", {}):
        extended = f"extends: {group}" in others or f"extends: {name}/{group}" in others
        assert group == "common" or extended or f"group: {group}\n" in text
    assert all(f"- {variant}\n" in text for variant in content.get("variants", {}))


class Steps:
    """A step from one input to one output that counts how often it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs, self.interrupted = folder, 0, False
        self.source, self.target = folder / "in", folder / "out"
        self.source.write_text("a")

    def make(self) -> None:
        self.runs += 1
        write_text(self.target, self.source.read_text())
        if self.interrupted:
            raise KeyboardInterrupt

    def run(self, size: int = 1) -> int:
        settings = {"size": size, "pair": ("x", "y")}
        tools.run_step(self.folder / "stamps", "step", [self.source], [self.target], self.make, **settings)
        return self.runs


def test_step_runs_again_only_after_changes_and_interruptions(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    assert [steps.run(), steps.run()] == [1, 1]
    assert [steps.run(size=2), steps.run(size=2)] == [2, 2]
    steps.source.write_text("b")
    assert [steps.run(size=2), steps.run(size=2)] == [3, 3]
    steps.target.write_text("damaged")
    assert steps.run(size=2) == 4
    (tmp_path / "stamps" / "step.json").write_text("{")
    assert steps.run(size=2) == 5
    steps.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        steps.run(size=3)
    steps.interrupted = False
    assert steps.run(size=3) == 7


def test_only_line_feeds_end_lines_and_whitespace_is_normalized(tmp_path: Path) -> None:
    path = tmp_path / "text.gz"
    text = "\ufeffa\u00a0b  c \r\n\n d\u2028e\u2003f\x85\nlast"
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    assert tools.read_lines(path) == ["a b c", "", "d e f", "last"]


NAMES = recipe_names()
LANGUAGE_MODELS = ("ptb_awd_lstm", "wikitext2_awd_lstm", "wikitext103_lstm", "wikitext103_transformer_xl")
TRANSLATION = ("iwslt_pten", "wmt14_ende", "wmt14_enfr")
RECIPE = find_recipe("quickstart")
WITH_ROWS = [name for name in NAMES if find_recipe(name).rows and name != "quickstart"]

# Which recipes and rows


def test_every_folder_with_scripts_and_a_readme_is_a_recipe(tmp_path: Path) -> None:
    expected = {*LANGUAGE_MODELS, *TRANSLATION, "multi30k_ende", "glove_reconstruction", "quickstart"}
    assert expected <= set(NAMES) and not {"common", "translation"} & set(NAMES)
    for file in ("new/README.md", "new/train.sh", "common/a.sh", "message/README.md"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    assert recipe_names(tmp_path) == ["new"]
    with pytest.raises(UserError, match="no recipe 'message'; there are: new"):
        find_recipe("message", tmp_path)


@pytest.mark.parametrize("name", WITH_ROWS)
def test_rows_that_start_from_another_come_after_it(name: str) -> None:
    rows = find_recipe(name).rows
    ordered = [rows[row_name] for row_name in run.rows_to_run(find_recipe(name))]
    assert len(ordered) == len({row.name for row in ordered})
    assert ordered[0].embedding["method"] != "standard" and ordered[0].teacher is None
    for number, row in enumerate(ordered):
        assert row.teacher is None or row.teacher in [earlier.name for earlier in ordered[:number]]
    for way in ("fit", "distill"):
        assert any(getattr(row, way) for row in ordered) == any(getattr(row, way) for row in rows.values())
    if name == "multi30k_ende":  # rows share a teacher
        names = [row.name for row in ordered]
        assert names.count("standard_fp32") == 1 and "standard" not in names


def test_scripts_run_in_order_with_rows(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run.rows_to_run(find_recipe("ptb_awd_lstm"))
    for name, wanted in (
        ("ptb_awd_lstm", [["preprocess.sh"], *([s, row] for row in rows for s in ("train.sh", "eval.sh"))]),
        ("glove_reconstruction", [["preprocess.sh"], ["train.sh"], ["eval.sh"]]),
        ("quickstart", [["run.sh"]]),
    ):
        assert run.commands(find_recipe(name)) == [[*command, SMOKE] for command in wanted]
    run.smoke(["--list", "glove_reconstruction", "wmt14_enfr", "quickstart"])  # the longest first
    assert capsys.readouterr().out == "quickstart\nwmt14_enfr\nglove_reconstruction\n"


@pytest.mark.parametrize("name", NAMES)
def test_scripts_and_readme_describe_the_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert SMOKE in (RECIPES / name / "README.md").read_text(encoding="utf-8")
    recipe = find_recipe(name)
    for step in sorted({Path(script).stem for script, *_ in run.commands(recipe)}):
        with pytest.raises(SystemExit) as ended:
            run_step(recipe, step, ["--help"])
        assert ended.value.code == 0 and SMOKE in capsys.readouterr().out, step


# Reports


def recipe(folder: Path, **scripts: str) -> Recipe:
    """A recipe without rows with the given scripts; the others do nothing."""
    folder.mkdir()
    for name in ("preprocess", "train", "eval"):
        path = folder / f"{name}.sh"
        path.write_text(f"#!/bin/sh\nset -e\n{scripts.get(name, '')}\n")
        path.chmod(0o755)
    return Recipe(folder)


RECORD = '{"row": "%s", "config": {}, "counts": {}, "metrics": {}, "data_checksum": ""}'
RESULTS = f"mkdir -p $RUNS/small/smoke; echo '{RECORD % 'x'}' > $RUNS/small/smoke/results.jsonl"


@pytest.mark.parametrize(
    ("scripts", "fault"),
    [
        ({"eval": RESULTS}, None),
        ({"train": "echo first; echo no option $1 >&2; exit 2"},
         "train.sh --smoke failed with status 2:\nfirst\nno option --smoke"),
        ({}, "wrote no results.jsonl to its folder smoke"),
        ({"eval": f"{RESULTS}; mkdir $RUNS/small/data"},
         "wrote data outside of its folder smoke"),
        ({"preprocess": "test -z $DATA_DIR", "eval": RESULTS}, None),
        ({"preprocess": "exit 3", "train": "touch $RUNS/trained", "eval": RESULTS},
         "preprocess.sh --smoke failed with status 3:"),
    ],
)  # fmt: skip
def test_the_failure_is_described(
    scripts: dict[str, str], fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    runs = tmp_path / "runs"
    runs.mkdir()
    assert run.run_recipe(recipe(tmp_path / "small", **scripts), runs) == fault
    assert not (runs / "trained").exists()


def test_command_exits_with_1_and_names_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "LONGEST_SECONDS", 2)
    recipes = [recipe(tmp_path / "small", eval=RESULTS), recipe(tmp_path / "other", preprocess="sleep 20")]
    monkeypatch.setattr(run, "recipe_names", lambda: ["small", "other"])
    monkeypatch.setattr(run, "find_recipe", {recipe.name: recipe for recipe in recipes}.get)
    with pytest.raises(SystemExit) as ended:
        run.smoke([])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert 'RECIPES="other"' in out and "preprocess.sh --smoke did not finish in 2 seconds" in out
    assert re.search(r"^small +\d+ s  ok$", out, re.MULTILINE)
    run.smoke(["small"])


# Separate runs


def test_option_selects_recipes_with_their_own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS", str(tmp_path))
    real = find_recipe("multi30k_ende")
    recipe, row, options = parse_row(real, "usage", ["uncle_4x", "-seed", "3", SMOKE])
    assert recipe == real.smoke() and options == ["-seed", "3"] and row.train["train_steps"] == 4
    assert recipe.home == real.home / "smoke" and recipe.name == real.name
    recipe, row, options = parse_row(real, "usage", ["uncle_4x", "-seed", "3"])
    assert recipe == real and row == real.row("uncle_4x")


@pytest.mark.parametrize(
    ("name", "row_name"),
    [
        ("ptb_awd_lstm", "small_funnel_fitted"),
        ("multi30k_ende", "funnel_4x_distilled"),
        ("iwslt_pten", "distilled_table3_distilled"),
    ],
)
def test_missing_data_and_then_a_missing_teacher_are_reported_with_the_command(
    name: str,
    row_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command has --smoke only if requested."""
    monkeypatch.setenv("RUNS", str(tmp_path))
    teacher = find_recipe(name).row(row_name).teacher

    def error_of(options: list[str]) -> str:
        assert run_main("train", main, [name, "train", row_name, *options]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    for options, folder in (([SMOKE], tmp_path / name / "smoke"), ([], tmp_path / name)):
        error = error_of(options)
        pieces = ["spm32k"] if name in TRANSLATION else []
        assert error.endswith(" ".join(["", f"recipes/{name}/preprocess.sh", *pieces, *options]) + "\n")
        data = folder.joinpath("data", *pieces)
        data.mkdir(parents=True)
        (data / "data.json").write_text('{"source": "a", "target": "b", "checksum": "c", "vocabulary": 3}')
        error = error_of(options)
        assert f"{row_name} starts from {teacher}" in error
        assert error.endswith(" ".join(["", f"recipes/{name}/train.sh", str(teacher), *options]) + "\n")


# Rows and texts


@pytest.mark.parametrize("name", WITH_ROWS)
def test_every_row_keeps_its_method_and_fits_a_small_vocabulary(name: str) -> None:
    recipe = find_recipe(name)
    small = recipe.smoke().rows
    for before in recipe.rows.values():
        after = small[before.name]
        width = after.train.get("embedding_dim") or after.train["word_vec_size"]
        old, embedding = before.embedding, after.embedding
        assert embedding.keys() == old.keys() and embedding["method"] == old["method"]
        options = {key: se.STORED if key in se.get_method_config(old["method"]).file_options else value
                   for key, value in embedding.items() if key != "method"}  # fmt: skip
        count = se.num_parameters(
            embedding["method"], num_embeddings=WORDS // 2, embedding_dim=width, **options
        )
        assert 0 < count
        for start, real in ((after.fit, before.fit), (after.distill, before.distill)):
            fitted = real is not None and real.get("embedding_start") != "random"
            less = dict.fromkeys({"recover_steps"} & (real or {}).keys(), FIT_STEPS)
            assert start == ({**real, **less, "fit_steps": FIT_STEPS} if real and fitted else real)
        if "cutoffs" in old:
            assert len(embedding["cutoffs"]) == len(old["cutoffs"])
        assert embedding.get("num_classes", CLASSES) == CLASSES


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


class Processes:
    """Replaces the steps: they end at the second look; an evaluation writes a result."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: str = "") -> None:
        self.started: list[tuple[str, str]] = []
        self.failing = failing
        self.now = self.most = 0
        # Not `subprocess.Popen`: results ask git for the commit.
        monkeypatch.setattr(run, "subprocess", SimpleNamespace(Popen=self.start, STDOUT=None))

    def start(self, command: list[str], **_: Any) -> Any:
        *_, recipe, step, row = command
        self.started.append((step, row))
        self.now += 1
        self.most = max(self.most, self.now)
        if step == "eval":
            metrics = {"bleu": 30.0}
            home = find_recipe(recipe).home
            write_result(home, row, config={}, counts={}, metrics=metrics, data_checksum="c")
        looks: list[int] = []

        def poll() -> int | None:
            looks.append(1)
            self.now -= len(looks) == 2
            return int(row == self.failing) if len(looks) > 1 else None

        return SimpleNamespace(poll=poll, returncode=int(row == self.failing), pid=-1)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RUNS", str(tmp_path))
    monkeypatch.setattr(run.time, "sleep", lambda _: None)
    return lambda *arguments: run_main("run", main, ["run", "multi30k_ende", *arguments])


def test_teachers_are_trained_first_and_results_are_kept(command: Any, monkeypatch, capsys) -> None:
    processes = Processes(monkeypatch)
    assert command("funnel_4x_distilled", "projective_*_fitted", "--jobs", "2") == 0
    order = processes.started
    assert order[0] == ("train", "standard") and processes.most == 2
    assert order.count(("train", "standard")) == 1 and len(order) == 8
    assert order.index(("eval", "standard")) < order.index(("train", "funnel_4x_distilled"))
    printed = capsys.readouterr().out
    assert "standard: bleu 30.0" in printed and "4 of 4 rows done" in printed
    assert command("funnel_4x_distilled", "funnel_4x") == 0
    assert order[8:] == [("train", "funnel_4x"), ("eval", "funnel_4x")]


def test_rows_of_a_failed_teacher_do_not_start(command: Any, monkeypatch, capsys) -> None:
    processes = Processes(monkeypatch, failing="standard")
    assert command("funnel_4x", "funnel_4x_distilled") == 2
    assert [row for _, row in processes.started] == ["funnel_4x", "funnel_4x", "standard"]
    printed = capsys.readouterr()
    assert "standard: train failed" in printed.out
    assert "standard, funnel_4x_distilled" in printed.err


@pytest.mark.parametrize(
    "arguments", [["nothing_*"], ["funnel_4x", "nothing_*"], ["funnel_4x", "--minutes", "0"]]
)
def test_unknown_rows_and_no_time_start_nothing(
    command: Any, arguments: list[str], monkeypatch, capsys
) -> None:
    processes = Processes(monkeypatch)
    assert command(*arguments) == 2 and processes.started == []
    message = capsys.readouterr().err
    assert "nothing_*" in message or "run the same command again" in message


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_stop_rows(command: Any, number: int, status: int, monkeypatch) -> None:
    started = []

    def start(_: list[str], **__: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        return started[-1]

    replaced = SimpleNamespace(Popen=start, STDOUT=None, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(run, "subprocess", replaced)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: os.kill(os.getpid(), number))
    monkeypatch.setattr(run, "time", clock)
    try:
        assert command("funnel_4x", "projective_4x", "--jobs", "2") == status
        assert [process.wait(10) for process in started] == [-signal.SIGTERM] * 2
    finally:
        for process in started:
            process.kill()
