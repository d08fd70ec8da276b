"""Reconstruction of word vectors: preparation, cells of a grid that are fitted, and the tables and figures.

Axes: ``V`` words that are reconstructed, ``D`` dimension.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import shared_embeddings as se
from lm.data import datasets
from recipes.common.plot import (
    PLAIN,
    best_of_each_size,
    draw_lines,
    draw_points,
    finish,
    format_name,
    new_figure,
    shown_method,
    style,
    write_png,
)
from recipes.common.recipe import FILE, Recipe, read_file
from recipes.common.results import FILE as RESULTS
from recipes.common.results import SMOKE_FOLDER, Record, find_result, read_results, write_result
from recipes.common.smoke import SMOKE, generated_vocabulary
from recipes.common.table import Column, markdown_table, update_readme
from recipes.common.tools import locate, parse_settings, read_json, run_step, write_json
from shared_embeddings.accounting import distinct_state
from shared_embeddings.analysis import WordPairs, read_pairs, word_similarity
from shared_embeddings.compress.fit import report
from shared_embeddings.compress.sizing import options_within
from shared_embeddings.modules.alone import AloneOptions
from shared_embeddings.quant.packed_tensor import install
from shared_embeddings.quant.storage import hold, pack
from shared_embeddings.utils.command_line import Parser, positive
from shared_embeddings.utils.download import download, verify
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import replacing, sha256, write_lines, write_text
from shared_embeddings.utils.options import parse_options
from shared_embeddings.utils.path_options import PathOption
from shared_embeddings.words.classes import train_word_vectors
from shared_embeddings.words.token_counts import count_words
from shared_embeddings.words.vectors import WordVectors, read_vectors

# Folder of the word pairs in $DATA_DIR.
WORD_PAIRS = "word-similarity"
# Special tokens of the corpora.
_MARKERS = ("<unk>", "<eos>")
# Words, dimensions and pairs of --smoke; words of its grid.
WORDS, DIMENSIONS, PAIRS, CHOSEN = 80, 12, 50, 60
SMOKE_GRID_HELP = "use a small grid and the data of preprocess.sh --smoke"
# Pictures and markers of the README.
FIGURE, COMPARED = "figure3.png", "compressed.png"
MARKER, COMPARISON = "results", "comparison"
# Sets with fewer known pairs are not compared: their rho means little.
_LEAST_PAIRS = 100


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Training:
    """How rows of ALONE are trained."""

    epochs: int = 1000
    batch_size: int = 256
    learning_rate: float = 0.001
    schedule: Literal["constant", "cosine"] = "constant"

    def __post_init__(self) -> None:
        if not (isinstance(self.learning_rate, (int, float)) and 0 < self.learning_rate < math.inf):
            raise UserError(f"learning_rate is {self.learning_rate!r}; it must be a number above 0")


@dataclass(frozen=True)
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
    learning_rates: dict[str, float] = field(default_factory=dict)
    fixed: dict[str, dict[str, Any]] = field(default_factory=dict)

    def sizes(self) -> list[tuple[str, int | None]]:
        """Return all rows and widths: the rows of ALONE, the other methods, and rows of one size."""
        # A plain table would be exact; ALONE has separate rows.
        others = (method for method in se.methods() if method not in ("standard", "alone"))
        several = [(row, hidden) for row in (*self.alone, *others) for hidden in self.hidden]
        return [*several, *((row, None) for row in self.fixed)]

    def cells(self) -> list[Cell]:
        """Return all cells by row, smallest first."""
        return [
            Cell(row, hidden, seed)
            for row, hidden in self.sizes()
            for seed in (self.seeds if row in self.alone else self.seeds[:1])
        ]

    def chosen(self, patterns: Sequence[str]) -> list[Cell]:
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
        sizes = {"num_embeddings": words, "embedding_dim": dim}
        limit = 4 * se.num_parameters("alone", **sizes, hidden_dim=cell.hidden)
        try:
            options = dict(options_within(cell.row, words, dim, limit))
        except se.OptionError as error:
            raise UserError(f"{cell.name}: {error}") from error
        options.pop("random_classes", None)  # a fit determines the classes
        return {"method": cell.row, **options}

    def config(self, cell: Cell, words: int, dim: int) -> dict[str, Any]:
        """Return all settings that determine the result of a cell."""
        config = {**vars(cell), "embedding": self.embedding(cell, words, dim)}
        if cell.row in self.alone:
            rate = self.learning_rates.get(cell.row, self.training.learning_rate)
            return {**config, "training": asdict(replace(self.training, learning_rate=rate))}
        if store := self.fixed.get(cell.row, {}).get("store"):
            config["store"] = store
        return config if self.fit_steps is None else {**config, "fit_steps": self.fit_steps}


def read_grid(recipe: Recipe, name: str = "full") -> Grid:
    """Return a grid of a recipe's ``rows.yaml``; with ``--smoke``, a small one with the same rows."""
    path = recipe.folder / FILE
    grids = read_file(path).get("grids", {})
    if name not in grids:
        raise UserError(f"{path}: no grid {name!r}; there are: {', '.join(grids)}")
    where, content = f"{path}: {name}", dict(grids[name]) if isinstance(grids[name], dict) else {}
    training = parse_settings(f"{where}: training", Training, content.pop("training", None))
    grid = replace(parse_options(where, Grid, content), training=training)
    if grid.words < 2 or not grid.hidden or not grid.seeds or grid.fit_steps == 0:
        raise UserError(f"{where}: words < 2, fit_steps < 1, or no hidden or seeds; change them")
    for part, rows in (("alone", grid.alone), ("fixed", grid.fixed)):
        if any(not isinstance(row, dict) for row in rows.values()):
            raise UserError(f"{where}: {part} is {rows!r}; it must be options by row")
        if clash := sorted(set(rows) & set(se.methods())):
            raise UserError(f"{where}: {part}: row {clash[0]!r} is also a method; give it another name")
    for row, options in grid.alone.items():
        if clash := [name for name in options if name in ("hidden_dim", "seed")]:
            raise UserError(f"{where}: alone: {row}: {clash[0]!r} is set per cell; remove it")
    for row, options in grid.fixed.items():
        if options.get("method") not in se.methods():
            methods = ", ".join(se.methods())
            raise UserError(
                f"{where}: fixed: {row}: method is {options.get('method')!r}; choose one of {methods}"
            )
    rates = grid.learning_rates
    if not set(rates) <= set(grid.alone):
        raise UserError(f"{where}: learning_rates is {rates!r}; it must be numbers by row of alone")
    for rate in rates.values():
        Training(learning_rate=rate)  # checks it
    if not recipe.is_smoke:
        return grid
    training = replace(training, epochs=2, batch_size=20)
    return replace(grid, words=CHOSEN, hidden=(16,), seeds=grid.seeds[:1], fit_steps=20, training=training)


def add_grid_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--grid`` to a parser."""
    parser.add_argument("--grid", default="full", help="a grid of rows.yaml (default: %(default)s)")


# preprocess.sh


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


def download_glove(entry: Mapping[str, Any], folder: Path) -> Path:
    """Return the text of GloVe's vectors, after downloading and unpacking it if necessary.

    An entry has ``url``, ``file`` in the archive, and ``sha256`` of the archive or None.
    """
    text = folder / entry["file"]
    if text.is_file():
        return text
    archive = folder / entry["url"].rsplit("/", 1)[-1]
    if archive.is_file():
        verify(archive, entry["sha256"])
    else:
        download(entry["url"], archive, entry["sha256"], "when offline, give a file with --vectors")
    try:
        # Reading to the end verifies the checksum in the archive.
        with zipfile.ZipFile(archive) as packed, packed.open(entry["file"]) as source:
            with replacing(text) as temporary, temporary.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"{archive}: is damaged or lacks {entry['file']} ({error}); remove it") from error
    return text


def train_source(texts: Sequence[Path], settings: Mapping[str, Any], output: Path) -> None:
    """Train skip-gram vectors on lowercased texts, and write them in order of word frequency."""
    lower = output.with_suffix(".txt")
    with replacing(lower) as temporary, temporary.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(text.read_text(encoding="utf-8").lower())
    counts = count_words([lower])
    kept = [word for word in counts if counts[word] >= settings["min_count"] and word not in _MARKERS]
    # Sorting is stable: ties keep their order.
    words = sorted(kept, key=lambda word: -counts[word])
    asked = {name: settings[name] for name in ("dim", "window", "epochs", "seed")}
    write_source(WordVectors(words, train_word_vectors([lower], words, **asked)), output)


def most_frequent(source: WordVectors, number: int, counts: Mapping[str, int] | None) -> WordVectors:
    """Return the most frequent words of the source, by counts or in the order of the source.

    Counts of words that the source has only in lowercase are added to the lowercase word.
    """
    places = {word: place for place, word in enumerate(source.words)}
    chosen = list(range(len(source.words)))
    if counts is not None:
        found: Counter[int] = Counter()
        for word, count in counts.items():
            place = places.get(word, places.get(word.lower()))
            if place is not None and word not in _MARKERS:
                found[place] += count
        chosen = sorted(found, key=lambda place: (-found[place], place))
    if len(chosen) < number:
        raise UserError(
            f"there are {len(chosen)} words, fewer than 'words: {number}' in rows.yaml; lower it, or use "
            "other vectors or texts"
        )
    chosen = chosen[:number]
    return WordVectors([source.words[place] for place in chosen], source.vectors[chosen])


def score(vectors: WordVectors, tests: Sequence[WordPairs]) -> dict[str, dict[str, Any]]:
    """Return Spearman's rho and the number of known pairs for every set of pairs."""
    found = (word_similarity(vectors.words, vectors.vectors, test) for test in tests)
    return {one.name: {"rho": one.rho, "known": one.known, "pairs": one.pairs} for one in found}


def write_smoke_vectors(folder: Path) -> Path:
    """Write random vectors in GloVe's format: a word and its numbers per line; return the file."""
    rows = np.random.default_rng(0).normal(size=(WORDS, DIMENSIONS))
    path = folder / "vectors.txt"
    numbers = (" ".join(f"{number:.5f}" for number in row) for row in rows)
    write_lines(path, (f"{word} {line}" for word, line in zip(generated_vocabulary(), numbers)))
    return path


def write_smoke_pairs(folder: Path, names: Sequence[str]) -> list[Path]:
    """Write files of random word pairs and scores, with the names of the published ones."""
    words = generated_vocabulary()[:WORDS]
    paths = [folder / name for name in names]
    for seed, path in enumerate(paths):
        draw = np.random.default_rng(seed)
        chosen = [draw.choice(words, size=2, replace=False) for _ in range(PAIRS)]
        write_lines(path, (f"{first}\t{second}\t{draw.uniform(0, 10):.2f}" for first, second in chosen))
    return paths


def preprocess(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare word vectors and word pairs in $RUNS/glove_reconstruction/data.

    Without --vectors or --glove, skip-gram vectors are trained on WikiText-2 from $DATA_DIR or the network.
    """
    _, settings = recipe.data_settings()
    parser = Parser("preprocess.sh", description=preprocess.__doc__)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--vectors", type=PathOption.FILE, help="vectors of GloVe, word2vec or fastText")
    chosen.add_argument("--glove", choices=sorted(settings["glove"]), help="download these vectors")
    chosen.add_argument(
        SMOKE,
        action="store_true",
        help=f"use random vectors of a few words, in a separate folder {SMOKE_FOLDER}",
    )
    parser.add_argument("--limit", type=positive, help="number of vectors to read")
    parser.add_argument(
        "--text",
        nargs="+",
        type=PathOption.FILE,
        default=[],
        help="tokenized texts to count words in; the most frequent words are used",
    )
    parser.add_argument(
        "--pairs", nargs="+", type=PathOption.FILE, help="files with two words and a score per line"
    )
    add_grid_option(parser)
    options = parser.parse_args(arguments)
    recipe = recipe.smoke() if options.smoke else recipe
    words, downloads = read_grid(recipe, options.grid).words, recipe.home / "downloads"
    names, url = settings["pairs"]["files"], settings["pairs"]["url"]
    if options.smoke:
        pairs = write_smoke_pairs(recipe.home / "raw", names)
        vectors = write_smoke_vectors(recipe.home / "raw")
    else:
        vectors = options.vectors
        if options.glove is not None:
            vectors = download_glove(settings["glove"][options.glove], downloads)
        if vectors is None:
            vectors = _skip_gram(recipe, settings["skipgram"], downloads)
        pairs = options.pairs or [locate(name, WORD_PAIRS, url, downloads) for name in names]
    try:
        every = read_source(vectors) if vectors.suffix == ".npz" else read_vectors(vectors, options.limit)
        counts = count_words(options.text) if options.text else None
        tests = [read_pairs(path) for path in pairs]
    except (ValueError, OSError, ImportError) as error:
        raise UserError(str(error)) from error
    source, folder = most_frequent(every, words, counts), recipe.data
    # Written last, to mark the preparation as complete.
    (folder / "data.json").unlink(missing_ok=True)
    write_source(source, folder / "source.npz")
    with replacing(folder / "pairs") as kept:  # the given files may be those in the old folder
        kept.mkdir()
        for path in pairs:
            shutil.copyfile(path, kept / path.name)
    description: dict[str, Any] = {
        "vectors": vectors.name,
        "vectors_sha256": sha256(vectors),
        "words": words,
        "dimensions": int(source.vectors.shape[1]),
        "order": "by count" if options.text else "of the file",
        "pairs": [path.name for path in pairs],
        "source": score(source, tests),
        "source_all_words": {"words": len(every.words), **score(every, tests)},
        "checksum": sha256(folder / "source.npz"),
    }
    write_json(folder / "data.json", description)
    print(f"{len(source.words):,} words, the first: {', '.join(source.words[:8])}")
    for name, result in description["source"].items():
        print(f"{name}: rho {result['rho']}, {result['known']} of {result['pairs']} pairs known")
    print(f"prepared {folder}")


def _skip_gram(recipe: Recipe, settings: Mapping[str, Any], downloads: Path) -> Path:
    """Return a file of skip-gram vectors, trained unless it is up to date."""
    data_dir = os.environ.get("DATA_DIR")
    own = Path(data_dir) if data_dir else None
    try:
        texts = datasets.locate(settings["dataset"], own, downloads)["train"]
    except ValueError as error:
        raise UserError(str(error)) from error
    vectors = recipe.home / "skipgram.npz"
    asked = (train_source, texts, settings, vectors)
    run_step(recipe.home / "steps", "skip-gram", texts, [vectors], *asked, **settings)
    return vectors


# train.sh


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
    config = grid.config(cell, *teacher.shape)
    options = dict(config["embedding"])
    method = options.pop("method")
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


def train(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Fit and measure cells of the grid; cells with results are skipped."""
    parser = Parser("train.sh", description=train.__doc__)
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
    configs, reasons = {}, []
    for cell in cells:
        try:
            configs[cell] = grid.config(cell, *words.vectors.shape)
        except UserError as error:  # the method cannot be small enough
            reasons.append(str(error))
    if not configs:
        raise UserError(reasons[0])
    for reason in reasons:
        print(f"skipped: {reason}", flush=True)
    left = []
    for cell, config in configs.items():
        found = find_result(recipe.home, cell.name)
        key = (json.loads(json.dumps(config)), data["checksum"])
        if found is None:
            left.append(cell)
        elif (found.get("config"), found.get("data_checksum")) != key:
            raise UserError(
                f"{recipe.home / RESULTS}: {cell.name} has other settings or vectors; "
                "move it away or restore them"
            )
    print(f"{len(configs)} cells, {len(configs) - len(left)} of them have results", flush=True)
    for cell in left:
        print(f"{cell.name}: wrote {run_cell(recipe.home, grid, cell, words, data)}", flush=True)


# eval.sh


def evaluate(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Write the results into the README's table, and plot Figure 3 next to it."""
    parser = Parser("eval.sh", description=evaluate.__doc__)
    parser.add_argument(
        "--results",
        type=PathOption.SOURCE,
        default=recipe.home,
        help="results.jsonl, or a folder with one (default: %(default)s)",
    )
    parser.add_argument(
        "--readme",
        type=PathOption.UPDATED,
        default=recipe.folder / "README.md",
        help="README with the markers (default: %(default)s)",
    )
    parser.add_argument(SMOKE, action="store_true", help=f"{SMOKE_GRID_HELP}, and a separate README")
    add_grid_option(parser)
    options = parser.parse_args(arguments)
    if options.smoke:
        recipe = recipe.smoke()
        options.results, options.readme = recipe.home, recipe.home / "README.md"
        markers = (f"<!-- BEGIN {name} -->\n<!-- END {name} -->\n" for name in (MARKER, COMPARISON))
        write_text(options.readme, "".join(markers))
    write_report(read_grid(recipe, options.grid), options.results, options.readme)


def write_report(grid: Grid, results: Path, readme: Path) -> None:
    """Write the results of a grid into a README, and plot the figures next to it.

    The vectors with the most results are those of ALONE's figure, and the vectors with the most rows of one
    size those of the comparison; they may be different ones.
    """
    records = read_results(results)
    if not records:
        raise UserError(f"{results}: no results; run train.sh first")
    by_vectors: dict[str, list[Record]] = {}
    for record in records:
        by_vectors.setdefault(record["data_checksum"], []).append(record)
    measured = {
        one["row"] for found in by_vectors.values() for one in summaries(grid, found) if one["metrics"]
    }
    if not measured:
        raise UserError(f"{results}: has no results of this grid; select another one with --grid")
    most = max(by_vectors.values(), key=len)
    summary = [one for one in summaries(grid, most) if one["metrics"] or one["row"] not in measured]
    source = most[0]["metrics"]["source_similarity"]
    alone = AloneOptions(hidden_dim=grid.hidden[0], **next(iter(grid.alone.values())))
    text = table(grid, summary, source) + (
        f"\nWith {alone.codebooks} codebooks of {alone.codebook_size} entries, two of the {grid.words:,} "
        f"words share all codes in ALONE with a probability of {alone.collision_probability(grid.words):.1e} "
        "(section 2.1).\n"
    )
    if any(record["metrics"] and record["config"]["row"] in grid.alone for record in summary):
        draw_figure(summary, source, grid, readme.parent / FIGURE)
        text += f"\n![Spearman's rho against the width]({FIGURE})\n"
    update_readme(readme, MARKER, text)

    def rows_of_one_size(found: Sequence[Record]) -> int:
        return sum(one["config"]["hidden"] is None for one in found)

    compared = max(by_vectors.values(), key=rows_of_one_size)
    if rows_of_one_size(compared):
        source = compared[0]["metrics"]["source_similarity"]
        found = [one for one in summaries(grid, compared) if one["metrics"]]
        found.sort(key=lambda one: one["counts"]["stored_bits"])
        draw_comparison(found, source, readme.parent / COMPARED)
        picture = f"![Error and Spearman's rho against the stored bytes]({COMPARED})"
        update_readme(readme, COMPARISON, f"{table(grid, found, source)}\n{picture}\n")
    print(f"wrote the results into {readme}")


def summaries(grid: Grid, records: Sequence[Record]) -> list[Record]:
    """Return one record per row and width with means over seeds; without metrics if there are no results."""
    found = []
    for row, hidden in grid.sizes():
        record: Record = {"row": f"{row}-{hidden}", "config": {"row": row, "hidden": hidden}}
        cells = [one for one in records if (one["config"]["row"], one["config"]["hidden"]) == (row, hidden)]
        if not cells:
            found.append({**record, "counts": {}, "metrics": {}})
            continue
        first, metrics = cells[0], [cell["metrics"] for cell in cells]
        means: Record = {"seeds": len(cells)}
        for name in ("squared_loss", "relative_error", "training_seconds"):
            means[name] = statistics.mean(each[name] for each in metrics)
        means["similarity"] = {
            name: _spread([each["similarity"][name]["rho"] for each in metrics])
            for name in first["metrics"]["similarity"]
        }
        found.append({**record, "config": first["config"], "counts": first["counts"], "metrics": means})
    return found


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Return the mean and the standard deviation; None if a value is undefined."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return {"mean": statistics.mean(known), "std": statistics.stdev(known) if len(known) > 1 else 0.0}


def table(grid: Grid, summary: Sequence[Record], source: Mapping[str, Any]) -> str:
    """Return the Markdown table of the source vectors and all rows."""
    size = next(record["counts"]["table"] for record in summary if record["counts"])
    metrics: Record = {"seeds": 1, "squared_loss": 0.0, "relative_error": 0.0, "training_seconds": 0.0}
    metrics["similarity"] = {name: _spread([found["rho"]]) for name, found in source.items()}
    first: Record = {
        "row": "source",
        "config": {"row": f"source, {size // grid.words} dimensions", "hidden": None},
        "counts": {"embedding": size, "stored_bits": 32 * size, "table": size},
        "metrics": metrics,
    }

    def rho(name: str) -> Callable[[Record], str]:
        def describe(record: Record) -> str:
            found = record["metrics"]["similarity"][name]
            if found is None:
                return "undefined"
            spread = f" ± {found['std']:.3f}" if record["metrics"]["seeds"] > 1 else ""
            return f"{found['mean']:.3f}{spread}"

        return describe

    columns = [
        Column("vectors", lambda r: r["config"]["row"], always=True),
        Column("hidden", lambda r: str(r["config"]["hidden"] or "–"), always=True),
        Column("parameters", lambda r: f"{r['counts']['embedding']:,}"),
        Column("kB stored", lambda r: f"{r['counts']['stored_bits'] / 8000:,.0f}"),
        Column("bits per weight", lambda r: f"{r['counts']['stored_bits'] / r['counts']['table']:.2f}"),
        Column("seeds", lambda r: str(r["metrics"]["seeds"])),
        Column("squared loss", lambda r: f"{r['metrics']['squared_loss']:.3f}"),
        Column("relative error", lambda r: f"{r['metrics']['relative_error']:.3f}"),
        *(Column(f"rho {name}", rho(name)) for name in source),
        Column("seconds", lambda r: f"{r['metrics']['training_seconds']:.0f}"),
    ]
    return markdown_table([first, *summary], columns)


def draw_figure(summary: Sequence[Record], source: Mapping[str, Any], grid: Grid, path: Path) -> None:
    """Plot rho over the width, one panel per set (ALONE, Figure 3); bars are one standard deviation."""
    figure, panels = new_figure(len(source), "ALONE on skip-gram vectors: similarity of words", shared=False)
    color, marker = style("alone")
    for axes, (name, found) in zip(panels, source.items(), strict=True):
        for number, row in enumerate(grid.alone):
            points = [
                (record["config"]["hidden"], record["metrics"]["similarity"][name])
                for record in summary
                if record["config"]["row"] == row and record["metrics"]
            ]
            points = [point for point in points if point[1] is not None]
            axes.errorbar(
                [hidden + 24 * (number - (len(grid.alone) - 1) / 2) for hidden, _ in points],
                [value["mean"] for _, value in points],
                yerr=[value["std"] for _, value in points],
                color=color,
                marker=marker,
                linestyle=("-", "--", ":", "-.")[number % 4],
                fillstyle=("full", "none", "left", "bottom")[number % 4],
                linewidth=1,
                capsize=2,
                label=row.replace("_", " "),
            )
        if found["rho"] is not None:
            axes.axhline(found["rho"], color="#333333", linewidth=1, zorder=1, label="the vectors themselves")
        axes.set_title(f"{name}: {found['known']} of {found['pairs']} pairs", fontsize=9)
        axes.set_xticks(grid.hidden)
        axes.set_xlabel("hidden width")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("Spearman's rho")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    write_png(figure, path)


def draw_comparison(summary: Sequence[Record], source: Mapping[str, Any], path: Path) -> None:
    """Plot the relative error and rho against the stored bytes: the best row of each method and size."""
    sets = [name for name, found in source.items() if found["known"] >= _LEAST_PAIRS]
    plain = [one for one in summary if shown_method(one) == PLAIN]
    best = best_of_each_size(summary, "relative_error", plain)

    def label(record: Record) -> str:  # the format of a plain table, or the codec of a quantized one
        config = record["config"]
        if shown_method(record) == PLAIN:
            return str(config.get("store") or format_name(record))
        return str(config["embedding"].get("codec", ""))

    figure, panels = new_figure(1 + len(sets), "word vectors in few bytes", shared=False)
    for axes, name in zip(panels, ("", *sets), strict=True):
        points = []
        for one in best:
            metrics = one["metrics"]
            shown = metrics["similarity"][name]["mean"] if name else metrics["relative_error"]
            points.append({**one, "metrics": {"shown": float(shown)}})
        draw_lines(axes, points, "shown")
        draw_points(axes, points, "shown", label)
        axes.set_title(f"Spearman's rho, {name}" if name else "relative error", fontsize=9)
        if name:
            axes.axhline(source[name]["rho"], color="#333333", linewidth=1, zorder=1)
        else:
            axes.set_yscale("log")
    finish(figure, panels, path)
