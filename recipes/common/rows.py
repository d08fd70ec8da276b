"""The rows of a recipe: ``rows.yaml``, with the settings of each experiment and the paper's figures.

The file contains

- ``kind``: the steps of the recipe, see `recipes.common.recipe.KINDS`;
- ``readme``: the tables of its README, see `recipes.common.table`;
- ``groups``: shared settings by name. A group may extend another one (``extends: GROUP``, or
  ``RECIPE/GROUP`` for another recipe). The default group of a row is ``common``;
- ``rows``: settings of rows that do not reproduce a row of a paper, by name;
- ``tables``: tables of papers, see `recipes.papers.tables`. A row of a table with a ``name`` is a row of the
  recipe, with the same settings as those in ``rows``;
- ``variants``: settings of rows that start from a trained row, by name. ``variants: [fitted]`` in the row
  ``funnel_4x`` adds a row ``funnel_4x_fitted`` with the embedding and group of ``funnel_4x`` and the settings
  of the variant ``fitted``.

The settings of a row are

- ``embedding``: method and options;
- ``train``: options of ``onmt_train`` or ``lm_train``;
- ``translate``: options of ``onmt_translate``; ``evaluate``: options of ``lm_eval``;
- ``average``: number of averaged checkpoints (translation and headlines);
- ``finetune``: options of a second training from the best model of the first (language models);
- ``data``: the prepared data to use; ``batch``: tokens per step, independent of the number of GPUs;
- ``distill``: ``teacher`` (a row), and other options of ``embedding_distillation``;
- ``fit``: ``teacher`` (a row, whose embedding is replaced by a fitted one, without training), ``fit_steps``
  for methods that are fitted by gradient descent, and ``store``, the storage dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shared_embeddings as se
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.reading import read_yaml

FILE, COMMON = "rows.yaml", "common"
Content = dict[str, Any]

# These settings of a group and a row are merged; others are replaced.
_MERGED = ("data", "evaluate", "finetune", "train", "translate")
_SETTINGS: dict[str, type] = {
    **dict.fromkeys(_MERGED, dict),
    **{"embedding": dict, "average": int, "batch": dict, "distill": dict, "fit": dict},
}
_GROUP = {**_SETTINGS, "extends": str, "hardware": str, "note": str}
_ROW = {**_SETTINGS, "group": str, "hardware": str, "note": str, "variants": list, "paper": dict}
_FILE = {
    **{"kind": str, "groups": dict, "rows": dict, "tables": list, "variants": dict},
    **{"grids": dict, "readme": list},
}
# Keys of rows of tables only.
_PRINTED = ("name", "row", "column", "figures", "model", "why", "quoted")
# <unk>, <blank>, <s>, </s>.
SPECIAL_TOKENS = 4


@dataclass(frozen=True)
class Row:
    """One experiment, with the settings of its group.

    Attributes:
        name: name of the row.
        embedding: method and options.
        train: options of ``onmt_train`` or ``lm_train``.
        average: number of averaged checkpoints.
        translate: options of ``onmt_translate``.
        evaluate: options of ``lm_eval``.
        finetune: all options of the second training, or None.
        distill: teacher and options of distillation, or None.
        fit: teacher and options of fitting without training, or None.
        data: the prepared data to use; empty if there is one kind.
        batch: batch size independent of the number of GPUs, or None.
        paper: ``source``, ``hardware`` and figures of the paper's row, or None.
    """

    name: str
    embedding: Content
    train: Content = field(default_factory=dict)
    average: int = 1
    translate: Content = field(default_factory=dict)
    evaluate: Content = field(default_factory=dict)
    finetune: Content | None = None
    distill: Content | None = None
    fit: Content | None = None
    data: Content = field(default_factory=dict)
    batch: Content | None = None
    paper: Content | None = None

    @property
    def teacher(self) -> str | None:
        """The name of the row that this one starts from."""
        name: str | None = (self.distill or self.fit or {}).get("teacher")
        return name

    def settings(self) -> Content:
        """Return the nonempty settings for results files, without name and figures."""
        return {key: value for key, value in vars(self).items() if value and key not in ("name", "paper")}


def read_rows(folder: Path) -> dict[str, Row]:
    """Return the rows of the recipe in `folder` by name, in file order; empty without ``rows.yaml``.

    Raises:
        UserError: the file cannot be read, or a row is invalid.
    """
    path = folder / FILE
    return dict(_rows(path, path.stat().st_mtime_ns)) if path.is_file() else {}


def read_file(path: Path) -> Content:
    """Read a ``rows.yaml``.

    Raises:
        UserError: it is missing, not YAML, or has a key that is unknown or of the wrong type.
    """
    return _file(path, path.stat().st_mtime_ns if path.is_file() else 0)


# Read once per version of a file.
@functools.cache
def _file(path: Path, _version: int) -> Content:
    content = read_yaml(path)
    _check(str(path), content, _FILE)
    for part, known in (("groups", _GROUP), ("variants", _SETTINGS)):
        for name, settings in content.get(part, {}).items():
            _check(f"{path}: {part}: {name}", settings, known)
    return dict(content)


@functools.cache
def _rows(path: Path, _version: int) -> dict[str, Row]:
    content = read_file(path)
    variants = content.get("variants", {})
    rows: dict[str, Row] = {}
    for name, row in _named(content):
        where = f"{path}: {name}"
        _check(where, row, _ROW, required="embedding")
        named = {name: {key: value for key, value in row.items() if key != "variants"}}
        for variant in row.get("variants", ()):
            if variant not in variants:
                raise UserError(f"{where}: no variant {variant!r}; there are: {', '.join(variants)}")
            base: Content = {key: row[key] for key in ("embedding", "group") if key in row}
            named[f"{name}_{variant}"] = {**base, **variants[variant]}
        for full_name, settings in named.items():
            if full_name in rows:
                raise UserError(f"{where}: there are two rows called {full_name}; rename one of them")
            rows[full_name] = _row(where, full_name, settings, path, content)
    for each in rows.values():
        if each.teacher is not None and (each.teacher not in rows or each.teacher == each.name):
            others = ", ".join(other for other in rows if other != each.name)
            raise UserError(f"{path}: {each.name}: teacher is {each.teacher!r}; it must be one of {others}")
    return rows


def _named(content: Content) -> Iterator[tuple[str, Content]]:
    """Yield the rows of a file with their names, rows of papers last, with the paper's figures."""
    yield from content.get("rows", {}).items()
    tables = content.get("tables", [])
    for table in tables:
        shared = {key: table[key] for key in ("group", "hardware") if key in table}
        for row in table.get("rows", []):
            if not isinstance(row, dict) or "name" not in row:
                continue
            figures = dict(row.get("figures", {}))
            for other in (other for each in tables for other in each.get("rows", [])):
                if isinstance(other, dict) and other.get("same") == row["name"]:
                    for part in other.get("figures", []):  # a mapping has figures of the other table only
                        figures = {**part, **figures} if isinstance(part, dict) else figures
            paper = {"source": f"{table['paper']}, {table['table']}: {row['row']}", **figures}
            settings = {key: value for key, value in row.items() if key not in _PRINTED}
            yield row["name"], {**shared, **settings, "paper": paper}


def _row(where: str, name: str, settings: Content, path: Path, content: Content) -> Row:
    """Return a row with the settings of its group."""
    if "fit" in settings:
        for key in ("distill", "train"):
            if key in settings:
                raise UserError(f"{where}: {key} has no effect on a fitted row; remove it")
        for key in settings["fit"].keys() - {"teacher", "fit_steps", "store"}:
            raise UserError(f"{where}: fit: unknown key {key!r}; expected teacher, fit_steps or store")
    for way in ("distill", "fit"):
        if way in settings and "teacher" not in settings[way]:
            raise UserError(f"{where}: {way}: teacher is missing; name the row that it starts from")
    merged = merge(_group(where, settings.get("group", COMMON), path, content), settings)
    if merged.get("average", 1) < 1:
        raise UserError(f"{where}: average is {merged['average']}; it must be at least 1")
    if "finetune" in merged:
        second = {**merged["train"], **merged["finetune"]}
        merged["finetune"] = None if "fit" in settings else second
    if "paper" in merged:
        paper = {**merged["paper"], "hardware": merged.get("hardware", "not in the paper")}
        first = f"bleu_{merged.get('data', {}).get('tests', [''])[0]}"  # "bleu" in results
        merged["paper"] = {**paper, "bleu": paper[first]} if first in paper else paper
    return Row(name, **{key: value for key, value in merged.items() if key in (*_SETTINGS, "paper")})


def _group(where: str, name: str, path: Path, content: Content) -> Content:
    """Return the settings of a group and the groups that it extends."""
    recipe, _, own_name = name.rpartition("/")
    if recipe:
        path = path.parents[1] / recipe / FILE
        content = read_file(path)
    groups = content.get("groups", {})
    if own_name not in groups:
        raise UserError(f"{where}: no group {name!r}; there are: {', '.join(groups)}")
    group = groups[own_name]
    if "extends" not in group:
        return dict(group)
    return merge(_group(f"{path}: {own_name}", group["extends"], path, content), group)


def merge(base: Content, own: Content) -> Content:
    """Merge settings; `own` takes precedence over `base`, option by option."""
    both = {key: {**base[key], **own[key]} for key in _MERGED if key in base and key in own}
    return {**base, **own, **both}


def _check(where: str, content: Any, known: Mapping[str, type], required: str = "") -> None:
    """Check that a mapping has only `known` keys with the right types, and the `required` one."""
    if not isinstance(content, dict) or (required and required not in content):
        raise UserError(f"{where}: it must contain {required or ', '.join(known)}")
    for key, value in content.items():
        if key not in known:
            raise UserError(f"{where}: unknown key {key!r}; expected {', '.join(known)}")
        if type(value) is not known[key]:
            raise UserError(f"{where}: {key} is {value!r}; it must be of type {known[key].__name__}")


def padded_vocabulary(entries: int, multiple: int) -> int:
    """Return the rows of the table for a vocabulary file of `entries` lines, padded to a `multiple`."""
    return -(-(entries + SPECIAL_TOKENS) // multiple) * multiple


def describe_size(row: Row, entries: int) -> str:
    """Describe the embedding parameters of a row (input and output) and the compression in one line.

    Raises:
        UserError: an option is invalid.
    """
    is_language_model = "model" in row.train
    vocabulary = (
        entries if is_language_model else padded_vocabulary(entries, row.train.get("vocab_size_multiple", 8))
    )
    size = row.train["embedding_dim" if is_language_model else "hidden_size"]
    options = {key: value for key, value in row.embedding.items() if key != "method"}
    try:
        method = row.embedding["method"]
        # The files may not exist yet.
        options |= {name: se.STORED for name in se.options(method).file_options if name in options}
        count = se.num_parameters(method, num_embeddings=vocabulary, embedding_dim=size, **options)
    except (se.OptionError, KeyError) as error:
        raise UserError(f"{row.name}: {error}") from error
    dense = vocabulary * size
    return f"{count:,} embedding parameters, {dense / count:.1f} times fewer than {vocabulary:,} x {size}"
