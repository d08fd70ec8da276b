"""Corpora as memory-mapped files of token ids: written in bounded memory, and loaded.

A corpus is a folder with ``train.npy``, ``valid.npy`` and ``test.npy`` (one-dimensional, int32),
``vocabulary.tsv`` and ``data.json``, which describes them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lm.data.vocabulary import EOS, UNK, Limits, Vocabulary, word_blocks
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import UNREADABLE, first_line, remove_leftovers, sha256, staged, write_text
from shared_embeddings.utils.path_options import PathOption, check_paths
from shared_embeddings.utils.reading import read_json

SPLITS = ("train", "valid", "test")
VOCABULARY = "vocabulary.tsv"
DESCRIPTION = "data.json"
FORMAT = "shared-embeddings-corpus"
VERSION = 1
_FILES = (*(f"{split}.npy" for split in SPLITS), VOCABULARY)  # those that DESCRIPTION describes
DTYPE = np.dtype("<i4")
_BLOCK = 1 << 22  # tokens checked at a time

Texts = Mapping[str, Sequence[Path]]


class Corpus(NamedTuple):
    """A corpus written by `prepare`: int32 token ids ``(N,)`` as read-only memory maps."""

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    vocabulary: Vocabulary  # of the training text
    description: dict[str, Any]  # the content of data.json, see `prepare`


class Published(NamedTuple):
    """Published sizes of a corpus."""

    tokens: Mapping[str, int]  # of each split, including one <eos> per line
    types: int  # V of the training text without limits


def prepare(
    texts: Texts,
    folder: Path,
    name: str = "text",
    limits: Limits = Limits(),  # noqa: B008
    lower: bool = False,
    published: Published | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Convert texts to a corpus. Each text is read twice, in blocks.

    Returns early if the folder already has an intact corpus of the same texts and settings.

    Args:
        texts: the files of each of `SPLITS`.
        folder: output folder.
        name: of the corpus in results.
        limits: of the vocabulary.
        lower: lowercase all words.
        published: sizes that the texts must have.
        force: overwrite other files with the names of the outputs.

    Returns:
        The content of ``data.json``: ``name``, ``settings``, ``sources`` (checksums of the texts), ``tokens``
        and ``unknown`` (number of ``<unk>``) of each split, ``types`` (V), ``files`` (their checksums), and
        ``checksum``, the SHA-256 of ``files``.

    Raises:
        UserError: `folder` is a file or has other files with the names of the outputs; or a text cannot be
            read, is one of the outputs, has fewer than two tokens, or does not have its published size.
    """
    inputs = {f"-{split}": (PathOption.FILE, texts[split]) for split in SPLITS}
    outputs = [folder / file for file in (DESCRIPTION, *_FILES)]
    check_paths({**inputs, "-output": (PathOption.FOLDER, folder)})
    remove_leftovers(*outputs)
    try:
        sources = {
            split: [{"name": path.name, "sha256": sha256(path)} for path in texts[split]] for split in SPLITS
        }
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; check the path") from error
    made_from = {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "settings": {**limits._asdict(), "lower": lower},
        "sources": sources,
    }
    found = _read_description(folder)
    is_own = found is not None and all(found.get(key) == value for key, value in made_from.items())
    if found is not None and is_own and _damage(folder, found["files"]) is None:
        return found
    check_paths({**inputs, "-output": (PathOption.NEW_FILE, outputs)}, force or is_own)
    counts, tokens = _count(texts, lower)
    vocabulary = Vocabulary.from_counts(counts, limits)
    if published:
        for split in SPLITS:
            _check_size(f"{name}: the {split} text", "tokens", tokens[split], published.tokens[split])
        if limits == Limits() and not lower:
            words = f"words with {UNK} and {EOS}"
            _check_size(f"{name}: the vocabulary", words, len(vocabulary), published.types)
    with staged(outputs) as places:
        description_file, *token_files, vocabulary_file = places
        unknown = _write_tokens(texts, dict(zip(SPLITS, token_files)), vocabulary, tokens, lower)
        vocabulary.save(vocabulary_file)
        files = {place.name: sha256(place) for place in places[1:]}
        description = {
            **made_from,
            "tokens": tokens,
            "unknown": unknown,
            "types": len(vocabulary),
            "files": files,
            "checksum": _checksum(files),
        }
        write_text(description_file, json.dumps(description, indent=2, ensure_ascii=False) + "\n")
    return description


def load_corpus(folder: Path) -> Corpus:
    """Memory-map a corpus, without running code from its files.

    Raises:
        UserError: the folder or a file is missing, damaged, unsupported or from another version.
    """
    if not folder.is_dir():
        raise UserError(f"data {folder}: no such folder; create it with lm_prepare")
    description = _read_description(folder)
    if description is None:
        raise UserError(
            f"data {folder}: has no valid {DESCRIPTION} of this version of lm_prepare; run lm_prepare"
        )
    if damage := _damage(folder, description["files"]):
        raise UserError(f"data {folder}: {damage}; run lm_prepare again")
    vocabulary = Vocabulary.load(folder / VOCABULARY)
    train, valid, test = (
        read_tokens(folder / f"{split}.npy", description["tokens"][split], len(vocabulary))
        for split in SPLITS
    )
    return Corpus(train, valid, test, vocabulary, description)


def _damage(folder: Path, files: Mapping[str, str]) -> str | None:
    """What is wrong with the first file that does not have its checksum, or None."""
    for file, checksum in files.items():
        if not (folder / file).is_file():
            return f"{file} is missing"
        if sha256(folder / file) != checksum:
            return f"{file} was changed after lm_prepare"
    return None


def read_tokens(path: Path, number: int, words: int) -> np.ndarray:
    """Memory-map the int32 token ids ``(N,)`` of one file, after checking them one block at a time.

    Raises:
        UserError: the file is missing, truncated, or not a file of `number` (N) ids below `words` (V).
    """
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (*UNREADABLE, SyntaxError) as error:
        raise UserError(f"{path}: not a token file ({first_line(error)}); run lm_prepare") from error
    if not isinstance(tokens, np.ndarray) or tokens.dtype != DTYPE or tokens.shape != (number,):
        kind = f"{tokens.dtype} of shape {tokens.shape}" if isinstance(tokens, np.ndarray) else "an archive"
        raise UserError(f"{path}: {kind}; expected int32 of shape ({number},); run lm_prepare again")
    for begin in range(0, number, _BLOCK):
        block = tokens[begin : begin + _BLOCK]
        odd = np.flatnonzero((block < 0) | (block >= words))
        if len(odd):
            raise UserError(
                f"{path}: token {begin + odd[0]} is {block[odd[0]]}, but the vocabulary has the ids 0 to "
                f"{words - 1}; run lm_prepare again"
            )
    return tokens


def _blocks(what: str, texts: Texts, lower: bool) -> Iterator[tuple[str, list[str]]]:
    """The words of all texts in blocks, each with its split, with a progress bar."""
    size = sum(path.stat().st_size for split in SPLITS for path in texts[split])
    with tqdm(total=size, desc=what, unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        for split in SPLITS:
            for path in texts[split]:
                for words in word_blocks(path, lower, bar.update):
                    yield split, words


def _count(texts: Texts, lower: bool) -> tuple[Counter[str], dict[str, int]]:
    """Count each word of the training text, and the tokens of each split."""
    counts: Counter[str] = Counter()
    tokens = dict.fromkeys(SPLITS, 0)
    for split, words in _blocks("counting", texts, lower):
        tokens[split] += len(words)
        if split == "train":
            counts.update(words)
    for split, number in tokens.items():
        if number < 2:
            names = ", ".join(path.name for path in texts[split])
            raise UserError(f"{names}: {number} tokens; the {split} text needs at least 2")
    return counts, tokens


def _write_tokens(
    texts: Texts, places: Mapping[str, Path], vocabulary: Vocabulary, tokens: Mapping[str, int], lower: bool
) -> dict[str, int]:
    """Write the token file of each split; returns how many of its tokens are ``<unk>``."""
    unknown, written = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    with ExitStack() as stack:
        files = {split: stack.enter_context(places[split].open("wb")) for split in SPLITS}
        for split, file in files.items():
            header = {"descr": DTYPE.str, "fortran_order": False, "shape": (tokens[split],)}
            np.lib.format.write_array_header_1_0(file, header)
        for split, words in _blocks("writing", texts, lower):
            ids = map(vocabulary.index.get, words, repeat(vocabulary.unk))
            block = np.fromiter(ids, DTYPE, len(words))  # type: ignore[arg-type]
            files[split].write(block.data)  # tofile reports a full disk with another error
            written[split] += len(block)
            unknown[split] += int(np.count_nonzero(block == vocabulary.unk))
    for split in SPLITS:
        if written[split] != tokens[split]:
            raise UserError(f"the {split} text changed while it was read; run lm_prepare again")
    return unknown


def _check_size(what: str, unit: str, number: int, published: int) -> None:
    if number != published:
        raise UserError(
            f"{what} has {number:,} {unit}, the published text {published:,}; replace the file by the "
            "original"
        )


def _checksum(files: Mapping[str, str]) -> str:
    """SHA-256 over the checksums of the files."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _read_description(folder: Path) -> dict[str, Any] | None:
    """The content of ``data.json``; ``None`` when it is absent, damaged, foreign or of another version."""
    try:
        content = read_json(folder / DESCRIPTION)
        files = content["files"]
        numbers = [
            content["types"],
            *(content[part][split] for part in ("tokens", "unknown") for split in SPLITS),
        ]
        is_complete = (
            (content["format"], content["version"]) == (FORMAT, VERSION)
            and sorted(files) == sorted(_FILES)
            and all(isinstance(checksum, str) for checksum in files.values())
            and content["checksum"] == _checksum(files)
            and all(type(number) is int and number >= 0 for number in numbers)
            and isinstance(content["name"], str)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return content if is_complete else None


class Columns:
    """The columns of one process.

    The corpus is split into ``world_size * batch_size`` contiguous columns of equal length, dropping the
    remainder. Process `rank` has `batch_size` of them, starting at ``rank * batch_size``, so that all
    processes together have the same batches as one process with the total batch size.

    Raises:
        UserError: there are fewer than two tokens per column.
    """

    def __init__(self, tokens: np.ndarray, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        columns = world_size * batch_size
        self.length = len(tokens) // columns  # tokens per column, with one target less
        if self.length < 2:
            raise UserError(
                f"{len(tokens)} tokens are too few for {columns} columns of at least 2; lower batch_size or "
                "use a longer text"
            )
        share = tokens[: columns * self.length].reshape(columns, self.length)
        self._columns = share[rank * batch_size : (rank + 1) * batch_size]

    def segment(
        self, position: int, length: int, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, Tensor]:
        """Return inputs and targets ``(B, T)``, int64; target t is the token after input t.

        Args:
            position: tokens of each column already consumed, from 0 to ``self.length - 2``.
            length: T; the last segment may be shorter.
        """
        end = min(position + length, self.length - 1)
        piece = torch.from_numpy(self._columns[:, position : end + 1].astype(np.int64)).to(device)
        return piece[:, :-1].contiguous(), piece[:, 1:].contiguous()
