"""Prepare the source vectors, the words that are reconstructed, and the word pairs that measure them.

Axes: ``V`` words that are reconstructed, ``D`` dimension.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm.data import datasets
from recipes.common.recipe import Recipe
from recipes.common.smoke import SMOKE, generated_vocabulary
from recipes.common.tools import locate, run_step, write_json, write_lines
from recipes.glove_reconstruction.train import (
    SMOKE_DATA_HELP,
    add_grid_option,
    read_grid,
    read_source,
    score,
    write_source,
)
from shared_embeddings.analysis import read_pairs
from shared_embeddings.utils.command_line import Parser, positive
from shared_embeddings.utils.download import download, verify
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import replacing, sha256
from shared_embeddings.utils.path_options import PathOption
from shared_embeddings.words.classes import train_word_vectors
from shared_embeddings.words.token_counts import count_words
from shared_embeddings.words.vectors import WordVectors, read_vectors

# Folder of the word pairs in $DATA_DIR.
WORD_PAIRS = "word-similarity"
# Special tokens of the corpora.
_MARKERS = ("<unk>", "<eos>")
# Words, dimensions and pairs of --smoke.
WORDS, DIMENSIONS, PAIRS = 80, 12, 50


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
    """
    try:
        every = read_source(vectors) if vectors.suffix == ".npz" else read_vectors(vectors, limit)
        counts = count_words(texts) if texts else None
        tests = [read_pairs(path) for path in pairs]
    except (ValueError, OSError, ImportError) as error:
        raise UserError(str(error)) from error
    chosen = most_frequent(every, words, counts)
    # Written last, to mark the preparation as complete.
    (folder / "data.json").unlink(missing_ok=True)
    write_source(chosen, folder / "source.npz")
    kept = folder / "pairs"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    for path in pairs:
        shutil.copyfile(path, kept / path.name)
    description: dict[str, Any] = {
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
    write_json(folder / "data.json", description)
    print(f"{len(chosen.words):,} words, the first: {', '.join(chosen.words[:8])}")
    for name, result in description["source"].items():
        print(f"{name}: rho {result['rho']}, {result['known']} of {result['pairs']} pairs known")
    print(f"prepared {folder}")


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


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare word vectors and word pairs in $RUNS/glove_reconstruction/data.

    Without --vectors or --glove, skip-gram vectors are trained on WikiText-2 from $DATA_DIR or the network.
    """
    _, settings = recipe.data_settings()
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
    if options.glove is not None:
        vectors = download_glove(settings["glove"][options.glove], downloads)
    if vectors is None:
        trained, data_dir = settings["skipgram"], os.environ.get("DATA_DIR")
        own = Path(data_dir) if data_dir else None
        try:
            texts = datasets.locate(trained["dataset"], own, downloads)["train"]
        except ValueError as error:
            raise UserError(str(error)) from error
        vectors = recipe.home / "skipgram.npz"
        asked = (train_source, texts, trained, vectors)
        run_step(recipe.home / "steps", "skip-gram", texts, [vectors], *asked, **trained)
    url = settings["pairs"]["url"]
    pairs = options.pairs or [locate(name, WORD_PAIRS, url, downloads) for name in settings["pairs"]["files"]]
    prepare(recipe.data, vectors, grid.words, pairs, options.text, options.limit)
