"""Fit cells of the grid to the source vectors and measure them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import shared_embeddings as se
from recipes.common.recipe import Recipe
from recipes.common.results import FILE, find_result, write_result
from recipes.common.smoke import SMOKE
from recipes.common.tools import read_json
from recipes.glove_reconstruction.grid import FIT_STEPS, Cell, Grid, add_grid_option, read_grid
from recipes.glove_reconstruction.source import SMOKE_GRID_HELP, read_source, score
from shared_embeddings.analysis.similarity import read_pairs
from shared_embeddings.analysis.vectors import WordVectors
from shared_embeddings.errors import UserError
from shared_embeddings.fitting.fit import report
from shared_embeddings.quant.packed_tensor import install
from shared_embeddings.quant.storage import hold, pack
from shared_embeddings.sizing.accounting import distinct_state
from shared_embeddings.utils.command_line import Parser


def fit_alone(
    teacher: Tensor, options: Mapping[str, Any], training: Mapping[str, Any], title: str
) -> se.SharedEmbedding:
    """Minimize the mean of ``||e - FFN(m * o)||**2`` over words (ALONE, Eq. 4) with Adam.

    Batches are sampled uniformly from the vocabulary; an epoch has V words (section 3.1).

    Args:
        teacher: ``(V, D)``.
        options: options of `alone`, including ``seed``.
        training: ``epochs``, ``batch_size``, ``learning_rate`` and ``schedule``.
        title: title of the progress bar.
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
    """Fit and measure one cell, write its result, and return the results file.

    Args:
        home: output folder of the recipe.
        grid: grid of the cell.
        cell: the cell.
        words: source vectors.
        data: description of the data.
    """
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
    """Return whether a cell has a result in the folder `home`.

    Raises:
        UserError: the result has other settings or vectors.
    """
    found = find_result(home, cell.name)
    if found is None:
        return False
    wanted = json.loads(json.dumps(wanted_config(grid, cell, teacher)))
    if found.get("config") != wanted or found.get("data_checksum") != data["checksum"]:
        raise UserError(
            f"{home / FILE}: {cell.name} has other settings or vectors; move the file away, or restore them"
        )
    return True


def _possible(grid: Grid, cells: Sequence[Cell], teacher: Tensor) -> list[Cell]:
    """Return the cells whose method can be small enough, and report the others."""
    possible, reasons = [], []
    for cell in cells:
        try:
            wanted_config(grid, cell, teacher)
            possible.append(cell)
        except UserError as error:
            reasons.append(str(error))
    if not possible:
        raise UserError(reasons[0])
    for reason in reasons:
        print(f"skipped: {reason}", flush=True)
    return possible


def prepared(folder: Path) -> tuple[WordVectors, dict[str, Any]]:
    """Read the source vectors and the description of the prepared data.

    Raises:
        UserError: the data are not prepared.
    """
    data = read_json(folder / "data.json")
    if data is None:
        raise UserError(f"{folder}: no prepared vectors; run preprocess.sh")
    return read_source(folder / "source.npz"), data


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
    words, data = prepared(recipe.data)
    if len(words.words) != grid.words:
        raise UserError(
            f"{recipe.data}: {len(words.words)} words are prepared, but the grid has 'words: {grid.words}'; "
            "run preprocess.sh with this grid"
        )
    teacher = torch.from_numpy(words.vectors)
    cells = _possible(grid, cells, teacher)
    left = [cell for cell in cells if not is_done(recipe.home, grid, cell, teacher, data)]
    print(f"{len(cells)} cells, {len(cells) - len(left)} of them have results", flush=True)
    for cell in left:
        print(f"{cell.name}: wrote {run_cell(recipe.home, grid, cell, words, data)}", flush=True)
