"""The rows of a recipe: ``rows.yaml``, with the settings of each experiment and what its paper reports.

The file holds

- ``kind``: which steps the recipe has, see `recipes.common.recipe.KINDS`;
- ``readme``: the tables of its README, see `recipes.common.readme`;
- ``groups``: settings that rows share, by name. A group may extend another one (``extends: GROUP``, or
  ``RECIPE/GROUP`` for one of another recipe). A row belongs to the group ``common`` unless it says otherwise;
- ``rows``: settings of rows that stand for no row of a paper, by name;
- ``tables``: tables of papers, which `recipes.papers.tables` explains. A row of a table that has a ``name``
  is a row of the recipe, with the same settings as those under ``rows``;
- ``variants``: ways to start from a trained row, by name. ``variants: [fitted]`` in the row ``funnel_4x``
  makes a row ``funnel_4x_fitted`` with the embedding and group of ``funnel_4x`` and the settings of the
  variant ``fitted``; what the variants of one row set differently is in its ``start``.

The settings of a row are

- ``embedding``: method and options;
- ``train``: options of ``onmt_train`` or ``lm_train``;
- ``translate``: options of ``onmt_translate``; ``evaluate``: options of ``lm_eval``;
- ``average``: how many checkpoints are averaged (translation and headlines);
- ``finetune``: options of a second training from the best model of the first (language models);
- ``data``: which of the prepared data it uses; ``batch``: tokens per step, whatever the number of GPUs;
- ``distill``: ``teacher``, the row that it starts from, and the other options of ``embedding_distillation``;
- ``fit``: ``teacher``, the row whose embedding is replaced by one fitted to it, without training,
  ``fit_steps`` for methods that are fitted by gradient descent, and ``store``, the type of its numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shared_embeddings as se
from shared_embeddings.errors import UserError
from shared_embeddings.utils.reading import read_yaml

FILE, COMMON = "rows.yaml", "common"
Content = dict[str, Any]

# Settings of the same key in a group and a row are merged for these; otherwise the row's replaces the
# group's.
_MERGED = ("data", "evaluate", "finetune", "train", "translate")
_SETTINGS: dict[str, type] = {
    **dict.fromkeys(_MERGED, dict),
    "embedding": dict,
    "average": int,
    "batch": dict,
    "distill": dict,
    "fit": dict,
}
_ROW = {**_SETTINGS, "group": str, "hardware": str, "note": str, "variants": list, "start": dict}
_GROUP = {**_SETTINGS, "extends": str, "hardware": str, "note": str}
_FILE = {
    "kind": str,
    "groups": dict,
    "rows": dict,
    "tables": list,
    "variants": dict,
    "grids": dict,
    "readme": list,
}
# What only tables know of a row.
_PRINTED = ("name", "row", "column", "figures", "model", "why", "quoted")


@dataclass(frozen=True)
class Row:
    """One experiment, with the settings of its group.

    Attributes:
        name: of the row.
        embedding: method and options.
        train: options of ``onmt_train`` or ``lm_train``.
        average: how many checkpoints are averaged.
        translate: options of ``onmt_translate``.
        evaluate: options of ``lm_eval``.
        finetune: all options of the second training; None without one.
        distill: the row that it starts from and how, or None.
        fit: the row that it is fitted to without training, or None.
        data: which of the prepared data it uses; empty where there is one kind.
        batch: size of its batches whatever the number of GPUs, or None.
        paper: ``source``, ``hardware`` and the printed figures of the row that it stands for, or None.
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
        """Name of the row that this one starts from."""
        name: str | None = (self.distill or self.fit or {}).get("teacher")
        return name

    def settings(self) -> Content:
        """The settings that a results file keeps: those that are not empty, without name and figures."""
        return {key: value for key, value in vars(self).items() if value and key not in ("name", "paper")}


def read_rows(folder: Path) -> dict[str, Row]:
    """The rows of the recipe in `folder`, by name in the order of the file; none without ``rows.yaml``.

    Raises:
        UserError: the file cannot be read, or a row is not as this module describes it.
    """
    path = folder / FILE
    return dict(_rows(path, path.stat().st_mtime_ns)) if path.is_file() else {}


@functools.cache
def _rows(path: Path, _version: int) -> dict[str, Row]:
    """`read_rows`, once for each version of a file."""
    content = read_file(path)
    rows: dict[str, Row] = {}
    for where, name, row in _named(path, content):
        for full_name, settings in _with_variants(where, name, row, content.get("variants", {})):
            if full_name in rows:
                raise UserError(f"{where}: there are two rows called {full_name}; rename one of them")
            rows[full_name] = _row(where, full_name, settings, path, content)
    for each in rows.values():
        if each.teacher is not None and (each.teacher not in rows or each.teacher == each.name):
            others = ", ".join(other for other in rows if other != each.name)
            raise UserError(f"{path}: {each.name}: teacher is {each.teacher!r}; it must be one of {others}")
    return rows


def read_file(path: Path) -> Content:
    """The content of a ``rows.yaml``.

    Raises:
        UserError: absent, not YAML, or with a key that is unknown or of another type.
    """
    return _file(path, path.stat().st_mtime_ns if path.is_file() else 0)


@functools.cache
def _file(path: Path, _version: int) -> Content:
    """`read_file`, once for each version of a file."""
    content = read_yaml(path)
    _check(str(path), content, _FILE)
    for part, known in (("groups", _GROUP), ("variants", _SETTINGS)):
        for name, settings in content.get(part, {}).items():
            _check(f"{path}: {part}: {name}", settings, known)
    return dict(content)


def _named(path: Path, content: Content) -> Iterator[tuple[str, str, Content]]:
    """The rows of a file as (place for messages, name, settings), those of no paper first."""
    for name, row in content.get("rows", {}).items():
        yield f"{path}: {name}", name, row
    tables = content.get("tables", [])
    for table in tables:
        shared = {key: table[key] for key in ("group", "hardware") if key in table}
        for row in table.get("rows", []):
            if isinstance(row, dict) and "name" in row:
                settings = {key: value for key, value in row.items() if key not in _PRINTED}
                figures = _figures(row["name"], row, tables)
                paper = {"source": f"{table['paper']}, {table['table']}: {row['row']}", **figures}
                yield f"{path}: {row['name']}", row["name"], {**shared, **settings, "paper": paper}


def _figures(name: str, row: Content, tables: list[Content]) -> Content:
    """The figures of a row, with those that another table prints for it alone."""
    figures: Content = {}
    for table in tables:
        for other in table.get("rows", []):
            if isinstance(other, dict) and other.get("same") == name:
                for part in other.get("figures", []):
                    figures = {**part, **figures} if isinstance(part, dict) else figures
    return {**row.get("figures", {}), **{key: figures[key] for key in figures if key not in row["figures"]}}


def _with_variants(
    where: str, name: str, row: Content, variants: Mapping[str, Content]
) -> Iterator[tuple[str, Content]]:
    """A row and its variants, by their names."""
    _check(where, row, {**_ROW, "paper": dict}, required="embedding")
    yield name, {key: value for key, value in row.items() if key not in ("variants", "start")}
    base = {key: row[key] for key in ("embedding", "group") if key in row}
    start = row.get("start", {})
    _check(f"{where}: start", start, _SETTINGS)
    for variant in row.get("variants", ()):
        if variant not in variants:
            raise UserError(f"{where}: no variant {variant!r}; there are: {', '.join(variants)}")
        settings = {**base, **variants[variant], **start}
        if "fit" in settings:
            settings = {key: value for key, value in settings.items() if key not in ("distill", "train")}
        yield f"{name}_{variant}", settings


def _row(where: str, name: str, settings: Content, path: Path, content: Content) -> Row:
    """A row with the settings of its group."""
    if "fit" in settings:
        for key in ("distill", "train"):
            if key in settings:
                raise UserError(f"{where}: {key} has no effect on a row that is only fitted; remove it")
        for key in settings["fit"].keys() - {"teacher", "fit_steps", "store"}:
            raise UserError(f"{where}: fit: unknown key {key!r}; it may hold teacher, fit_steps and store")
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
        first = f"bleu_{merged.get('data', {}).get('tests', [''])[0]}"  # what an evaluation calls bleu
        merged["paper"] = {**paper, "bleu": paper[first]} if first in paper else paper
    return Row(name, **{key: value for key, value in merged.items() if key in (*_SETTINGS, "paper")})


def _group(where: str, name: str, path: Path, content: Content) -> Content:
    """The settings of a group with those of the groups that it extends."""
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
    """Settings with those of `own` in front of those of `base`, option by option where both have options."""
    both = {key: {**base[key], **own[key]} for key in _MERGED if key in base and key in own}
    return {**base, **own, **both}


def _check(where: str, content: Any, known: Mapping[str, type], required: str = "") -> None:
    """Check that a mapping has no keys but the `known` ones, of their types, and the `required` one."""
    if not isinstance(content, dict) or (required and required not in content):
        raise UserError(f"{where}: it must hold {required or ', '.join(known)}")
    for key, value in content.items():
        if key not in known:
            raise UserError(f"{where}: unknown key {key!r}; it may hold {', '.join(known)}")
        if type(value) is not known[key]:
            raise UserError(f"{where}: {key} is {value!r}; it must be of type {known[key].__name__}")


# Unknown, padding, start and end of a sentence.
SPECIAL_TOKENS = 4


def padded_vocabulary(entries: int, multiple: int) -> int:
    """Rows of the table for a vocabulary file of `entries` lines, as OpenNMT-py pads them to a `multiple`."""
    return -(-(entries + SPECIAL_TOKENS) // multiple) * multiple


def describe_size(row: Row, entries: int) -> str:
    """One line: embedding parameters of `row`, input and output together, and the compression.

    Raises:
        UserError: the method does not accept its options.
    """
    is_language_model = "model" in row.train
    vocabulary = (
        entries if is_language_model else padded_vocabulary(entries, row.train.get("vocab_size_multiple", 8))
    )
    size = row.train["embedding_dim" if is_language_model else "hidden_size"]
    options = {key: value for key, value in row.embedding.items() if key != "method"}
    try:
        method = row.embedding["method"]
        # Their files may not exist yet.
        options |= {name: se.STORED for name in se.file_options(method) if name in options}
        count = se.num_parameters(method, num_embeddings=vocabulary, embedding_dim=size, **options)
    except (se.OptionError, KeyError) as error:
        raise UserError(f"{row.name}: {error}") from error
    dense = vocabulary * size
    return f"{count:,} embedding parameters, {dense / count:.1f} times fewer than {vocabulary:,} x {size}"
