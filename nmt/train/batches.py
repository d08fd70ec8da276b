"""Batches that training can resume, and the worker processes that load them."""

from __future__ import annotations

import multiprocessing
import random
import signal
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from onmt.inputters.dynamic_iterator import DynamicDatasetIter
from torch.utils.data import get_worker_info

from nmt.fixes import apply_registered
from shared_embeddings.utils.errors import UserError


def end_workers() -> None:
    """Kill the data loader workers of this process, which may be busy."""
    previous = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises an error about killed workers
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()
    signal.signal(signal.SIGCHLD, previous)


@dataclass(frozen=True)
class Position:
    """Position of a batch: the state before its bucket was read, and ``used``, its batches so far."""

    worker: int
    state: dict[str, Any]


class Batches(DynamicDatasetIter):  # type: ignore[misc]
    """OpenNMT-py's batches of all examples, made with its fixes in workers of data loaders, too."""

    def batch_iter(self, *args: Any, **kwargs: Any) -> Iterator[list[Any]]:
        """Yield batches of all examples; in training, OpenNMT-py drops those that share a source."""
        return DynamicDatasetIter.batch_iter(Namespace(task=None), *args, **kwargs)  # type: ignore[no-any-return]

    def _init_datasets(self, worker_id: int) -> None:
        if get_worker_info() is not None:
            for number in (signal.SIGINT, signal.SIGTERM):  # training needs its workers to end the step
                signal.signal(number, signal.SIG_IGN)
            apply_registered()
        super()._init_datasets(worker_id)


class ResumableBatches(Batches):
    """Training batches that carry their `Position`, and that can start from one.

    A bucket has each example at most once, unless another corpus goes on. A position consists of the random
    state, the number of examples read from each corpus in this pass and the place in the cycle over the
    corpora, before the bucket was read.
    """

    start: dict[int, dict[str, Any]] = {}
    first_worker = 0

    def _init_datasets(self, worker_id: int) -> None:
        """Open the corpora for one worker; after a start position, the next worker comes first."""
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
        self.saved_random = saved["random"]
        self.random_shuffler._random_state = saved["shuffler"]

    def _bucketing(self) -> Iterator[tuple[Any, int]]:
        """Yield buckets of numericalized examples, and store the state before each."""
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
        # Where corpora were when the transforms last kept an example, and those that are there again.
        begun, passed = dict(drawn), set[str]()
        while True:
            self.bucket_state = {
                "drawn": dict(drawn),
                "cycle": cycle,
                "index": self.bucket_idx,
                "random": random.getstate(),
                "shuffler": self.random_shuffler.random_state,
            }
            bucket: list[Any] = []
            while len(bucket) < size and passed != set(names):
                name = names[cycle % len(names)]
                drawn[name], example = next(streams[name])
                cycle += 1
                bucket.append(example)
                if drawn[name] == begun.get(name, 0):
                    passed.add(name)
            examples = self._tuple_to_json_with_tokIDs(bucket)
            if examples:
                begun, passed = dict(drawn), set()
            elif passed == set(names):
                raise UserError(
                    "data: the transforms drop all training examples; change them (filtertoolong drops those "
                    "longer than src_seq_length or tgt_seq_length)"
                )
            yield examples, self.bucket_idx
            self.bucket_idx += 1
            size = min(self.bucket_size, size + self.bucket_size_increment)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Position]]:
        """Yield batches with their positions; batches used before the start position are skipped."""
        current, used = None, 0
        for batch, index in super().__iter__():
            current, used = (index, used + 1) if index == current else (index, 1)
            if self.skip:
                self.skip -= 1
                continue
            yield batch, Position(self.worker, {**self.bucket_state, "used": used})


def _endless(corpus: Iterable[Any], start: int) -> Iterator[tuple[int, Any]]:
    """Yield the examples of a corpus repeatedly, after the first ``start``.

    Each comes with the number read so far in the pass over the corpus, which is 0 after the last one.
    """
    while True:
        examples = islice(iter(corpus), start, None)
        last = next(examples, None)
        if last is None and start == 0:
            raise UserError(
                "data: a training corpus has no pair with text on both sides for each process and worker; "
                "check it, or use fewer (num_workers: 0)"
            )
        for number, example in enumerate(examples, start + 1):
            yield number, last
            last = example
        if last is not None:
            yield 0, last
        start = 0


class TrackedBatches:
    """Batches whose positions are tracked, per worker, up to those used by whole steps, from `start` on."""

    def __init__(
        self, batches: Iterable[tuple[dict[str, Any], Position]], start: dict[str, Any] | None = None
    ) -> None:
        self.batches = batches
        self.positions: dict[int, dict[str, Any]] = dict(start["workers"]) if start else {}
        self.last_worker: int = start["last_worker"] if start else -1
        self.mark()

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Position]]:
        for batch, position in self.batches:
            self.positions[position.worker], self.last_worker = position.state, position.worker
            yield batch, position

    def mark(self) -> None:
        """Mark all batches so far as used, before their step begins; `ResumableBatches` continues there."""
        self.marked = {"last_worker": self.last_worker, "workers": dict(self.positions)}
