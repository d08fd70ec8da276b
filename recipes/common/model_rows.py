"""The rows of a recipe for language models: where it keeps them, and what they say.

``configs/ROW.yaml`` holds ``embedding``, and where wanted

- ``common``: which file has the settings that rows have in common: ``small`` is
  ``configs/common_small.yaml``; without it, ``configs/common.yaml``;
- ``distill``: ``teacher``, the name of the row that it starts from, and what else the option
  ``embedding_distillation`` of ``lm_train`` takes;
- ``fit``: ``teacher``, the name of the row whose embedding is replaced by one that is fitted to it, without
  any training, and perhaps ``fit_steps``, of methods that are fitted by gradient descent;
- ``train``: options of ``lm_train`` that differ from the common ones;
- ``finetune``: options of a second training from the best model of the first, where they differ from those;
- ``evaluate``: options of ``lm_eval``;
- ``paper``: what the paper reports, such as ``{perplexity: 57.3, source: Table 1}``.

``like: ROW`` takes from that row what this one does not say itself; a row that is fitted takes no training.
The common file may hold ``train``, ``finetune`` and ``evaluate``; the row goes before it. It may also say in
``data`` which folder below ``$RUNS/RECIPE`` has the prepared data; without it, that is ``data``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import shared_embeddings as se
from recipes.common.config import COMMON, check_start, read_content, row_names
from recipes.common.errors import UserError
from recipes.common.results import REPOSITORY

RECIPES = REPOSITORY / "recipes"
DATA = "data"
# What a row may hold beside the name of its common file.
_PARTS = ("embedding", "distill", "fit", "train", "finetune", "evaluate", "paper")


class Recipe(NamedTuple):
    """Where a recipe keeps its rows, its data and its runs.

    Attributes:
        folder: of the recipe; its name is the recipe's.
    """

    folder: Path

    @property
    def name(self) -> str:
        """What the recipe is called."""
        return self.folder.name

    @property
    def configs(self) -> Path:
        """Folder of the rows."""
        return self.folder / "configs"

    @property
    def home(self) -> Path:
        """Folder of everything that the recipe writes: ``$RUNS/RECIPE``."""
        return Path(os.environ.get("RUNS") or REPOSITORY / "runs").absolute() / self.name

    @property
    def data(self) -> Path:
        """Folder of the prepared data, for rows that name no other."""
        return self.home / DATA

    def command(self, script: str, *arguments: str) -> str:
        """The command line of one of its scripts, for a message that tells somebody to run it."""
        return " ".join([f"recipes/{self.name}/{script}", *arguments])


@dataclass(frozen=True)
class ModelRow:
    """One row of the recipe's table, merged with what it has in common with others.

    Attributes:
        name: of the row.
        data: folder of the prepared data, below the recipe's home.
        embedding: method and options, as they are written.
        train: options of ``lm_train`` but for data, folder and embedding.
        finetune: all options of the second training, likewise; None without one.
        evaluate: options of ``lm_eval``.
        paper: what the paper reports, or None.
        distill: the row that it starts from and how, or None.
        fit: the row that it is fitted to without being trained, or None.
    """

    name: str
    data: str
    embedding: dict[str, Any]
    train: dict[str, Any]
    finetune: dict[str, Any] | None
    evaluate: dict[str, Any]
    paper: dict[str, Any] | None
    distill: dict[str, Any] | None = None
    fit: dict[str, Any] | None = None


def read_model_row(recipe: Recipe, name: str) -> ModelRow:
    """Merge the file of the row `name` with the one that it has in common with others.

    Raises:
        UserError: no such row, a key too many or too few, a value of another type, or a teacher that is no
            other row.
    """
    if name not in row_names(recipe.configs):
        raise UserError(f"no config {name!r}; there are: {', '.join(row_names(recipe.configs))}")
    row = _read(
        recipe.configs / f"{name}.yaml",
        {"common": str, **dict.fromkeys(_PARTS, dict)},
        required="embedding",
    )
    check_start(recipe.configs, name, row)
    common_name = f"{COMMON}_{row['common']}" if "common" in row else COMMON
    common = _read(
        recipe.configs / f"{common_name}.yaml",
        {"data": str, "train": dict, "finetune": dict, "evaluate": dict},
        required="train",
    )
    train, finetune, evaluate = (
        {**common.get(key, {}), **row.get(key, {})} for key in ("train", "finetune", "evaluate")
    )
    has_second = "fit" not in row and any("finetune" in part for part in (common, row))
    return ModelRow(
        name=name,
        data=common.get("data", DATA),
        embedding=row["embedding"],
        train=train,
        finetune={**train, **finetune} if has_second else None,
        evaluate=evaluate,
        paper=row.get("paper"),
        distill=row.get("distill"),
        fit=row.get("fit"),
    )


def with_own_files(recipe: Recipe, embedding: dict[str, Any]) -> dict[str, Any]:
    """The options of an embedding, its files where preprocess.sh has put them: below the recipe's home."""
    method = embedding.get("method")
    names = se.file_options(method) if isinstance(method, str) and method in se.methods() else ()
    files = {name: str(recipe.home / embedding[name]) for name in names if name in embedding}
    return {**embedding, **files}


def _read(path: Path, kinds: dict[str, type], required: str) -> dict[str, Any]:
    """A YAML file with no keys but those of `kinds`, of these types, and with the `required` one."""
    content = read_content(path)
    if not isinstance(content, dict) or required not in content:
        raise UserError(f"{path}: it must hold {required}; add it")
    for key, value in content.items():
        if key not in kinds:
            raise UserError(f"{path}: unknown key {key!r}; it may hold {', '.join(kinds)}")
        if type(value) is not kinds[key]:
            raise UserError(f"{path}: {key} is {value!r}; it must be of type {kinds[key].__name__}")
    return content
