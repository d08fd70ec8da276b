"""Recipes: folders of scripts and a ``rows.yaml`` with the settings of experiments and what papers print.

``recipes/README.md`` explains the keys of the file.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import shared_embeddings as se
from recipes.common.results import REPOSITORY, SEED, SMOKE_FOLDER
from recipes.common.tools import (
    CLASSES,
    CUTOFFS,
    FIT_STEPS,
    LONGEST,
    SMOKE,
    SMOKE_HELP,
    classes_file,
    read_json,
)
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import parse_options
from shared_embeddings.utils.paths import existing_file
from shared_embeddings.utils.reading import read_yaml

RECIPES = REPOSITORY / "recipes"
FILE, COMMON = "rows.yaml", "common"
Content = dict[str, Any]

# The function ``(recipe, arguments)`` of each step, by the ``kind`` in ``rows.yaml``.
_TRANSLATION = {"train": "translation.train:train_command", "eval": "translation.train:eval_command"}
_HEADLINES = {**_TRANSLATION, "eval": "headlines:eval_command"}
KINDS = {
    "translation": {"preprocess": "translation.preprocess:main", **_TRANSLATION},
    "multi30k": {"preprocess": "translation.preprocess:prepare_multi30k", **_TRANSLATION},
    "debian": {"preprocess": "headlines:prepare_debian", **_HEADLINES},
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

# Keys of a row in a file that are no settings: of rows of tables, and of what is expanded to several rows.
_PRINTED = ("name", "row", "column", "figures", "model", "why", "quoted")
_EXPANDED = ("variants", "seeds")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One experiment, with the settings of its group."""

    name: str
    embedding: Content  # method and options
    train: Content = field(default_factory=dict)  # options of ``onmt_train`` or ``lm_train``
    average: int = 1  # number of averaged checkpoints (translation and headlines)
    translate: Content = field(default_factory=dict)  # options of ``onmt_translate``
    evaluate: Content = field(default_factory=dict)  # options of ``lm_evaluate``
    # Options of a second training from the best model of the first (language models).
    finetune: Content | None = None
    distill: Content | None = None  # ``teacher`` (a row), and other options of ``embedding_distillation``
    # ``teacher`` (a row), whose embedding is replaced by a fitted one; ``fit_steps``, ``store`` (the dtype),
    # ``calibrate`` (on the training text), ``recover_steps`` (of training by the teacher's predictions), or
    # ``fp8: true`` (a table of n-grams in FP8, with one scale).
    fit: Content | None = None
    data: Content = field(default_factory=dict)  # the prepared data to use; empty if there is one kind
    batch: Content | None = None  # tokens per step, independent of the number of GPUs
    paper: Content | None = None  # ``source``, ``hardware`` and figures of the paper's row

    @property
    def teacher(self) -> str | None:
        """The name of the row that this one starts from."""
        name: str | None = (self.distill or self.fit or {}).get("teacher")
        return name

    def settings(self) -> Content:
        """Return the nonempty settings for results files, without name and figures."""
        return {key: value for key, value in vars(self).items() if value and key not in ("name", "paper")}


@functools.cache
def _read(path: Path, _version: int) -> Content:  # once per version of a file
    return dict(read_yaml(path))


def read_file(path: Path) -> Content:
    """Read a ``rows.yaml``."""
    return _read(path, path.stat().st_mtime_ns)


@functools.cache
def read_rows(path: Path, _version: int) -> dict[str, Row]:
    """Return the rows of a ``rows.yaml`` by name, in file order; rows of papers come last."""

    def row_of(name: str, settings: Content) -> Row:
        merged = _in_group(settings, settings.get("group", COMMON), path)
        for key in ("group", "extends", "note"):
            merged.pop(key, None)
        hardware = merged.pop("hardware", "not in the paper")
        if "finetune" in merged:
            merged["finetune"] = None if "fit" in settings else {**merged["train"], **merged["finetune"]}
        if "paper" in merged:
            paper = {**merged["paper"], "hardware": hardware}
            first = f"bleu_{merged.get('data', {}).get('tests', [''])[0]}"  # "bleu" in results
            merged["paper"] = {**paper, "bleu": paper[first]} if first in paper else paper
        return parse_options(f"{path}: {name}", Row, {"name": name, **merged})

    content = read_file(path)
    variants = content.get("variants", {})
    written_rows = dict(content.get("rows", {}))
    tables = [(table, row) for table in content.get("tables", []) for row in table.get("rows", [])]
    printed = [(table, row) for table, row in tables if isinstance(row, dict)]
    for table, row in printed:
        if "name" in row:
            figures = dict(row.get("figures", {}))
            for _, other in printed:
                if other.get("same") == row["name"]:
                    for part in other.get("figures", []):  # a mapping has figures of the other table only
                        figures = {**part, **figures} if isinstance(part, dict) else figures
            paper = {"source": f"{table['paper']}, {table['table']}: {row['row']}", **figures}
            shared = {key: table[key] for key in ("group", "hardware") if key in table}
            settings = {key: value for key, value in row.items() if key not in _PRINTED}
            written_rows[row["name"]] = {**shared, **settings, "paper": paper}
    rows: dict[str, Row] = {}
    for name, written in written_rows.items():
        expanded = {name: {key: value for key, value in written.items() if key not in _EXPANDED}}
        for seed in written.get("seeds", ()):
            train = {**written.get("train", {}), "seed": seed}
            expanded[f"{name}{SEED}{seed}"] = {**expanded[name], "train": train}
        for variant in written.get("variants", ()):
            base = {key: written[key] for key in ("embedding", "group") if key in written}
            expanded[f"{name}_{variant}"] = {**base, **variants[variant]}
        rows |= {full_name: row_of(full_name, settings) for full_name, settings in expanded.items()}
    return rows


def _in_group(settings: Content, name: str, path: Path) -> Content:
    """Return settings with those of a group, ``NAME`` or ``RECIPE/NAME``, and of the groups that it extends.

    The first ones take precedence, in mappings option by option.
    """
    recipe, _, local_name = name.rpartition("/")
    path = path.parents[1] / recipe / FILE if recipe else path
    group: Content = read_file(path)["groups"][local_name]
    if "extends" in group:
        group = _in_group(group, group["extends"], path)
    both = [key for key in group.keys() & settings.keys() if isinstance(settings[key], dict)]
    return {**group, **settings, **{key: {**group[key], **settings[key]} for key in both}}


# Rows of --smoke: options that replace those of a row, where it has them, and options that it always gets.
# Methods' that depend on the vocabulary or the number of steps; onmt_train's; lm_train's and lm_evaluate's.
_LESS: dict[str, Content] = {
    "embedding": {"num_clusters": 16, "min_rank": 2, "num_classes": CLASSES, "relu_dropout_steps": 2},
    "translation": {"batch_size": 256, "accum_count": [1]},
    "search": {"beam_size": 2, "n_best": 2},
    "language_model": {
        **{"hidden_dim": 32, "num_heads": 2, "head_dim": 8, "feed_forward_dim": 32},
        **{"memory_length": 20, "clamp_length": 20, "target_length": 20, "ngram_rows": 500},
    },
}
_ALWAYS: dict[str, Content] = {
    "translation": {
        **{"enc_layers": 1, "dec_layers": 1, "transformer_ff": 32, "train_steps": 4, "valid_steps": 2},
        **{"save_checkpoint_steps": 2, "report_every": 1, "bucket_size": 256, "num_workers": 0},
    },
    "language_model": {"epochs": 2, "batch_size": 4, "sequence_length": 40, "log_every": 5},
}
_COUNTED_IN_STEPS = ("steps", "evaluate_every", "warmup_steps")


def smoke_row(row: Row) -> Row:
    """Return a row with a tiny network, the same method for a small vocabulary, and few steps."""

    def less(options: Content, smaller: Content) -> Content:
        return {**options, **{name: value for name, value in smaller.items() if name in options}}

    embedding = less(row.embedding, _LESS["embedding"])
    if "cutoffs" in embedding:
        embedding["cutoffs"] = list(CUTOFFS[: len(embedding["cutoffs"])])
    if embedding["method"] == "group_reduce":
        embedding["num_groups"] = min(4, embedding["num_groups"])
    if "classes" in embedding and "pieces" in row.data:
        embedding["classes"] = classes_file(CLASSES)
    changes: Content = {"embedding": embedding}
    for key in ("distill", "fit"):
        start = getattr(row, key)
        if start and start.get("embedding_start") != "random":
            changes[key] = {**less(start, {"recover_steps": FIT_STEPS}), "fit_steps": FIT_STEPS}
    if "model" in row.train:
        smaller = _LESS["language_model"]
        for key in ("train", "finetune"):
            if options := getattr(row, key):  # widths of embeddings stay
                changes[key] = {**less(options, smaller), **_ALWAYS["language_model"]}
                # The first and the last layer of an LSTM may have different widths.
                changes[key]["num_layers"] = min(2, options["num_layers"])
                for name in _COUNTED_IN_STEPS:
                    changes[key].pop(name, None)
        return replace(row, **changes, evaluate=less(row.evaluate, smaller), data={})
    return replace(
        row,
        **changes,
        train={**less(row.train, _LESS["translation"]), **_ALWAYS["translation"]},
        translate={**less(row.translate, _LESS["search"]), "max_length": LONGEST},
        batch=None if row.batch is None else {"tokens": 512, "per_gpu": 256},
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
    def page(self) -> Path:
        """The file with the tables of its results: the ``page`` in ``rows.yaml``, or its README."""
        return (self.folder / str(read_file(self.folder / FILE).get("page", "README.md"))).resolve()

    @property
    def home(self) -> Path:
        """The output folder: ``$RUNS/NAME``, with ``--smoke`` ``$RUNS/NAME/smoke``."""
        home = runs_folder() / self.name
        return home / SMOKE_FOLDER if self.is_smoke else home

    @property
    def data(self) -> Path:
        """The folder of prepared data."""
        return self.home / "data"

    @property
    def rows(self) -> dict[str, Row]:
        """The rows by name, in file order; empty without ``rows.yaml``."""
        path = self.folder / FILE
        rows = dict(read_rows(path, path.stat().st_mtime_ns)) if path.is_file() else {}
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
        return str(path), dict(read_yaml(path))

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
        if "method" not in embedding:
            return embedding
        names = se.get_method_config(embedding["method"]).file_options
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


def list_rows(arguments: Sequence[str]) -> None:
    """List the rows of one or all recipes, with the rows of papers that they reproduce."""
    parser = Parser("python -m recipes list", description=list_rows.__doc__)
    parser.add_argument("task", nargs="?", help="a recipe (default: all)")
    options = parser.parse_args(arguments)
    for name in [options.task] if options.task else recipe_names():
        for row in find_recipe(name).rows.values():
            source = (row.paper or {}).get("source", "")
            print(f"{name} {row.name}" + (f": {source}" if source else ""))


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


def preprocess_parser(description: str | None) -> Parser:
    """Return the parser of a preprocess.sh, with the options ``--settings FILE`` and ``--smoke``."""
    parser = Parser("preprocess.sh", description=description)
    parser.add_argument("--settings", type=existing_file, help="a file in place of 'data' in rows.yaml")
    parser.add_argument(SMOKE, action="store_true", help=SMOKE_HELP)
    return parser
