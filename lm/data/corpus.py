"""Corpora as memory-mapped files of token ids: written in bounded memory, and loaded; and their vocabularies.

A corpus is a folder with ``train.npy``, ``valid.npy`` and ``test.npy`` (one-dimensional, int32),
``vocabulary.tsv`` (words by frequency, with their counts) and ``data.json``, which describes them and is
written last. Axis: ``V`` vocabulary.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from shared_embeddings.utils.errors import UserError, first_line
from shared_embeddings.utils.files import replacing, sha256, write_text

UNK = "<unk>"
EOS = "<eos>"
BLOCK_BYTES = 1 << 18


def word_blocks(
    path: Path, lower: bool = False, progress: Callable[[int], object] | None = None
) -> Iterator[list[str]]:
    """Yield blocks of the words of a UTF-8 text, with ``<eos>`` after each line.

    Unicode whitespace separates words, and line feeds end lines. Byte order marks are dropped. Lines may be
    longer than memory, words may not. `progress` is called with the number of bytes of each block.

    Raises:
        UserError: the text cannot be read or is not UTF-8.
    """

    def words(text: str) -> list[str]:
        return (text.lower() if lower else text).replace("\n", f" {EOS} ").split()

    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest, line_ended, consumed = "", True, 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                consumed += len(block)
                if text := decoder.decode(block):
                    rest, line_ended = rest + text, text.endswith("\n")
                    end = max(rest.rfind(" "), rest.rfind("\n")) + 1
                    yield words(rest[:end])
                    rest = rest[end:]
                if progress:
                    progress(len(block))
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        place = consumed - len(error.object) + error.start
        raise UserError(f"{path}: not UTF-8 at byte {place}; convert it") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; check the path") from error
    if not line_ended:
        yield words(rest + "\n")


class Limits(NamedTuple):
    """Limits of the vocabulary."""

    min_frequency: int = 1  # rarer words become <unk>
    max_size: int | None = None  # of V, including <unk> and <eos>


class Vocabulary:
    """The V words of a corpus by descending frequency; the id of a word is its index.

    Args:
        words: including ``<unk>``, which replaces all other words, and ``<eos>``, which ends each line.
        counts: occurrences of each word in the training text; zeros by default.

    Raises:
        UserError: a word is repeated, or ``<unk>`` or ``<eos>`` is missing.
    """

    def __init__(self, words: Sequence[str], counts: Sequence[int] | None = None) -> None:
        self.words, self.counts = list(words), list(counts or [0] * len(words))
        self.index = {word: place for place, word in enumerate(self.words)}
        if len(self.index) < len(self.words):
            repeated = next(word for place, word in enumerate(self.words) if self.index[word] != place)
            raise UserError(f"the word {repeated!r} is repeated; remove the duplicate")
        for marker in (UNK, EOS):
            if marker not in self.index:
                raise UserError(f"the vocabulary has no {marker}; run lm_prepare again")
        self.unk, self.eos = self.index[UNK], self.index[EOS]

    @classmethod
    def from_counts(cls, counts: Mapping[str, int], limits: Limits = Limits()) -> Vocabulary:  # noqa: B008
        """Create the vocabulary of a text from its word counts; ties are in code point order.

        Words excluded by `limits` count as ``<unk>``, so that the counts sum to the length of the text.
        """
        ordered = sorted((-count, word) for word, count in counts.items() if word not in (UNK, EOS))
        room = len(ordered) if limits.max_size is None else limits.max_size - 2
        entries = [(count, word) for count, word in ordered[:room] if -count >= limits.min_frequency]
        excluded = sum(count for count, _ in ordered) - sum(count for count, _ in entries)
        entries += [(excluded - counts.get(UNK, 0), UNK), (-counts.get(EOS, 0), EOS)]
        entries.sort()
        return cls([word for _, word in entries], [-count for count, _ in entries])

    def encode(self, text_line: str) -> list[int]:
        """Ids of the whitespace-separated words of a line, followed by ``<eos>``."""
        return [self.index.get(word, self.unk) for word in text_line.split()] + [self.eos]

    def save(self, path: Path) -> None:
        """Write one line ``word<TAB>count`` per word."""
        lines = (f"{word}\t{count}\n" for word, count in zip(self.words, self.counts))
        path.write_text("".join(lines), encoding="utf-8", newline="")

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a file written by `save`.

        Raises:
            UserError: the file is missing or not UTF-8, or a line or the words are invalid.
        """
        try:
            lines = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 at byte {error.start}; run lm_prepare") from error
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; run lm_prepare") from error
        words, counts = [], []
        for number, line in enumerate(lines, 1):
            word, _, count = line.partition("\t")
            if word.split() != [word] or not (count.isascii() and count.isdigit()):
                raise UserError(f"{path}: line {number} is {line[:60]!r}; expected word, tab and count")
            words.append(word)
            counts.append(int(count))
        try:
            return cls(words, counts)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error


SPLITS = ("train", "valid", "test")
VOCABULARY = "vocabulary.tsv"
DESCRIPTION = "data.json"
FORMAT = "shared-embeddings-corpus"
VERSION = 1
DTYPE = np.dtype("<i4")

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

    Returns early if the folder already has a corpus of the same texts and settings.

    Args:
        texts: the files of each of `SPLITS`.
        folder: output folder.
        name: of the corpus in results.
        limits: of the vocabulary.
        lower: lowercase all words.
        published: sizes that the texts must have.
        force: replace another corpus in the folder.

    Returns:
        The content of ``data.json``: ``name``, ``settings``, ``sources`` (checksums of the texts), ``tokens``
        and ``unknown`` (number of ``<unk>``) of each split, ``types`` (V), ``files`` (their checksums), and
        ``checksum``, the SHA-256 of ``files``.

    Raises:
        UserError: the folder has another corpus; or a text is not UTF-8, has fewer than two tokens, or does
            not have its published size.
        OSError: a file cannot be read or written.
    """
    sources = {
        split: [{"name": path.name, "sha256": sha256(path)} for path in texts[split]] for split in SPLITS
    }
    settings = {**limits._asdict(), "lower": lower}
    made_from = {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "settings": settings,
        "sources": sources,
    }
    file_names = [*(f"{split}.npy" for split in SPLITS), VOCABULARY]
    description = _read_description(folder)
    is_same = description is not None and made_from.items() <= description.items()
    if description is not None and is_same and all((folder / file).is_file() for file in file_names):
        return description
    if not (is_same or force) and (folder / DESCRIPTION).exists():
        raise UserError(f"output: {folder} has another corpus; use -force to replace it, or another folder")
    counts, tokens = _count(texts, lower)
    vocabulary = Vocabulary.from_counts(counts, limits)
    if published:
        sizes = [(f"tokens in the {split} text", tokens[split], published.tokens[split]) for split in SPLITS]
        if limits == Limits() and not lower:
            sizes.append((f"words with {UNK} and {EOS}", len(vocabulary.words), published.types))
        for what, size, published_size in sizes:
            if size != published_size:
                raise UserError(
                    f"{name} has {size:,} {what}, the published text {published_size:,}; replace the file by "
                    "the original"
                )
    with ExitStack() as stack:
        places = {file: stack.enter_context(replacing(folder / file)) for file in file_names}
        unknown = {
            split: _write_tokens(texts, places[f"{split}.npy"], split, vocabulary, tokens, lower)
            for split in SPLITS
        }
        vocabulary.save(places[VOCABULARY])
        files = {file: sha256(place) for file, place in places.items()}
        # Without it, files that are replaced in part are not loaded.
        (folder / DESCRIPTION).unlink(missing_ok=True)
    checksum = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    sizes_of_splits = {"tokens": tokens, "unknown": unknown, "types": len(vocabulary.words)}
    description = {**made_from, **sizes_of_splits, "files": files, "checksum": checksum}
    write_text(folder / DESCRIPTION, json.dumps(description, indent=2, ensure_ascii=False) + "\n")
    return description


def load_corpus(folder: Path) -> Corpus:
    """Memory-map a corpus, without running code from its files.

    Raises:
        UserError: the folder has no corpus of this version, or a file is missing or has other content than
            ``data.json`` says.
    """
    description = _read_description(folder)
    if description is None:
        raise UserError(f"data {folder}: has no {DESCRIPTION} of this version of lm_prepare; run lm_prepare")
    vocabulary = Vocabulary.load(folder / VOCABULARY)
    splits, size = {}, len(vocabulary.words)
    for split in SPLITS:
        path = folder / f"{split}.npy"
        try:
            tokens = np.lib.format.open_memmap(path, mode="r")
        except (OSError, ValueError, SyntaxError) as error:
            raise UserError(f"{path}: no token file ({first_line(error)}); run lm_prepare again") from error
        expected = (description["tokens"][split],)
        # Training would fail with an IndexError after hours.
        if (tokens.dtype, tokens.shape) != (DTYPE, expected) or not 0 <= tokens.min() <= tokens.max() < size:
            raise UserError(f"{path}: is not of this corpus of {size} words; run lm_prepare again")
        splits[split] = tokens
    return Corpus(**splits, vocabulary=vocabulary, description=description)


def _blocks(what: str, paths: Sequence[Path], lower: bool) -> Iterator[list[str]]:
    """Yield the words of texts in blocks, with a progress bar."""
    size = sum(path.stat().st_size for path in paths)
    with tqdm(total=size, desc=what, unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        for path in paths:
            yield from word_blocks(path, lower, bar.update)


def _count(texts: Texts, lower: bool) -> tuple[Counter[str], dict[str, int]]:
    """Count each word of the training text, and the tokens of each split."""
    counts: Counter[str] = Counter()
    tokens = dict.fromkeys(SPLITS, 0)
    for split in SPLITS:
        for words in _blocks(f"counting {split}", texts[split], lower):
            tokens[split] += len(words)
            if split == "train":
                counts.update(words)
        if tokens[split] < 2:
            names = ", ".join(path.name for path in texts[split])
            raise UserError(f"{names}: {tokens[split]} tokens; the {split} text needs at least 2")
    return counts, tokens


def _write_tokens(
    texts: Texts, path: Path, split: str, vocabulary: Vocabulary, tokens: Mapping[str, int], lower: bool
) -> int:
    """Write the token file of a split; return how many of its tokens are ``<unk>``."""
    unknown = 0
    with path.open("wb") as file:
        header = {"descr": DTYPE.str, "fortran_order": False, "shape": (tokens[split],)}
        np.lib.format.write_array_header_1_0(file, header)
        for words in _blocks(f"writing {split}", texts[split], lower):
            ids = map(vocabulary.index.get, words, repeat(vocabulary.unk))
            block = np.fromiter(ids, DTYPE, len(words))  # type: ignore[arg-type]
            file.write(block.data)  # tofile reports a full disk with another error
            unknown += int(np.count_nonzero(block == vocabulary.unk))
    return unknown


def _read_description(folder: Path) -> dict[str, Any] | None:
    """Return the content of ``data.json``, or None if it is missing or not of this version."""
    try:
        content = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        is_current = (content["format"], content["version"]) == (FORMAT, VERSION)
        return dict(content) if is_current and set(SPLITS) <= set(content["tokens"]) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


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
