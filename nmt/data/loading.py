"""The worker processes of a data loader: they leave signals to the training process, which ends them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import TracebackType
from typing import Any

from torch.utils.data import DataLoader

from shared_embeddings.utils.interrupts import SIGNALS


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Have SIGINT and SIGTERM wait, in this thread and in the processes that are started in the block."""
    resource_tracker.ensure_running()  # else started with the first process, which unblocks them
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def end_with_parent() -> None:
    """Let SIGTERM end this worker only when its parent sends it; it was started with signals blocked.

    A terminal and a scheduler signal every process, but the training process needs its workers until it has
    ended its step.
    """
    threading.Thread(target=_wait_for_parent, args=(os.getppid(),), daemon=True).start()
    sys.excepthook = _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error of a thread, but not that the training process, which ends, takes no more batches."""
    if not issubclass(kind, ConnectionError):
        sys.__excepthook__(kind, error, trace)


def _wait_for_parent(parent: int) -> None:
    """End this process at a SIGTERM of its parent."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


class QuietLoader(DataLoader[Any]):
    """A data loader whose workers are not ended by signals to the whole process group."""

    def __iter__(self) -> Any:
        """Start the workers."""
        with signals_blocked():
            # Kept, because an iterator that an interruption drops waits seconds for each busy worker.
            self.batches = super().__iter__()
        return self.batches


def end_workers() -> None:
    """Kill the workers of this process: nobody needs their batches, and they may be busy for long."""
    previous = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises an error about killed workers
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()
    signal.signal(signal.SIGCHLD, previous)
