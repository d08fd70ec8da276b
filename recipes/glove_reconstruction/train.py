"""The cells of a grid, fitted to the source vectors and measured."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
import zipfile
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import shared_embeddings as se
from recipes.common.recipe import FILE, Recipe, read_file
from recipes.common.results import FILE as RESULTS
from recipes.common.results import SMOKE_FOLDER, find_result, write_result
from recipes.common.smoke import SMOKE
from recipes.common.tools import parse_settings, read_json
from shared_embeddings.accounting import distinct_state
from shared_embeddings.analysis import WordPairs, read_pairs, word_similarity
from shared_embeddings.compress.fit import report
from shared_embeddings.compress.sizing import options_within
from shared_embeddings.quant.packed_tensor import install
from shared_embeddings.quant.storage import hold, pack
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import replacing
from shared_embeddings.utils.options import parse_options
from shared_embeddings.words.vectors import WordVectors

DEFAULT = "full"
# Number of words for --smoke.
CHOSEN = 60
FIT_STEPS = "fit_steps"
# Options of ALONE that are set per cell.
_OF_THE_CELL = ("hidden_dim", "seed")
# A plain table would be exact; ALONE has separate rows.
_NOT_COMPARED = ("standard", "alone")
SMOKE_DATA_HELP = f"use random vectors of a few words, in a separate folder {SMOKE_FOLDER}"
SMOKE_GRID_HELP = "use a small grid and the data of preprocess.sh --smoke"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One embedding to fit to the source vectors: a row of ALONE, another method, or a row of one size.

    ``hidden`` is D_inter of ALONE, which determines the size of other methods; None for rows of one size.
    """

    row: str
    hidden: int | None
    seed: int

    @property
    def name(self) -> str:
        return self.row if self.hidden is None else f"{self.row}-{self.hidden}-{self.seed}"


@dataclasses.dataclass(frozen=True)
class Training:
    """How rows of ALONE are trained."""

    epochs: int = 1000
    batch_size: int = 256
    learning_rate: float = 0.001
    schedule: Literal["constant", "cosine"] = "constant"

    def __post_init__(self) -> None:
        if not (isinstance(self.learning_rate, (int, float)) and 0 < self.learning_rate < math.inf):
            raise UserError(f"learning_rate is {self.learning_rate!r}; it must be a number above 0")


@dataclasses.dataclass(frozen=True)
class Grid:
    """A grid of ``rows.yaml``, which explains each part.

    Optional parts are ``fit_steps`` for methods that are fitted by gradient descent (default: the method's),
    ``learning_rates`` of rows of ALONE that differ from ``training``, and ``fixed``, rows of one size.
    """

    words: int
    alone: dict[str, dict[str, Any]]
    hidden: tuple[int, ...]
    seeds: tuple[int, ...]
    training: Training = Training()
    fit_steps: int | None = None
    learning_rates: dict[str, float] = dataclasses.field(default_factory=dict)
    fixed: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def training_of(self, row: str) -> dict[str, Any]:
        """Return the training settings of a row of ALONE."""
        rate = self.learning_rates.get(row, self.training.learning_rate)
        return dataclasses.asdict(dataclasses.replace(self.training, learning_rate=rate))

    def sizes(self) -> list[tuple[str, int | None]]:
        """Return all rows and widths: the rows of ALONE, the other methods, and rows of one size."""
        rows = [*self.alone, *(method for method in se.methods() if method not in _NOT_COMPARED)]
        several = [(row, hidden) for row in rows for hidden in self.hidden]
        return [*several, *((row, None) for row in self.fixed)]

    def cells(self) -> list[Cell]:
        """Return all cells by row, smallest first."""
        return [
            Cell(row, hidden, seed)
            for row, hidden in self.sizes()
            for seed in (self.seeds if row in self.alone else self.seeds[:1])
        ]

    def chosen(self, patterns: Sequence[str]) -> list[Cell]:
        """Return the cells whose names match one of the patterns."""
        cells = self.cells()
        for pattern in patterns:
            if not any(fnmatchcase(cell.name, pattern) for cell in cells):
                raise UserError(
                    f"no cell matches {pattern!r}; cells are ROW-HIDDEN-SEED, such as "
                    f"{cells[0].name}, see --list"
                )
        return [cell for cell in cells if any(fnmatchcase(cell.name, pattern) for pattern in patterns)]

    def embedding(self, cell: Cell, words: int, dim: int) -> dict[str, Any]:
        """Return the method and options of a cell, for V words in D dimensions.

        Other methods have as many bytes, including codes, as ALONE's parameters at the same width; ALONE's
        filters follow from a seed.
        """
        if cell.hidden is None:
            return {name: value for name, value in self.fixed[cell.row].items() if name != "store"}
        if cell.row in self.alone:
            return {"method": "alone", "hidden_dim": cell.hidden, **self.alone[cell.row], "seed": cell.seed}
        limit = 4 * se.num_parameters(
            "alone", num_embeddings=words, embedding_dim=dim, hidden_dim=cell.hidden
        )
        try:
            options = dict(options_within(cell.row, words, dim, limit))
        except se.OptionError as error:
            raise UserError(f"{cell.name}: {error}") from error
        # A fit determines the classes.
        options.pop("random_classes", None)
        return {"method": cell.row, **options}


def read_grid(recipe: Recipe, name: str = DEFAULT) -> Grid:
    """Return a grid of a recipe's ``rows.yaml``; with ``--smoke``, a small one with the same rows."""
    path = recipe.folder / FILE
    grids = read_file(path).get("grids", {})
    if name not in grids:
        raise UserError(f"{path}: no grid {name!r}; there are: {', '.join(grids)}")
    grid = parse_grid(f"{path}: {name}", grids[name])
    if not recipe.is_smoke:
        return grid
    training = dataclasses.replace(grid.training, epochs=2, batch_size=20)
    seeds = grid.seeds[:1]
    return dataclasses.replace(grid, words=CHOSEN, hidden=(16,), seeds=seeds, fit_steps=20, training=training)


def parse_grid(where: str, content: dict[str, Any]) -> Grid:
    """Check the content of a grid."""
    content = dict(content) if isinstance(content, dict) else {}
    training = parse_settings(f"{where}: training", Training, content.pop("training", None))
    grid = dataclasses.replace(parse_options(where, Grid, content), training=training)
    if grid.words < 2 or not grid.hidden or not grid.seeds or grid.fit_steps == 0:
        raise UserError(f"{where}: words < 2, fit_steps < 1, or no hidden or seeds; change them")
    for part, rows in (("alone", grid.alone), ("fixed", grid.fixed)):
        if any(not isinstance(row, dict) for row in rows.values()):
            raise UserError(f"{where}: {part} is {rows!r}; it must be options by row")
        if clash := sorted(set(rows) & set(se.methods())):
            raise UserError(f"{where}: {part}: row {clash[0]!r} is also a method; give it another name")
    for row, options in grid.alone.items():
        if clash := [name for name in options if name in _OF_THE_CELL]:
            raise UserError(f"{where}: alone: {row}: {clash[0]!r} is set per cell; remove it")
    for row, options in grid.fixed.items():
        if options.get("method") not in se.methods():
            methods = ", ".join(se.methods())
            raise UserError(
                f"{where}: fixed: {row}: method is {options.get('method')!r}; choose one of {methods}"
            )
    if not set(grid.learning_rates) <= set(grid.alone):
        rates = grid.learning_rates
        raise UserError(f"{where}: learning_rates is {rates!r}; it must be numbers by row of alone")
    for row in grid.learning_rates:
        grid.training_of(row)
    return grid


def add_grid_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--grid`` to a parser."""
    parser.add_argument("--grid", default=DEFAULT, help="a grid of rows.yaml (default: %(default)s)")


def write_source(vectors: WordVectors, path: Path) -> None:
    """Write words and their vectors ``(V, D)`` atomically."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, words=np.array(vectors.words), vectors=vectors.vectors)


def read_source(path: Path) -> WordVectors:
    """Read a file written by `write_source`."""
    try:
        with np.load(path, allow_pickle=False) as found:
            return WordVectors(found["words"].tolist(), found["vectors"])
    except FileNotFoundError:
        raise UserError(f"{path}: no prepared vectors; run preprocess.sh") from None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: is damaged ({error}); run preprocess.sh again") from error


def score(vectors: WordVectors, tests: Sequence[WordPairs]) -> dict[str, dict[str, Any]]:
    """Return Spearman's rho and the number of known pairs for every set of pairs."""
    found = (word_similarity(vectors.words, vectors.vectors, test) for test in tests)
    return {one.name: {"rho": one.rho, "known": one.known, "pairs": one.pairs} for one in found}


def fit_alone(
    teacher: Tensor, options: Mapping[str, Any], training: Mapping[str, Any], title: str
) -> se.SharedEmbedding:
    """Minimize the mean of ``||e - FFN(m * o)||**2`` over words (ALONE, Eq. 4) with Adam.

    Batches are sampled uniformly from the vocabulary; an epoch has V words (section 3.1).

    Args:
        teacher: ``(V, D)``.
        options: options of `alone`, including ``seed``.
        training: of `Training`.
        title: of the progress bar.
    """
    words, dim = teacher.shape
    with torch.random.fork_rng():
        torch.manual_seed(options["seed"])
        embedding = se.build("alone", num_embeddings=words, embedding_dim=dim, **options)
    draw = torch.Generator().manual_seed(options["seed"])
    parameters = [parameter for parameter in embedding.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=training["learning_rate"])
    batch = min(training["batch_size"], words)
    steps = training["epochs"] * -(-words // batch)
    schedule = (
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        if training["schedule"] == "cosine"
        else torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    )
    bar = tqdm(range(steps), desc=title, unit=" steps", mininterval=1.0)
    for _ in bar:
        ids = torch.randint(words, (batch,), generator=draw)
        loss = (embedding(ids) - teacher[ids]).square().sum(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if bar.n % 50 == 0:
            bar.set_postfix(loss=f"{float(loss.detach()):.4g}", refresh=False)
    return embedding.eval()


def run_cell(home: Path, grid: Grid, cell: Cell, words: WordVectors, data: Mapping[str, Any]) -> Path:
    """Fit one cell to the source vectors, measure it, write its result, and return the results file."""
    teacher = torch.from_numpy(words.vectors)
    config = wanted_config(grid, cell, teacher)
    method, options = config["embedding"]["method"], dict(config["embedding"])
    del options["method"]
    started = time.perf_counter()
    if cell.row in grid.alone:
        embedding = fit_alone(teacher, options, config["training"], cell.name)
    else:
        embedding, _ = se.fit(method, teacher, seed=cell.seed, steps=grid.fit_steps, **options)
        embedding.eval()
        if store := config.get("store"):
            state = distinct_state(embedding)
            embedding.load_state_dict(install(embedding, hold(pack(state, state, store))), strict=False)
    found = report(embedding, teacher, seconds=time.perf_counter() - started)
    with torch.no_grad():
        reconstructed = WordVectors(words.words, embedding.table().numpy())
    tests = [read_pairs(home / "data" / "pairs" / name) for name in data["pairs"]]
    return write_result(
        home,
        cell.name,
        config=config,
        counts={"embedding": found.parameters, "stored_bits": found.stored_bits, "table": teacher.numel()},
        metrics={
            "squared_loss": found.squared_loss,
            "relative_error": found.relative_error,
            "similarity": score(reconstructed, tests),
            "source_similarity": data["source"],
            "training_seconds": found.seconds,
        },
        data_checksum=data["checksum"],
    )


def wanted_config(grid: Grid, cell: Cell, teacher: Tensor) -> dict[str, Any]:
    """Return all settings that determine the result of a cell."""
    config = {**vars(cell), "embedding": grid.embedding(cell, *teacher.shape)}
    if cell.row in grid.alone:
        return {**config, "training": grid.training_of(cell.row)}
    if store := grid.fixed.get(cell.row, {}).get("store"):
        config["store"] = store
    return config if grid.fit_steps is None else {**config, FIT_STEPS: grid.fit_steps}


def is_done(home: Path, grid: Grid, cell: Cell, teacher: Tensor, data: Mapping[str, Any]) -> bool:
    """Return whether a cell has a result in the folder `home`."""
    found = find_result(home, cell.name)
    if found is None:
        return False
    wanted = json.loads(json.dumps(wanted_config(grid, cell, teacher)))
    if found.get("config") != wanted or found.get("data_checksum") != data["checksum"]:
        raise UserError(
            f"{home / RESULTS}: {cell.name} has other settings or vectors; move it away or restore them"
        )
    return True


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Fit and measure cells of the grid; cells with results are skipped."""
    parser = Parser("train.sh", description=main.__doc__)
    parser.add_argument(
        "cells", nargs="*", default=["*"], help="names or patterns such as 'alone_real-*-0' (default: all)"
    )
    parser.add_argument("--list", action="store_true", help="only list the cells")
    add_grid_option(parser)
    parser.add_argument(SMOKE, action="store_true", help=SMOKE_GRID_HELP)
    options = parser.parse_args(arguments)
    recipe = recipe.smoke() if options.smoke else recipe
    grid = read_grid(recipe, options.grid)
    cells = grid.chosen(options.cells)
    if options.list:
        print("\n".join(cell.name for cell in cells))
        return
    data = read_json(recipe.data / "data.json")
    if data is None:
        raise UserError(f"{recipe.data}: no prepared vectors; run preprocess.sh")
    words = read_source(recipe.data / "source.npz")
    if len(words.words) != grid.words:
        raise UserError(
            f"{recipe.data}: {len(words.words)} words are prepared, but the grid has 'words: {grid.words}'; "
            "run preprocess.sh with this grid"
        )
    teacher = torch.from_numpy(words.vectors)
    reasons = []
    for cell in list(cells):
        try:
            wanted_config(grid, cell, teacher)
        except UserError as error:  # the method cannot be small enough
            cells.remove(cell)
            reasons.append(str(error))
    if not cells:
        raise UserError(reasons[0])
    for reason in reasons:
        print(f"skipped: {reason}", flush=True)
    left = [cell for cell in cells if not is_done(recipe.home, grid, cell, teacher, data)]
    print(f"{len(cells)} cells, {len(cells) - len(left)} of them have results", flush=True)
    for cell in left:
        print(f"{cell.name}: wrote {run_cell(recipe.home, grid, cell, words, data)}", flush=True)
