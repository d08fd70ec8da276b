"""A recipe's configurations: settings common to all rows, and rows that differ only in their embedding.

``configs/common.yaml`` holds ``average`` (how many checkpoints), ``train`` (options of ``onmt_train``) and
``translate`` (options of ``onmt_translate``). ``configs/ROW.yaml`` holds ``embedding``. Any row may hold
``train``, ``translate`` and ``average`` of its own, ``paper`` with the figures that it stands for, and
``data`` and ``batch``, as `recipes.published` explains them. A row that starts from another one holds one of

- ``distill``: ``teacher``, the name of that row, and what else the option ``embedding_distillation`` of
  ``onmt_train`` takes;
- ``fit``: ``teacher``, the name of that row, whose embedding is replaced by one that is fitted to it, and
  perhaps ``fit_steps``, of methods that are fitted by gradient descent. The row is not trained.

``like: ROW`` takes from that row what this one does not say itself; a row that is fitted takes no training.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from recipes.common.errors import UserError
from shared_embeddings.utils.reading import read_yaml

COMMON = "common"


@dataclass(frozen=True)
class Row:
    """One row of the recipe's table, merged with what is common to all.

    Attributes:
        name: of its file.
        embedding: options of the embedding.
        average: how many checkpoints are averaged.
        train: options of ``onmt_train``.
        translate: options of ``onmt_translate``.
        distill: the row that it starts from and how, or ``None``.
        fit: the row that it is fitted to without being trained, or ``None``.
        paper: what the paper reports for it, or ``None``.
        data: which of the prepared data it takes, or ``None`` where there is one kind only.
        batch: how large its batches are whatever the number of GPUs, or ``None``.
    """

    name: str
    embedding: dict[str, Any]
    average: int
    train: dict[str, Any]
    translate: dict[str, Any]
    distill: dict[str, Any] | None = None
    fit: dict[str, Any] | None = None
    paper: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    batch: dict[str, Any] | None = None


def row_names(configs: Path) -> list[str]:
    """Names of the rows in the folder `configs`."""
    return sorted(path.stem for path in configs.glob("*.yaml") if not is_common(path))


def is_common(path: Path) -> bool:
    """Whether a configuration file holds what several rows have in common."""
    return path.stem == COMMON or path.stem.startswith(f"{COMMON}_")


def read_row(configs: Path, name: str) -> Row:
    """Merge ``common.yaml`` and the file of the row `name`.

    Raises:
        UserError: no such row, a key too many or too few, a value of another type, or a teacher that is no
            other row.
    """
    names = row_names(configs)
    if name not in names:
        raise UserError(f"no config {name!r}; there are: {', '.join(names)}")
    common = _read(configs / f"{COMMON}.yaml", {"average": int, "train": dict, "translate": dict})
    row = _read(
        configs / f"{name}.yaml",
        {"embedding": dict},
        {"average": int, "batch": dict, "data": dict, "translate": dict}
        | {"distill": dict, "fit": dict, "paper": dict, "train": dict},
    )
    if common["average"] < 1:
        raise UserError(f"{configs / COMMON}.yaml: average is {common['average']}; it must be at least 1")
    check_start(configs, name, row)
    merged = {part: {**common[part], **row.get(part, {})} for part in ("train", "translate")}
    return Row(name=name, **{**common, **row, **merged})


def check_start(configs: Path, name: str, row: dict[str, Any]) -> None:
    """Refuse a row `name` that starts from no other row in the folder `configs`, or in two ways.

    Args:
        row: what its file says, with what it is like.

    Raises:
        UserError: names the rows that there are.
    """
    path = configs / f"{name}.yaml"
    if "fit" in row:
        for other in ("distill", "train"):
            if other in row:
                raise UserError(f"{path}: {other} has no effect on a row that is only fitted; remove it")
        for key in row["fit"].keys() - {"teacher", "fit_steps"}:
            raise UserError(f"{path}: fit: unknown key {key!r}; it may hold teacher and fit_steps")
    others = [other for other in row_names(configs) if other != name]
    for way in ("distill", "fit"):
        teacher = row.get(way, {}).get("teacher")
        if way in row and teacher not in others:
            raise UserError(f"{path}: {way}: teacher is {teacher!r}; it must be one of {', '.join(others)}")


def distillation_options(distill: dict[str, Any], model: Path) -> dict[str, Any]:
    """What a row's ``distill`` adds to the options of training, with the teacher's trained `model`."""
    return {"embedding_distillation": {**distill, "teacher": str(model)}}


def read_content(path: Path) -> Any:
    """What the file of a row says, completed by the row that it is `like`.

    Raises:
        UserError: a file cannot be read or is not YAML, or there is no row to be like.
    """
    content = read_yaml(path)
    if not isinstance(content, dict) or "like" not in content:
        return content
    other = path.with_name(f"{content.pop('like')}.yaml")
    if other == path or is_common(other) or not other.exists():
        raise UserError(f"{path}: like is {other.stem!r}; it must be another row: {other} is none")
    base = read_yaml(other)
    if not isinstance(base, dict) or "like" in base:
        raise UserError(f"{path}: like is {other.stem!r}, which is like another row; name that one")
    left_out = ("distill", "train") if "fit" in content else ()
    return {**{key: value for key, value in base.items() if key not in left_out}, **content}


def _read(path: Path, wanted: dict[str, type], optional: dict[str, type] | None = None) -> dict[str, Any]:
    """A YAML file with the keys of `wanted` and perhaps those of `optional`, and values of their types."""
    known = {**wanted, **(optional or {})}
    content = read_content(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: it must hold {', '.join(wanted)}")
    for key in content:
        if key not in known:
            raise UserError(f"{path}: unknown key {key!r}; it may hold {', '.join(known)}")
    for key, kind in known.items():
        if key not in wanted and key not in content:
            continue
        if type(content.get(key)) is not kind:
            raise UserError(f"{path}: {key} is {content.get(key)!r}; it must be of type {kind.__name__}")
    return content


def write_yaml(content: dict[str, Any]) -> str:
    """`content` as YAML, in its own order."""
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
