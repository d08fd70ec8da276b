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

# Special tokens of the corpora.
_MARKERS = ("<unk>", "<eos>")


def data_dir() -> Path | None:
    """Return $DATA_DIR, or None if it is not set."""
    given = os.environ.get("DATA_DIR")
    return Path(given) if given else None


def download_glove(entry: Mapping[str, Any], folder: Path) -> Path:
    """Return the text of GloVe's vectors, after downloading and unpacking it if necessary.

    Args:
        entry: ``url``, ``file`` in the archive, and ``sha256`` of the archive or None.
        folder: folder of downloads.

    Raises:
        UserError: the archive is damaged or lacks the file.
        DownloadError: the download fails, or the checksum is wrong.
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


def locate_pairs(names: Sequence[str], url: str, folder: Path) -> list[Path]:
    """Find the files of word pairs in $DATA_DIR/word-similarity, or download them to `folder`."""
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
    """Find the training text of a corpus in $DATA_DIR, or download it to `folder`.

    Raises:
        UserError: it cannot be used.
    """
    try:
        return locate(name, data_dir(), folder)["train"]
    except ValueError as error:
        raise UserError(str(error)) from error


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
            f"there are {len(chosen)} words, fewer than 'words: {number}' in rows.yaml; lower it or "
            "use other "
            "vectors or texts"
        )
    chosen = chosen[:number]
    return WordVectors([source.words[place] for place in chosen], source.vectors[chosen])


def write_source(vectors: WordVectors, path: Path) -> None:
    """Write words and their vectors ``(V, D)`` atomically."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, words=np.array(vectors.words), vectors=vectors.vectors)


def read_source(path: Path) -> WordVectors:
    """Read a file written by `write_source`.

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
    """Read vectors with `read_vectors` or `read_source`; errors become `UserError`."""
    if path.suffix == ".npz":
        return read_source(path)
    try:
        return read_vectors(path, limit)
    except (ValueError, ImportError) as error:
        raise UserError(str(error)) from error


def score(vectors: WordVectors, tests: Sequence[WordPairs]) -> dict[str, dict[str, Any]]:
    """Return Spearman's rho and the number of known pairs for every set of pairs."""
    found = (word_similarity(vectors.words, vectors.vectors, test) for test in tests)
    return {
        result.name: {"rho": result.rho, "known": result.known, "pairs": result.pairs} for result in found
    }


SMOKE_DATA_HELP = f"use random vectors of a few words, in a separate folder {SMOKE_FOLDER}"
SMOKE_GRID_HELP = "use a small grid and the data of preprocess.sh --smoke"
# Words in the file of vectors.
WORDS = 80
DIMENSIONS, PAIRS = 12, 50


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
