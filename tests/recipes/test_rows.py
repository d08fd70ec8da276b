"""Rows of recipes, steps that run once, and texts that are cleaned or rejected."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import yaml

from recipes.common import tools
from recipes.common.recipe import (
    KINDS,
    RECIPES,
    Recipe,
    Row,
    find_recipe,
    read_file,
    recipe_names,
    run_step,
)
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{train: {}}", "embedding"),
        ("{embedding: {}, embeding: {}}", "embeding"),
        ("{embedding: funnel}", "funnel"),
        ("{embedding: {}, average: true}", "average"),
    ],
)
def test_invalid_rows_are_named(folder: Path, change: str, message: str) -> None:
    (folder / "rows.yaml").write_text(FILE.replace("  away:", f"  row: {change}\n  away:"))
    with pytest.raises(UserError, match=message):
        Recipe(folder).rows  # noqa: B018


def test_unknown_rows_and_recipes(folder: Path) -> None:
    with pytest.raises(UserError, match="recipe has no row 'common'; there are: standard, funnel, "):
        Recipe(folder).row("common")
    with pytest.raises(UserError, match="no recipe 'common'; there are: agnews_headline, "):
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
    others = "".join((RECIPES / each / "rows.yaml").read_text() for each in recipe_names())
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


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(b"a line\n" * 100, mtime=0)[:-10],
        b"plain text\n",
        gzip.compress("Männer\n".encode("latin-1"), mtime=0),
    ],
)
def test_unreadable_text_fails(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "text.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match="text.gz"):
        tools.read_lines(path)
