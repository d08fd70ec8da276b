"""Training with several processes on this machine (ranks), and their parent process."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from multiprocessing import connection, reduction, util
from typing import Any, NamedTuple

import onmt.utils.distributed
import torch
from onmt.utils.misc import set_random_seed
from onmt.utils.parse import ArgumentParser
from tqdm import tqdm

from nmt.data.batches import signals_blocked
from nmt.train import training
from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import lost_group
from shared_embeddings.utils.interrupts import RESUME, SIGNALS, Interrupted, handled_by

Explain = Callable[[BaseException], "str | None"]

GRACE_SECONDS = 5.0  # after one rank has failed; ranks that wait for it hang on GPUs
REQUESTS = 3  # signals after which ranks are killed
_POLL_SECONDS = 0.1


class Failure(NamedTuple):
    """Failure of a rank.

    Attributes:
        rank: global rank.
        line: message for the user; None for internal errors.
        trace: the traceback.
        is_lost: whether it only lost the connection to another rank.
    """

    rank: int
    line: str | None
    trace: str
    is_lost: bool


class InheritedLock:
    """The lock of a run, which is held until both the parent and its ranks have ended.

    Args:
        descriptor: file descriptor; None on machines without the lock.
    """

    def __init__(self, descriptor: int | None) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> Any:
        """Duplicate the descriptor for a spawned process."""
        return _inherited, (None if self.descriptor is None else reduction.DupFd(self.descriptor),)


def _inherited(descriptor: Any) -> InheritedLock:
    """Create the `InheritedLock` of a spawned process."""
    return InheritedLock(None if descriptor is None else descriptor.detach())


# In a rank.


def be_rank(
    opt: Namespace, device_id: int, run: dict[str, Any], lock: InheritedLock, explain: Explain, failures: Any
) -> None:
    """Train as one rank. Signals are blocked at the start.

    Args:
        opt: validated options.
        device_id: index of the rank on this machine.
        run: record of the run, see `nmt.train.runs.begin`.
        lock: lock of the run.
        explain: returns the message of a user error, or None.
        failures: queue for a `Failure`.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # until training handles them
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    tqdm.set_lock(threading.RLock())  # the default semaphore leaks when a process is killed
    status = 0
    try:
        onmt.utils.distributed.multi_init(opt, device_id)
        training.run_process(opt, device_id, run)
    except Interrupted as error:
        status = error.status
    except BaseException as error:
        status = 1
        failures.put(_failure(opt.gpu_ranks[device_id], error, explain))
    sys.stdout.flush()
    util._exit_function()  # type: ignore[attr-defined]
    os._exit(status)  # the teardown of torch may wait for other ranks


def _stop_with_parent() -> None:
    """Stop this process when its parent ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def _failure(rank: int, error: BaseException, explain: Explain) -> Failure:
    """Create the `Failure` for an error."""
    lost = lost_group(error)
    return Failure(rank, lost or explain(error), traceback.format_exc(), lost is not None)


# In the parent.


def train(opt: Namespace, run: dict[str, Any], lock: int | None, explain: Explain) -> None:
    """Train in this process, or in one process per rank of this machine.

    Args:
        opt, run, explain: see `be_rank`.
        lock: file descriptor of the lock of the run.

    Raises:
        Interrupted, UserError, RuntimeError: see `run_ranks` and `nmt.train.training.train`.
    """
    ArgumentParser.validate_train_opts(opt)
    ArgumentParser.update_model_opts(opt)
    ArgumentParser.validate_model_opts(opt)
    set_random_seed(opt.seed, False)
    if opt.world_size > 1:
        run_ranks(opt, run, lock, explain)
    else:
        training.run_process(opt, 0 if opt.gpu_ranks else -1, run)


def run_ranks(opt: Namespace, run: dict[str, Any], lock: int | None, explain: Explain) -> None:
    """Train in one process per rank of this machine.

    Signals are forwarded to the ranks, which save and stop. When a rank fails, the others are stopped.

    Args:
        opt, run, explain: see `be_rank`.
        lock: file descriptor of the lock of the run.

    Raises:
        Interrupted: a signal stopped training; the ranks have saved the last step.
        UserError: a rank was killed or failed with a user error.
        RuntimeError: a rank failed with an internal error; has its traceback.
    """
    context = torch.multiprocessing.get_context("spawn")
    failures = context.SimpleQueue()
    received: list[int] = []
    ranks: list[Any] = []
    with handled_by(lambda number, frame: received.append(number)):
        try:
            with signals_blocked():
                for device_id in range(len(opt.gpu_ranks)):
                    arguments = (opt, device_id, run, InheritedLock(lock), explain, failures)
                    ranks.append(context.Process(target=be_rank, args=arguments))
                    ranks[-1].start()
            culprits, ended = _wait(ranks, received)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    failed_ranks: list[Failure] = []
    while not failures.empty():
        failed_ranks.append(failures.get())
    for rank in ended:
        is_ours = -rank.exitcode in received or (rank.exitcode == -signal.SIGTERM and rank not in culprits)
        if rank.exitcode < 0 and not is_ours:
            raise UserError(_killed(opt.gpu_ranks[ranks.index(rank)], rank))
    _raise_first(failed_ranks)
    stopped = [number for rank in ended if (number := _signal_of(rank))]
    if stopped or any(rank.exitcode for rank in ranks):
        raise Interrupted((received or stopped or [signal.SIGTERM])[0])


def _wait(ranks: list[Any], received: list[int]) -> tuple[list[Any], list[Any]]:
    """Wait for all ranks and forward signals.

    Returns:
        the ranks that failed first, and all ranks that have ended.
    """
    alive, ended, culprits, passed = list(ranks), list[Any](), list[Any](), 0
    deadline = math.inf
    while alive and time.monotonic() < deadline and passed <= REQUESTS:
        connection.wait([rank.sentinel for rank in alive], _POLL_SECONDS)
        gone = [rank for rank in alive if rank.exitcode is not None]
        ended += gone
        alive = [rank for rank in alive if rank not in gone]
        while passed < len(received):
            _send(alive, received[passed])
            passed += 1
        failed = [rank for rank in gone if _has_failed(rank, received)]
        if failed and not culprits:
            culprits, deadline = failed, time.monotonic() + GRACE_SECONDS
            _send(alive, signal.SIGTERM)
    return culprits, ended


def _has_failed(rank: Any, received: list[int]) -> bool:
    """Return whether a rank has failed."""
    return rank.exitcode != 0 and _signal_of(rank) is None and -rank.exitcode not in received


def _signal_of(rank: Any) -> int | None:
    """Return the signal that stopped a rank, if any."""
    return next((number for number in SIGNALS if rank.exitcode == 128 + number), None)


def _send(ranks: list[Any], number: int) -> None:
    """Send a signal to running ranks."""
    for rank in ranks:
        if rank.is_alive():
            os.kill(rank.pid, number)


def _raise_first(failed_ranks: list[Failure]) -> None:
    """Raise the first failure, preferring those that are not lost connections."""
    for failure in sorted(failed_ranks, key=lambda failure: failure.is_lost):
        if failure.line is None:
            raise RuntimeError(f"rank {failure.rank} failed\n{failure.trace}")
        raise UserError(failure.line)


def _killed(number: int, rank: Any) -> str:
    """The message about a killed rank."""
    name = signal.Signals(-rank.exitcode).name
    hint = ", possibly out of memory" if name == "SIGKILL" else ""
    return (
        f"rank {number} (process {rank.pid}) was killed by {name}{hint}; the other ranks were stopped; "
        f"{RESUME} from the last checkpoint"
    )
