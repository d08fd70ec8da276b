"""The source vectors, the words that are reconstructed, and the word pairs that measure them.

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

from lm.data.datasets import locate
from recipes.common.corpus import write_lines
from recipes.common.results import SMOKE_FOLDER
from recipes.common.smoke import generated_vocabulary
from shared_embeddings.analysis.similarity import WordPairs, word_similarity
from shared_embeddings.analysis.vectors import WordVectors, read_vectors
from shared_embeddings.checkpoints.token_counts import count_words
from shared_embeddings.classes.making import train_word_vectors
from shared_embeddings.errors import UserError
from shared_embeddings.utils.download import download, verify
from shared_embeddings.utils.files import replacing

# Markers of the corpora, which are no words.
_MARKERS = ("<unk>", "<eos>")


def data_dir() -> Path | None:
    """$DATA_DIR, where it is set."""
    given = os.environ.get("DATA_DIR")
    return Path(given) if given else None


def download_glove(entry: Mapping[str, Any], folder: Path) -> Path:
    """The text of GloVe's vectors, downloaded and unpacked unless it is there.

    Args:
        entry: ``url``, ``file`` inside the archive, and ``sha256`` of the archive or None.
        folder: gets what is downloaded.

    Raises:
        UserError: the archive is damaged or does not hold the file.
        DownloadError: no connection, or another checksum.
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
        # Reading to the end checks the file's own checksum.
        with zipfile.ZipFile(archive) as packed, packed.open(entry["file"]) as source:
            with replacing(text) as temporary, temporary.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"{archive}: is damaged or lacks {entry['file']} ({error}); remove it") from error
    return text


def locate_pairs(names: Sequence[str], url: str, folder: Path) -> list[Path]:
    """The files of word pairs, from $DATA_DIR/word-similarity or downloaded to `folder`."""
    own = data_dir()
    paths = []
    for name in names:
        path = own / "word-similarity" / name if own else folder / name
        if not path.is_file():
            path = folder / name
        if not path.is_file():
            advice = f"when offline, put {name} into $DATA_DIR/word-similarity or name files with --pairs"
            download(f"{url}/{name}", path, None, advice)
        paths.append(path)
    return paths


def corpus(name: str, folder: Path) -> list[Path]:
    """The training text of a corpus, from $DATA_DIR or downloaded to `folder`.

    Raises:
        UserError: it cannot be used.
    """
    try:
        return locate(name, data_dir(), folder)["train"]
    except ValueError as error:
        raise UserError(str(error)) from error


def train_source(texts: Sequence[Path], settings: Mapping[str, Any], output: Path) -> None:
    """Train skip-gram vectors on lower-cased texts, of words sorted by frequency, and write them."""
    lower = output.with_suffix(".txt")
    with replacing(lower) as temporary, temporary.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(text.read_text(encoding="utf-8").lower())
    counts = count_words([lower])
    kept = [word for word in counts if counts[word] >= settings["min_count"] and word not in _MARKERS]
    # Sorting is stable: of equal counts, the word that came first.
    words = sorted(kept, key=lambda word: -counts[word])
    asked = {name: settings[name] for name in ("dim", "window", "epochs", "seed")}
    write_source(WordVectors(words, train_word_vectors([lower], words, **asked)), output)


def most_frequent(source: WordVectors, number: int, counts: Mapping[str, int] | None) -> WordVectors:
    """The most frequent words of the source: by counts, or in its own order.

    A counted word that the source has in lower case only counts for that one.

    Raises:
        UserError: there are fewer words.
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
            f"there are {len(chosen)} words to choose from, fewer than 'words: {number}' of rows.yaml; lower "
            "it or give other vectors or texts"
        )
    chosen = chosen[:number]
    return WordVectors([source.words[place] for place in chosen], source.vectors[chosen])


def write_source(vectors: WordVectors, path: Path) -> None:
    """Write words and their vectors ``(V, D)``, completely or not at all."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, words=np.array(vectors.words), vectors=vectors.vectors)


def read_source(path: Path) -> WordVectors:
    """Read what `write_source` wrote.

    Raises:
        UserError: it is missing or damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as found:
            return WordVectors(found["words"].tolist(), found["vectors"])
    except FileNotFoundError:
        raise UserError(f"{path}: no prepared vectors; run preprocess.sh") from None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: is damaged ({error}); run preprocess.sh again") from error


def read_any(path: Path, limit: int | None) -> WordVectors:
    """`read_vectors`, or this recipe's own file; UserError for what cannot be read."""
    if path.suffix == ".npz":
        return read_source(path)
    try:
        return read_vectors(path, limit)
    except (ValueError, ImportError) as error:
        raise UserError(str(error)) from error


def score(vectors: WordVectors, tests: Sequence[WordPairs]) -> dict[str, dict[str, Any]]:
    """Spearman's rho of word vectors for every set of pairs by its name, and how many pairs are known."""
    found = (word_similarity(vectors.words, vectors.vectors, test) for test in tests)
    return {
        result.name: {"rho": result.rho, "known": result.known, "pairs": result.pairs} for result in found
    }


SMOKE_DATA_HELP = f"random vectors of a few words, in a folder {SMOKE_FOLDER} of its own"
SMOKE_GRID_HELP = "cells of a small grid, on the data of preprocess.sh --smoke"
# Words in the file of vectors.
WORDS = 80
DIMENSIONS, PAIRS = 12, 50


def write_smoke_vectors(folder: Path) -> Path:
    """Write random vectors in GloVe's format, a word and its numbers on a line; returns the file."""
    rows = np.random.default_rng(0).normal(size=(WORDS, DIMENSIONS))
    path = folder / "vectors.txt"
    numbers = (" ".join(f"{number:.5f}" for number in row) for row in rows)
    write_lines(path, (f"{word} {line}" for word, line in zip(generated_vocabulary(), numbers)))
    return path


def write_smoke_pairs(folder: Path, names: Sequence[str]) -> list[Path]:
    """Write files of two words and a random score on a line, under the names of the published ones."""
    words = generated_vocabulary()[:WORDS]
    paths = [folder / name for name in names]
    for seed, path in enumerate(paths):
        draw = np.random.default_rng(seed)
        chosen = [draw.choice(words, size=2, replace=False) for _ in range(PAIRS)]
        write_lines(path, (f"{first}\t{second}\t{draw.uniform(0, 10):.2f}" for first, second in chosen))
    return paths
