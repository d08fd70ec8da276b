"""Recipes: folders of scripts and a ``rows.yaml`` with the settings of experiments and what papers print.

``rows.yaml`` contains

- ``kind``: the steps of the recipe, see `KINDS`;
- ``data``: the settings of preprocess.sh, which ``--settings FILE`` replaces;
- ``readme``: the tables of its README, see `recipes.common.table`;
- ``groups``: shared settings by name. A group may extend another one (``extends: GROUP``, or
  ``RECIPE/GROUP`` for another recipe). The default group of a row is ``common``;
- ``rows``: settings of rows that do not reproduce a row of a paper, by name;
- ``tables``: tables of papers, see `recipes.papers`. A row of a table with a ``name`` is a row of the recipe,
  with the same settings as those in ``rows``;
- ``variants``: settings of rows that start from a trained row, by name. ``variants: [fitted]`` in the row
  ``funnel_4x`` adds a row ``funnel_4x_fitted`` with the embedding and group of ``funnel_4x`` and the settings
  of the variant ``fitted``. ``seeds: [2, 3]`` in a row ``funnel_4x`` adds rows ``funnel_4x_seed2`` and
  ``funnel_4x_seed3``; tables show the mean and the range of all.

A row takes the settings of its group; in mappings such as ``train``, option by option. The settings of a row
are the attributes of `Row`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import shared_embeddings as se
from recipes.common.results import REPOSITORY, SEED, SMOKE_FOLDER
from recipes.common.smoke import CLASSES, CUTOFFS, FIT_STEPS, LONGEST, SMOKE, SMOKE_HELP, classes_file
from recipes.common.tools import read_json
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import parse_options, require, require_at_least
from shared_embeddings.utils.path_options import PathOption
from shared_embeddings.utils.reading import read_yaml

RECIPES = REPOSITORY / "recipes"
FILE, COMMON = "rows.yaml", "common"
# <unk>, <blank>, <s>, </s>.
SPECIAL_TOKENS = 4
Content = dict[str, Any]

# The function ``(recipe, arguments)`` of each step, by the ``kind`` in ``rows.yaml``.
_TRANSLATION = {"train": "translation.train:train_command", "eval": "translation.train:eval_command"}
_HEADLINES = {**_TRANSLATION, "eval": "headlines:eval_command"}
KINDS = {
    "translation": {"preprocess": "translation.preprocess:main", **_TRANSLATION},
    "multi30k": {"preprocess": "translation.preprocess:prepare_multi30k", **_TRANSLATION},
    "agnews": {"preprocess": "headlines:prepare_news", **_HEADLINES},
    "gigaword": {"preprocess": "headlines:prepare_gigaword", **_HEADLINES},
    "language_model": {
        "preprocess": "language_model:preprocess",
        "train": "language_model:train",
        "eval": "language_model:evaluate",
    },
    "reconstruction": {
        "preprocess": "reconstruction:preprocess",
        "train": "reconstruction:train",
        "eval": "reconstruction:evaluate",
    },
    "shrink": {
        "preprocess": "shrink_a_model.preprocess:main",
        "train": "shrink_a_model.models:train_command",
        "eval": "shrink_a_model.models:eval_command",
    },
    "quickstart": {"run": "quickstart.run:main"},
}

# Keys of rows of tables only.
_PRINTED = ("name", "row", "column", "figures", "model", "why", "quoted")


@dataclass(frozen=True)
class Fit:
    """The setting ``fit``."""

    teacher: str  # a row, whose embedding is replaced by a fitted one
    fit_steps: int | None = None  # for methods that are fitted by gradient descent
    store: str | None = None  # the storage dtype
    calibrate: bool = False  # on the training text
    recover_steps: int | None = None  # of training by the teacher's predictions; with `calibrate` only

    def __post_init__(self) -> None:
        require(
            self.calibrate or self.recover_steps is None,
            f"recover_steps: {self.recover_steps} needs the training text; set calibrate: true",
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a row."""

    embedding: Content = field(default_factory=dict)  # method and options
    train: Content = field(default_factory=dict)  # options of ``onmt_train`` or ``lm_train``
    average: int = 1  # number of averaged checkpoints (translation and headlines)
    translate: Content = field(default_factory=dict)  # options of ``onmt_translate``
    evaluate: Content = field(default_factory=dict)  # options of ``lm_evaluate``
    # Options of a second training from the best model of the first (language models).
    finetune: Content | None = None
    distill: Content | None = None  # ``teacher`` (a row), and other options of ``embedding_distillation``
    fit: Content | None = None  # see `Fit`
    data: Content = field(default_factory=dict)  # the prepared data to use; empty if there is one kind
    batch: Content | None = None  # tokens per step, independent of the number of GPUs

    def __post_init__(self) -> None:
        require_at_least("average", self.average, 1)


@dataclass(frozen=True, kw_only=True)
class GroupSettings(Settings):
    """The settings of a group."""

    extends: str = ""
    hardware: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class RowSettings(Settings):
    """The settings of a row in the file."""

    embedding: Content
    group: str = COMMON
    hardware: str = ""
    note: str = ""
    variants: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    paper: Content | None = None


@dataclass(frozen=True)
class File:
    """The content of ``rows.yaml``; its rows are checked together with those of its tables."""

    kind: str = ""
    groups: Mapping[str, GroupSettings] = field(default_factory=dict)
    rows: Content = field(default_factory=dict)
    tables: tuple[Any, ...] = ()
    variants: Mapping[str, Settings] = field(default_factory=dict)
    grids: Content = field(default_factory=dict)
    readme: tuple[Any, ...] = ()
    data: Content = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Row(Settings):
    """One experiment, with the settings of its group."""

    name: str
    embedding: Content
    paper: Content | None = None  # ``source``, ``hardware`` and figures of the paper's row

    @property
    def teacher(self) -> str | None:
        """The name of the row that this one starts from."""
        name: str | None = (self.distill or self.fit or {}).get("teacher")
        return name

    def settings(self) -> Content:
        """Return the nonempty settings for results files, without name and figures."""
        return {key: value for key, value in vars(self).items() if value and key not in ("name", "paper")}


def read_rows(folder: Path) -> dict[str, Row]:
    """Return the rows of the recipe in `folder` by name, in file order; empty without ``rows.yaml``."""
    path = folder / FILE
    return dict(_rows(path, path.stat().st_mtime_ns)) if path.is_file() else {}


def read_file(path: Path) -> Content:
    """Read a ``rows.yaml``."""
    return _file(path, path.stat().st_mtime_ns if path.is_file() else 0)


# Read once per version of a file.
@functools.cache
def _file(path: Path, _version: int) -> Content:
    content = read_yaml(path)
    parse_options(str(path), File, content)
    return dict(content)


@functools.cache
def _rows(path: Path, _version: int) -> dict[str, Row]:
    content = read_file(path)
    variants = content.get("variants", {})
    rows: dict[str, Row] = {}
    for name, row in _named(content):
        where = f"{path}: {name}"
        parse_options(where, RowSettings, row)
        own = {key: value for key, value in row.items() if key not in ("variants", "seeds")}
        named = {name: own}
        for seed in row.get("seeds", ()):
            named[f"{name}{SEED}{seed}"] = {**own, "train": {**own.get("train", {}), "seed": seed}}
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
    tables = [(table, row) for table in content.get("tables", []) for row in table.get("rows", [])]
    printed = [(table, row) for table, row in tables if isinstance(row, dict)]
    for table, row in printed:
        if "name" not in row:
            continue
        figures = dict(row.get("figures", {}))
        for _, other in printed:
            if other.get("same") == row["name"]:
                for part in other.get("figures", []):  # a mapping has figures of the other table only
                    figures = {**part, **figures} if isinstance(part, dict) else figures
        paper = {"source": f"{table['paper']}, {table['table']}: {row['row']}", **figures}
        shared = {key: table[key] for key in ("group", "hardware") if key in table}
        settings = {key: value for key, value in row.items() if key not in _PRINTED}
        yield row["name"], {**shared, **settings, "paper": paper}


def _row(where: str, name: str, settings: Content, path: Path, content: Content) -> Row:
    if "fit" in settings:
        for key in ("distill", "train"):
            if key in settings:
                raise UserError(f"{where}: {key} has no effect on a fitted row; remove it")
        parse_options(f"{where}: fit", Fit, settings["fit"])
    if "distill" in settings and "teacher" not in settings["distill"]:
        raise UserError(f"{where}: distill: teacher is missing; name the row that it starts from")
    merged = _merge(_group(where, settings.get("group", COMMON), path, content), settings)
    if "finetune" in merged:
        merged["finetune"] = None if "fit" in settings else {**merged["train"], **merged["finetune"]}
    if "paper" in merged:
        paper = {**merged["paper"], "hardware": merged.get("hardware", "not in the paper")}
        first = f"bleu_{merged.get('data', {}).get('tests', [''])[0]}"  # "bleu" in results
        merged["paper"] = {**paper, "bleu": paper[first]} if first in paper else paper
    kept = {each.name for each in fields(Row)}
    return Row(name=name, **{key: value for key, value in merged.items() if key in kept})


def _group(where: str, name: str, path: Path, content: Content) -> Content:
    """Return the settings of a group and the groups that it extends."""
    recipe, _, own_name = name.rpartition("/")
    if recipe:
        path = path.parents[1] / recipe / FILE
        content = read_file(path)
    groups = content.get("groups", {})
    if own_name not in groups:
        raise UserError(f"{where}: no group {name!r}; there are: {', '.join(groups)}")
    group: Content = groups[own_name]
    if "extends" not in group:
        return group
    return _merge(_group(f"{path}: {own_name}", group["extends"], path, content), group)


def _merge(base: Content, own: Content) -> Content:
    """Merge settings; `own` takes precedence over `base`, in mappings option by option."""
    both = {key: {**base[key], **own[key]} for key in base.keys() & own.keys() if isinstance(own[key], dict)}
    return {**base, **own, **both}


def padded_vocabulary(entries: int, multiple: int) -> int:
    """Return the rows of the table for a vocabulary file of `entries` lines, padded to a `multiple`."""
    return -(-(entries + SPECIAL_TOKENS) // multiple) * multiple


def describe_size(row: Row, entries: int) -> str:
    """Describe the embedding parameters of a row (input and output) and the compression in one line."""
    is_language_model = "model" in row.train
    vocabulary = (
        entries if is_language_model else padded_vocabulary(entries, row.train.get("vocab_size_multiple", 8))
    )
    size = row.train["embedding_dim" if is_language_model else "hidden_size"]
    options = {key: value for key, value in row.embedding.items() if key != "method"}
    try:
        method = row.embedding["method"]
        # The files may not exist yet.
        options |= {name: se.STORED for name in se.get_method_config(method).file_options if name in options}
        count = se.num_parameters(method, num_embeddings=vocabulary, embedding_dim=size, **options)
    except (se.OptionError, KeyError) as error:
        raise UserError(f"{row.name}: {error}") from error
    dense = vocabulary * size
    return f"{count:,} embedding parameters, {dense / count:.1f} times fewer than {vocabulary:,} x {size}"


# Rows of --smoke. Options of embeddings that depend on the vocabulary or the number of steps.
_SMALL_EMBEDDING = {"num_clusters": 16, "min_rank": 2, "num_classes": CLASSES, "relu_dropout_steps": 2}
# Replaced options of `onmt_train` and `lm_train`; `..._LESS` only if a row has them.
_SMALL_BATCH = 256
_SMALL_TRANSLATION = {
    **{"enc_layers": 1, "dec_layers": 1, "transformer_ff": 32, "train_steps": 4, "valid_steps": 2},
    **{"save_checkpoint_steps": 2, "report_every": 1, "bucket_size": 256, "num_workers": 0},
}
_TRANSLATION_LESS = {"batch_size": _SMALL_BATCH, "accum_count": [1]}
_SEARCH_LESS = {"beam_size": 2, "n_best": 2}
_SMALL_MODEL = {"epochs": 2, "batch_size": 4, "sequence_length": 40, "log_every": 5}
_MODEL_LESS = {
    **{"hidden_dim": 32, "num_heads": 2, "head_dim": 8, "feed_forward_dim": 32},
    **{"memory_length": 20, "clamp_length": 20, "target_length": 20},
}
# The first and the last layer of an LSTM may have different widths.
_MODEL_LAYERS = 2
_COUNTED_IN_STEPS = ("steps", "evaluate_every", "warmup_steps")


def smoke_row(row: Row) -> Row:
    """Return a row with a tiny network, the same method for a small vocabulary, and few steps."""

    def less(options: Content, smaller: Content) -> Content:
        return {**options, **{name: value for name, value in smaller.items() if name in options}}

    def smaller_model(train: Content) -> Content:  # widths of embeddings are kept
        kept = {key: value for key, value in less(train, _MODEL_LESS).items() if key not in _COUNTED_IN_STEPS}
        return {**kept, **_SMALL_MODEL, "num_layers": min(_MODEL_LAYERS, train["num_layers"])}

    def start(settings: Content | None) -> Content | None:
        if settings is None or settings.get("embedding_start") == "random":
            return settings
        return {**less(settings, {"recover_steps": FIT_STEPS}), "fit_steps": FIT_STEPS}

    embedding = less(row.embedding, _SMALL_EMBEDDING)
    if "cutoffs" in embedding:
        embedding["cutoffs"] = list(CUTOFFS[: len(embedding["cutoffs"])])
    if embedding["method"] == "group_reduce":
        embedding["num_groups"] = min(4, embedding["num_groups"])
    if "classes" in embedding and "pieces" in row.data:
        embedding["classes"] = classes_file(CLASSES)
    row = replace(row, embedding=embedding, distill=start(row.distill), fit=start(row.fit))
    if "model" in row.train:
        return replace(
            row,
            train=smaller_model(row.train),
            finetune=None if row.finetune is None else smaller_model(row.finetune),
            evaluate=less(row.evaluate, _MODEL_LESS),
            data={},
        )
    return replace(
        row,
        train={**less(row.train, _TRANSLATION_LESS), **_SMALL_TRANSLATION},
        translate={**less(row.translate, _SEARCH_LESS), "max_length": LONGEST},
        batch=None if row.batch is None else {"tokens": 2 * _SMALL_BATCH, "per_gpu": _SMALL_BATCH},
    )


@dataclass(frozen=True)
class Recipe:
    """A recipe, or its version for ``--smoke`` with tiny rows and the folder ``smoke`` for its runs."""

    folder: Path
    is_smoke: bool = False

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def title(self) -> str:
        """The title of its README, or its name."""
        readme = self.folder / "README.md"
        first = readme.read_text(encoding="utf-8").partition("\n")[0] if readme.is_file() else ""
        return first.lstrip("# ").strip() or self.name

    @property
    def home(self) -> Path:
        """The output folder: ``$RUNS/NAME``, with ``--smoke`` ``$RUNS/NAME/smoke``."""
        home = runs_folder() / self.name
        return home / SMOKE_FOLDER if self.is_smoke else home

    @property
    def data(self) -> Path:
        return self.home / "data"

    @property
    def rows(self) -> dict[str, Row]:
        rows = read_rows(self.folder)
        return {name: smoke_row(row) for name, row in rows.items()} if self.is_smoke else rows

    def row(self, name: str) -> Row:
        if name not in self.rows:
            raise UserError(f"{self.name} has no row {name!r}; there are: {', '.join(self.rows)}")
        return self.rows[name]

    def smoke(self) -> Recipe:
        return replace(self, is_smoke=True)

    def data_settings(self, path: Path | None = None) -> tuple[str, Content]:
        """Return the settings of preprocess.sh, ``data`` of ``rows.yaml`` or a file, after their place."""
        if path is None:
            path = self.folder / FILE
            return f"{path}: data", dict(read_file(path).get("data", {}))
        content = read_yaml(path)
        return str(path), dict(content) if isinstance(content, dict) else {}

    def command(self, script: str, *arguments: str) -> str:
        return " ".join([f"recipes/{self.name}/{script}", *arguments, *([SMOKE] if self.is_smoke else [])])

    def describe_data(self, folder: Path) -> Content:
        """Read ``data.json`` in a folder of prepared data, which is written last."""
        content = read_json(folder / "data.json")
        if not isinstance(content, dict) or "checksum" not in content:
            pieces = [folder.name] if folder.parent == self.data else []
            command = self.command("preprocess.sh", *pieces)
            raise UserError(f"{folder}: no prepared data; run {command}")
        return content

    def with_files(self, embedding: Content, folder: Path) -> Content:
        """Return the options of an embedding with the paths of its files in `folder`."""
        method = embedding.get("method")
        names = (
            se.get_method_config(method).file_options
            if isinstance(method, str) and method in se.methods()
            else ()
        )
        return {**embedding, **{name: str(folder / embedding[name]) for name in names if name in embedding}}


def runs_folder() -> Path:
    """Return the folder of all runs: ``$RUNS``, or ``runs`` in the repository."""
    return Path(os.environ.get("RUNS") or REPOSITORY / "runs").absolute()


def recipe_names(folder: Path = RECIPES) -> list[str]:
    """Return the names of all recipes in `folder`: folders with a README and a script."""
    return sorted(
        readme.parent.name for readme in folder.glob("*/README.md") if list(readme.parent.glob("*.sh"))
    )


def find_recipe(name: str, folder: Path = RECIPES) -> Recipe:
    """Return a recipe by name."""
    if name not in recipe_names(folder):
        raise UserError(f"no recipe {name!r}; there are: {', '.join(recipe_names(folder))}")
    return Recipe(folder / name)


def run_step(recipe: Recipe, step: str, arguments: Sequence[str]) -> None:
    """Run a step of a recipe."""
    steps = KINDS[read_file(recipe.folder / FILE)["kind"]]
    if step not in steps:
        raise UserError(f"{recipe.name} has no step {step!r}; it has {', '.join(steps)}")
    module, _, function = steps[step].partition(":")
    getattr(importlib.import_module(f"recipes.{module}"), function)(recipe, arguments)


def parse_row(recipe: Recipe, usage: str, arguments: Sequence[str]) -> tuple[Recipe, Row, list[str]]:
    """Parse the command line ``ROW [--smoke] [option ...]`` to the recipe, the row and the other options.

    ``--help`` prints `usage`, with the name of the ``{recipe}``, and the rows; so does a command line without
    a row, which exits with status 2.
    """
    wants_help = any(argument in ("-h", "--help") for argument in arguments[:1])
    if wants_help or not arguments:
        text = f"{usage.format(recipe=recipe.name)}\n\nROW is one of: {', '.join(recipe.rows)}"
        print(text, file=sys.stdout if wants_help else sys.stderr)
        raise SystemExit(0 if wants_help else 2)
    name, *options = arguments
    if SMOKE in options:
        recipe = recipe.smoke()
    return recipe, recipe.row(name), [option for option in options if option != SMOKE]


def preprocess_options(description: str | None, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of a preprocess.sh with the options ``--settings FILE`` and ``--smoke`` only."""
    parser = Parser("preprocess.sh", description=description)
    add_settings_option(parser)
    parser.add_argument(SMOKE, action="store_true", help=SMOKE_HELP)
    return parser.parse_args(arguments)


def add_settings_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--settings`` to the parser of a preprocess.sh."""
    parser.add_argument("--settings", type=PathOption.FILE, help="a file in place of 'data' in rows.yaml")
