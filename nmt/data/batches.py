"""Reading parallel text as it comes, and batches whose position in the data can be saved and found again."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from onmt.constants import CorpusName
from onmt.inputters.dynamic_iterator import DynamicDatasetIter
from onmt.inputters.text_corpus import ParallelCorpus
from onmt.utils.logging import logger
from torch.utils.data import get_worker_info

from nmt.data.corpora import parse_corpus
from nmt.data.loading import end_with_parent
from shared_embeddings.errors import UserError

BYTE_ORDER_MARK = "\ufeff"


def clean_line(line: str) -> str:
    """Return a line with each run of whitespace of any kind (no-break, tab, carriage return) as one
    space, and without the mark that some editors put at the start of a text.
    """
    return " ".join(line.removeprefix(BYTE_ORDER_MARK).split())


def count_lines(path: str) -> int:
    """Count the lines of a file; a last line without a line end counts."""
    count, last = 0, b"\n"
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")


def check_parallel(name: str, paths: dict[str, str]) -> int:
    """Check that files exist, hold text and have equally many lines.

    Args:
        name: of the corpus, for messages.
        paths: file per side, such as ``{"path_src": …, "path_tgt": …}``.

    Returns:
        the number of lines.

    Raises:
        UserError: names the corpus, the file, and both counts where they differ.
    """
    counts = {}
    for side, path in paths.items():
        if not os.path.isfile(path):
            raise UserError(f"data: {name}: {side}: no such file: {path}")
        counts[side] = count_lines(path)
        if counts[side] == 0:
            raise UserError(f"data: {name}: {side}: {path} is empty")
    if len(set(counts.values())) > 1:
        sizes = ", ".join(f"{paths[side]} has {number} lines" for side, number in counts.items())
        raise UserError(f"data: {name}: the sides are not parallel: {sizes}; expected equally many")
    return next(iter(counts.values()))


def check_corpora(corpora: Any) -> None:
    """Check the files of every corpus of the option ``data``.

    Raises:
        UserError: as `check_parallel`, or the option is not a mapping of corpora.
        shared_embeddings.OptionError: as `nmt.data.corpora.parse_corpus`.
    """
    if not isinstance(corpora, dict) or not all(isinstance(corpus, dict) for corpus in corpora.values()):
        raise UserError("data: wanted a mapping of corpora, each with path_src and path_tgt")
    for name, corpus in corpora.items():
        parse_corpus(name, corpus)
        paths = {side: corpus[side] for side in ("path_src", "path_tgt", "path_align") if corpus.get(side)}
        if not paths and not corpus.get("path_txt"):
            raise UserError(f"data: {name}: has no path_src; name the files of each corpus")
        check_parallel(name, paths) if paths else None
    _check_weights(corpora)


def _check_weights(corpora: dict[str, dict[str, Any]]) -> None:
    """Check that training has a corpus to read.

    Raises:
        UserError: nothing but validation has a weight above 0.
    """
    weights = {name: corpus.get("weight", 1) for name, corpus in corpora.items()}
    if not any(weight != 0 for name, weight in weights.items() if name != CorpusName.VALID):
        raise UserError(
            "data: there is no corpus to train on; name one with a weight of at least 1 beside "
            f"`{CorpusName.VALID}`"
        )


def check_targets(corpora: dict[str, dict[str, Any]]) -> None:
    """Check that every corpus has a target: upstream takes the source in its place and trains to copy.

    Raises:
        UserError: names the corpus without one.
    """
    for name, corpus in corpora.items():
        if not corpus.get("path_tgt"):
            raise UserError(f"data: {name}: has no path_tgt; name the file of its targets")


def check_single_texts(corpora: dict[str, dict[str, Any]]) -> None:
    """Check that no corpus of a language model has a target: it learns what comes next in its source.

    Raises:
        UserError: names the corpus with one.
    """
    for name, corpus in corpora.items():
        if corpus.get("path_tgt") not in (None, corpus.get("path_src")):
            raise UserError(f"data: {name}: has a path_tgt, but model_task: lm learns one text; remove it")


class CleanCorpus(ParallelCorpus):  # type: ignore[misc]
    """Parallel text with its whitespace cleaned; pairs with an empty side are left out."""

    def load(self, offset: int = 0, stride: int = 1) -> Iterator[dict[str, Any]]:
        """Yield the examples of every ``stride``-th block of lines from ``offset`` on, as upstream does.

        Raises:
            UserError: a file is not UTF-8.
        """
        empty = 0
        try:
            for example in super().load(offset=offset, stride=stride):
                for key in ("src", "tgt", "src_original", "tgt_original"):
                    if isinstance(example[key], str):
                        example[key] = clean_line(example[key])
                if example["tgt"] is not None and not (example["src"] and example["tgt"]):
                    empty += 1
                    continue
                yield example
        except UnicodeDecodeError as error:
            raise UserError(f"data: {self.id}: {self._undecodable()} ({error.reason}); convert it") from error
        if empty:
            logger.warning(f"{self.id}: left out {empty} pairs with an empty side")

    def _undecodable(self) -> str:
        """Return which line of which file is not UTF-8."""
        for path in filter(None, (self.src, self.tgt, self.align)):
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    try:
                        line.decode("utf-8")
                    except UnicodeDecodeError:
                        return f"{path}: line {number} is not UTF-8"
        return "a line is not UTF-8"


@dataclass(frozen=True)
class Position:
    """Where a batch came from: the state before its bucket was read, and how many batches of the bucket are
    used.
    """

    worker: int
    bucket: dict[str, Any]
    used: int


class Batches(DynamicDatasetIter):  # type: ignore[misc]
    """Upstream's batches under a name of this package, which a data loader's workers then import first."""

    def _init_datasets(self, worker_id: int) -> None:
        """Open the corpora, in this process or in a worker of a data loader."""
        if get_worker_info() is not None:
            end_with_parent()
        super()._init_datasets(worker_id)


class ResumableBatches(Batches):
    """Training batches that carry their `Position`, and that can start from one.

    The batches are those of upstream's iterator: the position holds the random state, the examples read of
    each
    corpus, and the place in the cycle over the corpora, all from the moment before the bucket was read.
    """

    start: dict[int, dict[str, Any]] = {}
    first_worker = 0

    def _init_datasets(self, worker_id: int) -> None:
        """Open the corpora for one worker; with a start position, continue with the worker whose turn it
        is.
        """
        workers = max(1, self.num_workers)
        self.worker = (worker_id + self.first_worker) % workers
        super()._init_datasets(self.worker)
        self.skip, self.saved_random = 0, None
        saved = self.start.get(self.worker)
        if saved is None:
            self.bucket_state: dict[str, Any] = {"drawn": {}, "cycle": 0, "index": 0}
            return
        self.bucket_state = {key: saved[key] for key in ("drawn", "cycle", "index")}
        self.skip = saved["used"]
        self.bucket_idx = saved["index"]
        self.saved_random = _as_state(saved["random"])
        self.random_shuffler._random_state = _as_state(saved["shuffler"])

    def _bucketing(self) -> Iterator[tuple[Any, int]]:
        """Yield buckets of numericalized examples, and remember the state before each."""
        names = list(self.mixer._iter_datasets())
        drawn, cycle = dict(self.bucket_state["drawn"]), int(self.bucket_state["cycle"])
        streams = {
            name: _endless(corpus, drawn.get(name, 0)) for name, corpus in self.mixer.iterables.items()
        }
        size = self.bucket_size_init if self.bucket_size_init > 0 else self.bucket_size
        if self.saved_random is not None:
            random.setstate(self.saved_random)
        for _ in range(self.bucket_idx):
            size = min(self.bucket_size, size + self.bucket_size_increment)
        while True:
            self.bucket_state = {
                "drawn": dict(drawn),
                "cycle": cycle,
                "index": self.bucket_idx,
                "random": random.getstate(),
                "shuffler": self.random_shuffler.random_state,
            }
            bucket: list[Any] = []
            while len(bucket) < size:
                name = names[cycle % len(names)]
                position, example = next(streams[name])
                drawn[name], cycle = position, cycle + 1
                bucket.append(example)
            yield self._tuple_to_json_with_tokIDs(bucket), self.bucket_idx
            self.bucket_idx += 1
            size = (
                min(self.bucket_size, size + self.bucket_size_increment) if size < self.bucket_size else size
            )

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Position]]:
        """Yield batches with their positions; those that a saved position has used are left out."""
        current, used = None, 0
        for batch, index in super().__iter__():
            current, used = (index, used + 1) if index == current else (index, 1)
            if self.skip:
                self.skip -= 1
                continue
            yield batch, Position(self.worker, self.bucket_state, used)


def _endless(corpus: Iterable[Any], start: int) -> Iterator[tuple[int, Any]]:
    """Yield the examples of a corpus over and over, with how many of the pass are read then, from ``start``
    on.

    Raises:
        UserError: a whole pass has no example.
    """
    while True:
        number = start
        for number, example in enumerate(islice(iter(corpus), start, None), start + 1):
            yield number, example
        if number == 0:
            raise UserError("data: a training corpus has no pair with text on both sides")
        start = 0


def _as_state(saved: Any) -> tuple[Any, ...]:
    """Return a state of Python's random module from what a checkpoint keeps of it."""
    version, numbers, gauss = saved
    return version, tuple(numbers), gauss


class TrackedBatches:
    """An iterable of batches that remembers the positions, per worker, of those that whole steps have used.

    Args:
        batches: with their positions.
        start: what `state` gave of the batches before these.
    """

    def __init__(
        self, batches: Iterable[tuple[dict[str, Any], Position]], start: dict[str, Any] | None = None
    ) -> None:
        self.batches = batches
        self.positions: dict[int, dict[str, Any]] = dict(start["workers"]) if start else {}
        self.last_worker: int = start["last_worker"] if start else -1
        self.mark()

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Position]]:
        for batch, position in self.batches:
            self.positions[position.worker] = {**position.bucket, "used": position.used}
            self.last_worker = position.worker
            yield batch, position

    def mark(self) -> None:
        """Count the batches that were taken so far as used: the step that they are for is about to begin."""
        self.marked = {"last_worker": self.last_worker, "workers": dict(self.positions)}

    def state(self) -> dict[str, Any]:
        """Return plain data from which `ResumableBatches` resumes with the batch after the last one used."""
        return self.marked
