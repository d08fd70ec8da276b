"""Prepare source vectors and word pairs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from recipes.common.recipe import Recipe
from recipes.common.smoke import SMOKE
from recipes.common.tools import run_step
from recipes.glove_reconstruction import source
from recipes.glove_reconstruction.grid import add_grid_option, read_grid
from recipes.glove_reconstruction.source import SMOKE_DATA_HELP, score, write_smoke_pairs, write_smoke_vectors
from shared_embeddings.analysis.similarity import read_pairs
from shared_embeddings.analysis.vectors import WordVectors
from shared_embeddings.checkpoints.token_counts import count_words
from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import Parser, positive
from shared_embeddings.utils.files import sha256, write_text
from shared_embeddings.utils.path_options import PathOption
from shared_embeddings.utils.reading import read_yaml


def prepare(
    folder: Path,
    vectors: Path,
    words: int,
    pairs: Sequence[Path],
    texts: Sequence[Path] = (),
    limit: int | None = None,
) -> None:
    """Select words, copy the pairs and write ``data.json``.

    Args:
        folder: folder of the prepared data.
        vectors: file of word vectors.
        words: number of words to reconstruct.
        pairs: files with two words and a score per line.
        texts: texts to count words in; without texts, the first words of the vectors are used.
        limit: number of vectors to read.

    Raises:
        UserError: a file cannot be used.
    """
    every = source.read_any(vectors, limit)
    try:
        counts = count_words(texts) if texts else None
        tests = [read_pairs(path) for path in pairs]
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    chosen = source.most_frequent(every, words, counts)
    # Written last, to mark the preparation as complete.
    (folder / "data.json").unlink(missing_ok=True)
    source.write_source(chosen, folder / "source.npz")
    kept = folder / "pairs"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    for path in pairs:
        shutil.copyfile(path, kept / path.name)
    description = {
        "vectors": vectors.name,
        "vectors_sha256": sha256(vectors),
        "words": words,
        "dimensions": int(chosen.vectors.shape[1]),
        "order": "by count" if texts else "of the file",
        "pairs": [path.name for path in pairs],
        "source": score(chosen, tests),
        "source_all_words": {"words": len(every.words), **score(every, tests)},
        "checksum": sha256(folder / "source.npz"),
    }
    write_text(folder / "data.json", json.dumps(description, indent=2) + "\n")
    _print(chosen, description)
    print(f"prepared {folder}")


def _print(chosen: WordVectors, description: Mapping[str, Any]) -> None:
    """Print a summary."""
    print(f"{len(chosen.words):,} words, the first: {', '.join(chosen.words[:8])}")
    for name, result in description["source"].items():
        print(f"{name}: rho {result['rho']}, {result['known']} of {result['pairs']} pairs known")


def _own_vectors(settings: Mapping[str, Any], home: Path) -> Path:
    """Train vectors on the corpus of the settings, once."""
    texts = source.corpus(settings["dataset"], home / "downloads")
    output = home / "skipgram.npz"
    run_step(
        "skip-gram",
        home / "steps",
        partial(source.train_source, texts, settings, output),
        inputs=texts,
        outputs=[output],
        settings=settings,
    )
    return output


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare word vectors and word pairs in $RUNS/glove_reconstruction/data.

    Without --vectors or --glove, skip-gram vectors are trained on WikiText-2 from $DATA_DIR or the network.
    """
    settings = read_yaml(recipe.folder / "data.yaml")
    parser = Parser("preprocess.sh", description=main.__doc__)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--vectors", type=PathOption.FILE, help="vectors of GloVe, word2vec or fastText")
    chosen.add_argument("--glove", choices=sorted(settings["glove"]), help="download these vectors")
    chosen.add_argument(SMOKE, action="store_true", help=SMOKE_DATA_HELP)
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
    grid, downloads = read_grid(recipe, options.grid), recipe.home / "downloads"
    if options.smoke:
        raw = recipe.home / "raw"
        pairs = write_smoke_pairs(raw, settings["pairs"]["files"])
        prepare(recipe.data, write_smoke_vectors(raw), grid.words, pairs)
        return
    vectors = options.vectors
    if vectors is not None and not vectors.is_file():
        raise UserError(f"vectors {vectors}: no such file; check the path")
    if options.glove is not None:
        vectors = source.download_glove(settings["glove"][options.glove], downloads)
    if vectors is None:
        vectors = _own_vectors(settings["skipgram"], recipe.home)
    pairs = options.pairs or source.locate_pairs(
        settings["pairs"]["files"], settings["pairs"]["url"], downloads
    )
    prepare(recipe.data, vectors, grid.words, pairs, options.text, options.limit)
