"""Training with several processes on this machine (ranks)."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import signal
from argparse import Namespace
from typing import Any

import onmt.utils.distributed
import torch.distributed
import torch.multiprocessing
from onmt.utils.misc import set_random_seed
from onmt.utils.parse import ArgumentParser
from torch.multiprocessing import ProcessExitedException

from nmt.hooks import apply_patches
from nmt.train import training
from shared_embeddings.utils.command_line import StopFlag
from shared_embeddings.utils.errors import UserError

_POLL_SECONDS = 0.2


def train(opt: Namespace, record: dict[str, Any]) -> None:
    """Train in this process, or in one process per rank of this machine.

    Ranks ignore signals; this process passes them on, so that all ranks save and stop after the same step.
    UserError if a rank was killed; `ProcessRaisedException` with its traceback if one failed.
    """
    ArgumentParser.validate_train_opts(opt)
    ArgumentParser.update_model_opts(opt)
    ArgumentParser.validate_model_opts(opt)
    set_random_seed(opt.seed, False)
    if opt.world_size <= 1:
        training.train(opt, 0 if opt.gpu_ranks else -1, record, None)
        return
    event = multiprocessing.get_context("spawn").Event()
    with StopFlag() as stop:
        ranks = torch.multiprocessing.start_processes(
            _train_rank, (opt, record, event), len(opt.gpu_ranks), join=False, start_method="spawn"
        )
        try:
            while not ranks.join(_POLL_SECONDS, grace_period=30):
                if stop.requested:
                    event.set()
        except ProcessExitedException as error:
            stop.raise_requested()  # SIGTERM to the process group while ranks start, before they ignore it
            raise UserError(
                f"rank {opt.gpu_ranks[error.error_index]} (process {error.error_pid}) ended with "
                f"{error.signal_name or error.exit_code}, possibly out of memory; the other ranks were "
                "stopped; run the same command again to resume from the last checkpoint"
            ) from error
        finally:
            for process in ranks.processes:
                process.kill()
    stop.raise_requested()


def _train_rank(index: int, opt: Namespace, record: dict[str, Any], event: Any) -> None:
    atexit.register(gc.freeze)  # no last collection: it takes longer than all else after the checkpoint
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    onmt.utils.distributed.multi_init(opt, index)
    apply_patches()
    training.train(opt, index, record, lambda: event.is_set() or parent is None or not parent.is_alive())
    torch.distributed.destroy_process_group()  # else torch may abort if other processes have ended
