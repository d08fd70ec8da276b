"""``tables.yaml`` to the recipes' configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from recipes.common.config import COMMON
from recipes.common.errors import UserError
from recipes.common.results import REPOSITORY
from shared_embeddings.utils.reading import read_yaml

SOURCE = Path(__file__).with_name("tables.yaml")
ROW_KEYS = ("average", "batch", "data", "distill", "embedding", "train", "translate")
OWN_KEYS = ("name", "row", "bleu", "note")
MADE = "# Made from recipes/published/tables.yaml by python -m recipes.published; change it there."
WIDTH = 110


def read_tables() -> dict[str, Any]:
    """The content of ``tables.yaml``."""
    content: dict[str, Any] = read_yaml(SOURCE)
    return content


def config_files() -> dict[Path, str]:
    """The text of every configuration file, by its path.

    Raises:
        UserError: two rows have the same name, or a row holds an unknown key.
    """
    content = read_tables()
    files = {}
    for recipe, own in content["recipes"].items():
        files[_config(recipe, COMMON)] = _common_text(content["common"], own or {})
    for table in content["tables"]:
        for row in table["rows"]:
            path = _config(table["recipe"], config_name(table, row))
            if path in files:
                raise UserError(f"{SOURCE}: two rows make {path.name}; rename one of them")
            files[path] = _row_text(content["papers"][table["paper"]], table, row)
    return files


def config_name(table: dict[str, Any], row: dict[str, Any]) -> str:
    """Name of the configuration of a row."""
    return f"{table['prefix']}_{row['name']}"


def merged(table: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """What a row's configuration sets, with what all rows of its table share.

    Raises:
        UserError: an unknown key.
    """
    for key in row:
        if key not in (*ROW_KEYS, *OWN_KEYS):
            raise UserError(f"{SOURCE}: {config_name(table, row)}: unknown key {key!r}")
    shared = table.get("all", {})
    found = {}
    for key in ROW_KEYS:
        own, common = row.get(key), shared.get(key)
        if isinstance(own, dict) and isinstance(common, dict):
            found[key] = {**common, **own}
        elif own is not None or common is not None:
            found[key] = common if own is None else own
    return found


def _config(recipe: str, name: str) -> Path:
    """Path of a configuration file."""
    return REPOSITORY / "recipes" / recipe / "configs" / f"{name}.yaml"


def _common_text(common: dict[str, Any], own: dict[str, Any]) -> str:
    """The file of what all rows of a recipe have in common."""
    content = {
        "average": own.get("average", common["average"]),
        "train": {**common["train"], **own.get("train", {})},
        "translate": {**common["translate"], **own.get("translate", {})},
    }
    head = "# Settings of all rows: what a row does not say itself. train.sh fills in data and paths."
    notes = [line for note in common["notes"] for line in _comment(note)]
    return "\n".join([head, *notes, MADE, _yaml(content)])


def _row_text(paper: str, table: dict[str, Any], row: dict[str, Any]) -> str:
    """The file of a row, headed by what it stands for."""
    recipe, name = table["recipe"], config_name(table, row)
    content = merged(table, row)
    hardware = f"{table['hardware']}; {table['batch_text']}"
    published: dict[str, Any] = {"source": f"{table['paper']}, {table['table']}: {row['row']}"}
    published |= _scores(row["bleu"])
    published["hardware"] = hardware
    told = ", ".join(f"{score} {test}".strip() for test, score in _by_test(row["bleu"]).items())
    lines = [
        f"# {paper}, {table['table']}: {row['row']}.",
        f"# Published: BLEU {told}. In the paper: {hardware}.",
        f"# recipes/{recipe}/train.sh {name} && recipes/{recipe}/eval.sh {name}",
        *(line for note in [*table.get("notes", []), row.get("note", "")] if note for line in _comment(note)),
        MADE,
    ]
    return "\n".join([*lines, _yaml({"paper": published, **content})])


def _by_test(bleu: Any) -> dict[str, Any]:
    """Scores by test set; a single one has no name."""
    return bleu if isinstance(bleu, dict) else {"": bleu}


def _scores(bleu: Any) -> dict[str, Any]:
    """The published scores; ``bleu`` is that of the test set that comes first in ``data: tests``."""
    if isinstance(bleu, dict):
        return {"bleu": next(iter(bleu.values())), **{f"bleu_{test}": score for test, score in bleu.items()}}
    return {"bleu": bleu}


def _comment(text: str) -> list[str]:
    """Text as comment lines."""
    lines, line = [], "#"
    for word in text.split():
        if len(line) + 1 + len(word) > WIDTH:
            lines.append(line)
            line = "#"
        line += f" {word}"
    return [*lines, line]


def _yaml(content: dict[str, Any]) -> str:
    """`content` with mappings of one level in a line, where it has several parts."""
    parts = []
    for key, value in content.items():
        flat = isinstance(value, dict) and len(value) <= 8
        parts.append(
            yaml.safe_dump(
                {key: value},
                sort_keys=False,
                width=WIDTH,
                allow_unicode=True,
                default_flow_style=None if flat else False,
            )
        )
    return "".join(parts)
