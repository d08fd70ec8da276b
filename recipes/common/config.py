"""A recipe's configurations: settings common to all rows, and rows that differ only in their embedding.

``configs/common.yaml`` holds ``average`` (how many checkpoints), ``train`` (options of ``onmt_train``) and
``translate`` (options of ``onmt_translate``). ``configs/ROW.yaml`` holds ``embedding`` and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from recipes.common.errors import UserError

COMMON = "common"


@dataclass(frozen=True)
class Row:
    """One row of the recipe's table, merged with what is common to all."""

    name: str
    embedding: dict[str, Any]
    average: int
    train: dict[str, Any]
    translate: dict[str, Any]


def row_names(configs: Path) -> list[str]:
    """Names of the rows in the folder `configs`."""
    return sorted(path.stem for path in configs.glob("*.yaml") if not is_common(path))


def is_common(path: Path) -> bool:
    """Whether a configuration file holds what several rows have in common."""
    return path.stem == COMMON or path.stem.startswith(f"{COMMON}_")


def read_row(configs: Path, name: str) -> Row:
    """Merge ``common.yaml`` and the file of the row `name`.

    Raises:
        UserError: no such row, a key too many or too few, or a value of another type.
    """
    if name not in row_names(configs):
        raise UserError(f"no config {name!r}; there are: {', '.join(row_names(configs))}")
    common = _read(configs / f"{COMMON}.yaml", {"average": int, "train": dict, "translate": dict})
    row = _read(configs / f"{name}.yaml", {"embedding": dict})
    if common["average"] < 1:
        raise UserError(f"{configs / COMMON}.yaml: average is {common['average']}; it must be at least 1")
    return Row(name=name, **row, **common)


def read_yaml(path: Path) -> Any:
    """The content of a YAML file.

    Raises:
        UserError: it cannot be read, or is not YAML.
    """
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML: {error}") from error


def _read(path: Path, wanted: dict[str, type]) -> dict[str, Any]:
    """A YAML file with exactly the keys of `wanted`, and values of their types."""
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: it must hold {', '.join(wanted)}")
    for key in content:
        if key not in wanted:
            raise UserError(f"{path}: unknown key {key!r}; it may hold {', '.join(wanted)}")
    for key, kind in wanted.items():
        if type(content.get(key)) is not kind:
            raise UserError(f"{path}: {key} is {content.get(key)!r}; it must be of type {kind.__name__}")
    return content


def write_yaml(content: dict[str, Any]) -> str:
    """`content` as YAML, in its own order."""
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
