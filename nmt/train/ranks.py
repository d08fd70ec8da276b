"""Training with several processes on this machine (ranks), under the agent of torchrun in this process."""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import onmt.utils.distributed
from onmt.utils.misc import set_random_seed
from onmt.utils.parse import ArgumentParser
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from tqdm import tqdm

from nmt.train import training
from nmt.train.batches import signals_blocked
from shared_embeddings.utils.command_line import lost_group
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.interrupts import RESUME, SIGNALS, Interrupted, signals_delayed, signals_raised

Explain = Callable[[BaseException], "str | None"]

_POLL_SECONDS = 0.1
# A rank that has lost another one ends later, so that the agent sees the cause first.
_LATER = 10 * _POLL_SECONDS


class InheritedLock:
    """The lock of a run, a file descriptor if any, held until both the parent and its ranks have ended."""

    def __init__(self, descriptor: int | None) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> Any:
        """Duplicate the descriptor for a spawned process."""
        return _inherit, (None if self.descriptor is None else reduction.DupFd(self.descriptor),)


def _inherit(descriptor: Any) -> InheritedLock:
    return InheritedLock(None if descriptor is None else descriptor.detach())


class LostRankError(UserError):
    """Another rank ended first."""


def be_rank(opt: Namespace, run: dict[str, Any], lock: InheritedLock, explain: Explain) -> None:
    """Train as one rank, which the agent has started with signals blocked.

    `run` is the record of the run, see `nmt.train.runs.begin`; `explain` gives the message of a user error.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # until training handles them
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    tqdm.set_lock(threading.RLock())  # the default semaphore leaks when a process is killed
    # OpenNMT-py connects the ranks of all machines at master_ip and master_port.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    device = int(os.environ["LOCAL_RANK"])
    try:
        onmt.utils.distributed.multi_init(opt, device)
        training.run_process(opt, device, run)
    except Interrupted as error:
        sys.stdout.flush()
        os._exit(error.status)
    except SystemExit:
        pass  # after OpenNMT-py has written samples
    except Exception as error:
        lost = lost_group(error)
        if lost is not None:
            time.sleep(_LATER)
        line = explain(error)
        get_error_handler().record_exception(
            LostRankError(lost) if lost else UserError(line) if line else error
        )
        os._exit(1)
    sys.stdout.flush()
    atexit.register(os._exit, 0)  # the teardown of torch may wait for other ranks


class RankAgent(LocalElasticAgent):
    """The agent of torchrun; it starts all ranks before it handles a signal, and they start with it blocked,
    since half a start and imports would end in tracebacks."""

    def _start_workers(self, worker_group: Any) -> Any:
        with signals_delayed(), signals_blocked():
            return super()._start_workers(worker_group)


def train(opt: Namespace, run: dict[str, Any], lock: int | None, explain: Explain) -> None:
    """Train in this process, or in one process per rank of this machine; see `be_rank` and `train_ranks`."""
    ArgumentParser.validate_train_opts(opt)
    ArgumentParser.update_model_opts(opt)
    ArgumentParser.validate_model_opts(opt)
    set_random_seed(opt.seed, False)
    if opt.world_size > 1:
        train_ranks(opt, run, lock, explain)
    else:
        training.run_process(opt, 0 if opt.gpu_ranks else -1, run)


def train_ranks(opt: Namespace, run: dict[str, Any], lock: int | None, explain: Explain) -> None:
    """Train in one process per rank of this machine.

    The agent passes signals on to the ranks, which save and stop, and ends the others when a rank fails.

    Raises:
        Interrupted: a signal stopped training; the ranks have saved the last step.
        RuntimeError: a rank failed with an internal error; has its traceback.
    """
    place = RendezvousParameters("c10d", "localhost:0", f"onmt_train-{os.getpid()}", 1, 1)
    spec = WorkerSpec(
        role="rank",
        local_world_size=len(opt.gpu_ranks),
        rdzv_handler=get_rendezvous_handler(place),
        entrypoint=be_rank,
        args=(opt, run, InheritedLock(lock), explain),
        max_restarts=0,
        monitor_interval=_POLL_SECONDS,
    )
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"  # this function handles the others
    logging.disable()  # the agent logs signals and tracebacks
    failures: list[Any] = []
    received = 0
    try:
        with tempfile.TemporaryDirectory() as folder, signals_raised():
            try:
                result = RankAgent(spec, DefaultLogsSpecs(folder), start_method="spawn").run()
                failures = list(result.failures.values())
            except Interrupted as stop:
                received = stop.signal
            except SignalException as stop:
                received = stop.sigval
            errors = [json.loads(file.read_text())["message"] for file in Path(folder).rglob("error.json")]
    finally:
        logging.disable(logging.NOTSET)
    for failure in failures:
        received = received or max(0, failure.exitcode - 128)
        if failure.exitcode < 0:
            name, number = failure.signal_name(), opt.gpu_ranks[failure.local_rank]
            raise UserError(
                f"rank {number} (process {failure.pid}) was killed by {name}"
                f"{', possibly out of memory' if name == 'SIGKILL' else ''}; the other ranks were stopped; "
                f"{RESUME} from the last checkpoint"
            )
    for error in sorted(errors, key=lambda error: error["message"].startswith(LostRankError.__name__)):
        kind, _, line = error["message"].partition(": ")
        if kind in (UserError.__name__, LostRankError.__name__):
            raise UserError(line)
        raise RuntimeError(f"a rank failed\n{error['extraInfo']['py_callstack']}")
    if received:
        raise Interrupted(received)
    if failures:
        raise RuntimeError(f"a rank ended with status {failures[0].exitcode}")
