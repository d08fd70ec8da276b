"""Several training processes of this machine (ranks), and the parent that waits for them."""

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

from nmt.data.loading import signals_blocked
from nmt.train import training
from shared_embeddings.errors import UserError
from shared_embeddings.utils.interrupts import RESUME, SIGNALS, Interrupted, handled_by
from shared_embeddings.utils.peers import lost_group

Explain = Callable[[BaseException], "str | None"]

GRACE_SECONDS = 5.0  # for ranks to end when one has failed; those that wait for it never do on a GPU
REQUESTS = 3  # after which ranks that do not end are killed
_POLL_SECONDS = 0.1


class Failure(NamedTuple):
    """Why a rank ended.

    Attributes:
        rank: its number among all ranks.
        line: for the user; None for an error of ours.
        trace: the traceback.
        is_lost: whether it only lost its connection to a rank that had gone before.
    """

    rank: int
    line: str | None
    trace: str
    is_lost: bool


class InheritedLock:
    """The lock of a run, which a spawned process holds as long as its parent or itself lives.

    Args:
        descriptor: of its file; None on machines that do not hold it.
    """

    def __init__(self, descriptor: int | None) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> Any:
        """Hand the descriptor to the process that is being started."""
        return _inherited, (None if self.descriptor is None else reduction.DupFd(self.descriptor),)


def _inherited(descriptor: Any) -> InheritedLock:
    """Be what `InheritedLock` is in the new process."""
    return InheritedLock(None if descriptor is None else descriptor.detach())


# In a rank.


def be_rank(
    opt: Namespace, device_id: int, run: dict[str, Any], lock: InheritedLock, explain: Explain, failures: Any
) -> None:
    """Train as one rank; its parent has blocked the signals.

    Args:
        opt: options, checked by the parser.
        device_id: number of the rank among those of this machine.
        run: see `nmt.train.runs.begin`.
        lock: kept open as long as this process lives.
        explain: gives the line about an error, or None.
        failures: queue that gets a `Failure`.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # until there is a step to save
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed process leaves behind
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
    os._exit(status)  # what torch tears down may wait for ranks that have gone


def _stop_with_parent() -> None:
    """Ask this process to stop once its parent has gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def _failure(rank: int, error: BaseException, explain: Explain) -> Failure:
    """Describe an error for the parent."""
    lost = lost_group(error)
    return Failure(rank, lost or explain(error), traceback.format_exc(), lost is not None)


# In the parent.


def train(opt: Namespace, run: dict[str, Any], lock: int | None, explain: Explain) -> None:
    """Train in this process, or in one for each rank of this machine.

    Args:
        opt, run, explain: see `be_rank`.
        lock: the file descriptor of the run's lock.

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
    """Train in one process for each rank of this machine.

    Signals are passed on to the ranks, which save and end. When one rank fails, the others are ended.

    Args:
        opt, run, explain: see `be_rank`.
        lock: the file descriptor of the run's lock.

    Raises:
        Interrupted: training was asked to stop; the ranks have saved the last whole step.
        UserError: a rank was killed, or failed by a mistake of the user.
        RuntimeError: a rank failed by a mistake of ours; it has the traceback.
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
    told: list[Failure] = []
    while not failures.empty():
        told.append(failures.get())
    for rank in ended:
        is_ours = -rank.exitcode in received or (rank.exitcode == -signal.SIGTERM and rank not in culprits)
        if rank.exitcode < 0 and not is_ours:
            raise UserError(_killed(opt.gpu_ranks[ranks.index(rank)], rank))
    _raise_first(told)
    stopped = [number for rank in ended if (number := _signal_of(rank))]
    if stopped or any(rank.exitcode for rank in ranks):
        raise Interrupted((received or stopped or [signal.SIGTERM])[0])


def _wait(ranks: list[Any], received: list[int]) -> tuple[list[Any], list[Any]]:
    """Wait for all ranks, and pass on the signals that are received.

    Returns:
        the ranks that failed first, and all that have ended by themselves.
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
    """Say whether a rank that has ended was neither done nor asked to stop."""
    return rank.exitcode != 0 and _signal_of(rank) is None and -rank.exitcode not in received


def _signal_of(rank: Any) -> int | None:
    """Return the signal at which a rank has saved and ended."""
    return next((number for number in SIGNALS if rank.exitcode == 128 + number), None)


def _send(ranks: list[Any], number: int) -> None:
    """Send a signal to ranks that are alive."""
    for rank in ranks:
        if rank.is_alive():
            os.kill(rank.pid, number)


def _raise_first(told: list[Failure]) -> None:
    """Raise why the first rank failed, but for those that have only lost it."""
    for failure in sorted(told, key=lambda failure: failure.is_lost):
        if failure.line is None:
            raise RuntimeError(f"rank {failure.rank} failed\n{failure.trace}")
        raise UserError(failure.line)


def _killed(number: int, rank: Any) -> str:
    """The line about a rank that was killed."""
    name = signal.Signals(-rank.exitcode).name
    hint = ", perhaps for lack of memory" if name == "SIGKILL" else ""
    return (
        f"rank {number} (process {rank.pid}) was killed by {name}{hint}; the other ranks were ended; "
        f"{RESUME} from the last checkpoint"
    )
