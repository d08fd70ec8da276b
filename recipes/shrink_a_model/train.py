"""Trim and compress the model, row by row."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from recipes.common.recipe import Recipe
from recipes.common.rows import FILE, read_file
from recipes.common.smoke import SMOKE, SMOKE_HELP
from recipes.common.tools import print_line, run_module, run_step
from recipes.shrink_a_model.preprocess import CAPTIONS, DECODER, MODEL, TEXT, get_decoder
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.reading import read_yaml

COMMAND = "shared_embeddings.cli.main"
WEIGHTS = "model.safetensors"
ORIGINAL = "original"


@dataclass(frozen=True)
class ShrinkRow:
    """One model.

    Attributes:
        name: of the row.
        trim: whether the vocabulary is trimmed to the texts.
        ratio: how many times fewer bytes its table takes than before compression, or None.
        embedding: method and options; empty where `compress` chooses them, or nothing is compressed.
        decoder: whether it is the decoder instead of the encoder.
    """

    name: str
    trim: bool = False
    ratio: float | None = None
    embedding: dict[str, Any] = field(default_factory=dict)
    decoder: bool = False

    @property
    def is_compressed(self) -> bool:
        """Whether its table is replaced."""
        return bool(self.embedding) or self.ratio is not None


def read_grid(recipe: Recipe) -> dict[str, ShrinkRow]:
    """The rows of ``rows.yaml`` by name, with ``--smoke`` those of the small grid.

    Raises:
        UserError: a row has an unknown key.
    """
    path = recipe.folder / FILE
    rows = read_file(path)["grids"]["smoke" if recipe.is_smoke else "full"]
    try:
        return {name: ShrinkRow(name, **settings) for name, settings in rows.items()}
    except TypeError as error:
        raise UserError(
            f"{path}: grids: {error}; a row may hold trim, ratio, embedding and decoder"
        ) from error


def chosen_rows(recipe: Recipe, patterns: Sequence[str]) -> list[ShrinkRow]:
    """The rows whose names match one of the patterns, in the order of the file.

    Raises:
        UserError: a pattern matches none.
    """
    rows = read_grid(recipe)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in rows):
            raise UserError(f"no row is called {pattern!r}; there are: {', '.join(rows)}")
    return [row for name, row in rows.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]


def model_folder(home: Path, row: ShrinkRow) -> Path:
    """The folder of the model of a row."""
    return home / "models" / row.name


def shrink(recipe: Recipe, row: ShrinkRow) -> None:
    """Write the model of a row unless it is there, from the same model and settings."""
    data, step = recipe.data, partial(run_step, stamps=recipe.home / "steps")
    source, text, folder = data / MODEL, data / TEXT, model_folder(recipe.home, row)
    settings, outputs = dict(vars(row)), [folder / WEIGHTS]
    if row.decoder:
        get_decoder(read_yaml(recipe.folder / "data.yaml")["decoder"], recipe.home)
        source, captions = data / DECODER, data / CAPTIONS
        trim_to = [text] if row.trim else []
        compress = partial(_compress, source, captions, folder, row, *trim_to)
        inputs = [source / WEIGHTS, captions, *trim_to]
        step(row.name, action=compress, inputs=inputs, outputs=outputs, settings=settings)
        return
    if row.trim:
        trimmed = model_folder(recipe.home, ShrinkRow("trimmed"))
        trim = partial(_trim, source, text, trimmed)
        inputs = [source / WEIGHTS, text]
        step("trimmed", action=trim, inputs=inputs, outputs=[trimmed / WEIGHTS], settings={})
        source = trimmed
    if row.is_compressed:
        compress = partial(_compress, source, text, folder, row)
        del settings["decoder"]
        step(row.name, action=compress, inputs=[source / WEIGHTS, text], outputs=outputs, settings=settings)
    elif not row.trim:
        shutil.copytree(source, folder, dirs_exist_ok=True)


def _trim(model: Path, text: Path, output: Path) -> None:
    """Trim the vocabulary of a model to a text."""
    shutil.rmtree(output, ignore_errors=True)
    run_module(COMMAND, ["trim", "--model", model, "--text", text, "--output", output])


def _compress(model: Path, text: Path, output: Path, row: ShrinkRow, trim_to: Path | None = None) -> None:
    """Replace the table of a model, maybe after trimming it to a text."""
    arguments: list[str | Path] = ["compress", "--model", model, "--text", text, "--output", output]
    arguments += ["--report", output.with_suffix(".json"), "--force"]
    if trim_to is not None:
        arguments += ["--trim-to", trim_to]
    if row.ratio is not None:
        arguments += ["--target-ratio", str(row.ratio)]
    for name, value in row.embedding.items():
        arguments += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    output.parent.mkdir(parents=True, exist_ok=True)
    run_module(COMMAND, arguments)


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Write the models of the rows; those that are up to date are kept."""
    parser = Parser("train.sh", description=main.__doc__)
    parser.add_argument("rows", nargs="*", help="names or patterns, 'automatic_*'; all of the encoder")
    parser.add_argument("--list", action="store_true", help="only list the rows")
    parser.add_argument(SMOKE, action="store_true", help=SMOKE_HELP)
    options = parser.parse_args(arguments)
    recipe = recipe.smoke() if options.smoke else recipe
    rows = chosen_rows(recipe, options.rows or ["*"])
    if not options.rows and not options.list:
        rows = [row for row in rows if not row.decoder]
    if options.list:
        print("\n".join(row.name for row in rows))
        return
    recipe.describe_data(recipe.data)  # fails where there are none
    for row in rows:
        shrink(recipe, row)
        print_line(f"{row.name}: {model_folder(recipe.home, row)}")
