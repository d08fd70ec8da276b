"""``rows.yaml``: what a row takes from its group, its variants and its paper, and which files are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from recipes.common.recipe import RECIPES, Recipe, find_recipe, recipe_names, step_module
from recipes.common.rows import Row, read_file, read_rows
from recipes.papers.tables import read_papers
from shared_embeddings.errors import UserError

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
    start: {embedding: {method: funnel, rank: 3}, train: {steps: 8}}
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
    other = tmp_path / "other"
    other.mkdir()
    (other / "rows.yaml").write_text("kind: translation\ngroups: {common: {train: {seed: 1, steps: 10}}}\n")
    made = tmp_path / "recipe"
    made.mkdir()
    (made / "rows.yaml").write_text(FILE)
    return made


def test_rows_have_the_settings_of_their_groups(folder: Path) -> None:
    rows = read_rows(folder)
    assert rows["standard"] == Row(
        "standard", {"method": "standard"}, {"seed": 7, "steps": 100}, 2, {"beam_size": 4}
    )
    assert rows["away"].train == {"seed": 1, "steps": 3}
    tiny = rows["tiny"]
    assert tiny.train == {"seed": 7, "steps": 2} and tiny.data == {"folder": "few"}
    assert tiny.finetune == {"seed": 7, "steps": 2, "optimizer": "ntasgd"}
    assert tiny.settings()["data"] == {"folder": "few"} and "paper" not in tiny.settings()


def test_variants_start_from_the_embedding_of_their_row(folder: Path) -> None:
    rows = read_rows(folder)
    assert list(rows)[:4] == ["standard", "funnel", "funnel_distilled", "funnel_fitted"]
    assert rows["funnel"].train["steps"] == 50 and rows["funnel"].teacher is None
    distilled, fitted = rows["funnel_distilled"], rows["funnel_fitted"]
    assert distilled.embedding == fitted.embedding == {"method": "funnel", "rank": 3}
    assert distilled.train == {"seed": 7, "steps": 8} and distilled.average == 5
    assert distilled.distill == {"teacher": "standard", "alpha": 0.1}
    assert fitted.fit == {"teacher": "standard"} and fitted.distill is None
    assert fitted.train == {"seed": 7, "steps": 100} and fitted.teacher == "standard"


def test_rows_of_papers_have_their_figures(folder: Path) -> None:
    assert read_rows(folder)["table1_a"].paper == {
        "source": "P, Table 1: A",
        "hardware": "two GPUs",
        "perplexity": 60.9,
        "total": 24.2,
    }
    assert read_rows(folder)["standard"].paper is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{train: {}}", "row: it must contain embedding"),
        ("{embedding: {}, embeding: {}}", "row: unknown key 'embeding'"),
        ("{embedding: funnel}", "row: embedding is 'funnel'; it must be of type dict"),
        ("{embedding: {}, train: 3}", "row: train is 3; it must be of type dict"),
        ("{embedding: {}, average: true}", "row: average is True; it must be of type int"),
        ("{embedding: {}, average: 0}", "row: average is 0; it must be at least 1"),
        ("{embedding: {}, group: big}", "row: no group 'big'; there are: common, small, far"),
        ("{embedding: {}, variants: [halved]}", "row: no variant 'halved'; there are: distilled, fitted"),
        ("{embedding: {}, start: {note: x}}", "row: start: unknown key 'note'"),
        ("{embedding: {}, distill: {alpha: 0}}", "row: distill: teacher is missing"),
        (
            "{embedding: {}, distill: {teacher: row}}",
            "row: teacher is 'row'; it must be one of standard, fun",
        ),
        ("{embedding: {}, fit: {teacher: none}}", "row: teacher is 'none'"),
        ("{embedding: {}, fit: {teacher: standard, alpha: 0}}", "row: fit: unknown key 'alpha'"),
        ("{embedding: {}, fit: {teacher: standard}, train: {}}", "train has no effect on a fitted row"),
        ("{", "cannot be read as YAML"),
    ],
)
def test_wrong_rows_are_named(folder: Path, row: str, message: str) -> None:
    text = FILE.replace("  away:", f"  row: {row}\n  away:")
    (folder / "rows.yaml").write_text(text)
    with pytest.raises(UserError, match=message.replace("{", "[{]")):
        read_rows(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("kind:", "kinds:"), "unknown key 'kinds'; expected kind, groups"),
        (("extends: common", "average: x"), "groups: small: average is 'x'"),
        (("  tiny:", "  funnel_fitted:"), "two rows called funnel_fitted; rename one"),
    ],
)
def test_wrong_files_are_named(folder: Path, change: tuple[str, str], message: str) -> None:
    (folder / "rows.yaml").write_text(FILE.replace(*change))
    with pytest.raises(UserError, match=message):
        read_rows(folder)


def test_a_row_that_is_not_there_and_a_recipe_that_is_not_there(folder: Path) -> None:
    with pytest.raises(UserError, match="recipe has no row 'common'; there are: standard, funnel, "):
        Recipe(folder).row("common")
    with pytest.raises(UserError, match="no recipe 'common'; there are: agnews_headline, "):
        find_recipe("common")


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_has_the_steps_of_its_scripts(name: str) -> None:
    recipe = find_recipe(name)
    scripts = sorted(path.stem for path in recipe.folder.glob("*.sh"))
    for step in scripts:
        module = step_module(recipe, step)
        text = (recipe.folder / f"{step}.sh").read_text()
        assert module.startswith("recipes.") and f'-m recipes {name} {step} "$@"\n' in text
    with pytest.raises(
        UserError, match=f"{name} has no step 'fly'; it has {'run' if scripts == ['run'] else 'pre'}"
    ):
        step_module(recipe, "fly")


@pytest.mark.parametrize("name", recipe_names())
def test_a_variant_or_note_for_everything_is_used(name: str) -> None:
    """No group and no variant of a recipe is without rows."""
    content = read_file(RECIPES / name / "rows.yaml")
    text = yaml.safe_dump({key: value for key, value in content.items() if key not in ("groups", "variants")})
    others = "".join((RECIPES / each / "rows.yaml").read_text() for each in recipe_names())
    for group, settings in content.get("groups", {}).items():
        extended = f"extends: {group}" in others or f"extends: {name}/{group}" in others
        assert group == "common" or extended or f"group: {group}\n" in text, settings
    for variant in content.get("variants", {}):
        assert f"- {variant}\n" in text


def test_rows_of_papers_are_in_the_list_of_papers() -> None:
    listed = {cell.trained_by for paper in read_papers() for table in paper.tables for cell in table.cells}
    for name in recipe_names():
        for row in find_recipe(name).rows.values():
            assert (row.paper is not None) == (f"{name}/{row.name}" in listed)
