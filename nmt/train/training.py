"""One training process: OpenNMT-py's trainer with exact resumption and a report of parameters and ties."""

from __future__ import annotations

import ctypes
import random
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onmt.utils.logging
import torch
import torch.distributed
from onmt import train_single
from onmt.constants import CorpusTask
from onmt.inputters import dynamic_iterator
from onmt.inputters.text_corpus import get_corpora
from onmt.opts import model_opts
from onmt.transforms import make_transforms
from onmt.utils.logging import logger
from onmt.utils.optimizers import Optimizer
from onmt.utils.parse import ArgumentParser
from onmt.utils.report_manager import ReportMgr
from torch import Tensor
from tqdm import tqdm

from nmt.checkpoints import check_finite, checkpoint_errors, intact_steps
from nmt.embeddings import describe_parameters
from nmt.fixes.training import all_gather_list
from nmt.hooks import apply_patches
from nmt.length_control import check_same_positions
from nmt.plan import OPTION_NAMES, read_plan
from nmt.train import embeddings
from nmt.train.batches import QuietLoader, ResumableBatches, TrackedBatches, end_workers
from nmt.transforms import record_transforms
from shared_embeddings.checkpoints import check_optimizer
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.interrupts import Interrupted, Interrupts
from shared_embeddings.utils.results import WandbWriter, Writers


class ProgressReport(ReportMgr):  # type: ignore[misc]
    """OpenNMT-py's report with a progress bar on terminals and the remaining time in the log.

    It stops training that diverges; in distillation, it has the mean reconstruction loss since the last one.
    """

    def __init__(self, opt: Namespace, trainer: Any, first_step: int) -> None:
        writer = trainer.report_manager.tensorboard_writer
        if opt.wandb is not None and trainer.gpu_rank <= 0:
            wandb = WandbWriter(opt.wandb, Path(opt.save_model).parent, vars(opt))
            writer = Writers([wandb] if writer is None else [writer, wandb])
        super().__init__(opt.report_every, start_time=-1, tensorboard_writer=writer)
        self.trainer = trainer
        self.first_step = first_step
        self.total_steps = 0 if opt.single_pass else opt.train_steps
        self.bar = tqdm(
            total=self.total_steps or None,
            initial=first_step,
            unit="step",
            disable=not sys.stderr.isatty() or logger.disabled,
            dynamic_ncols=True,
        )

    def report_training(self, step: int, *args: Any, **kwargs: Any) -> Any:
        """Update the bar and report the step."""
        self.bar.update(step - self.bar.n)
        return super().report_training(step, *args, **kwargs)

    def _report_training(
        self, step: int, num_steps: int, learning_rate: float, patience: Any, report_stats: Any
    ) -> Any:
        mean = report_stats.loss / max(1, report_stats.n_words)
        # Gradient scaling skips steps with overflow.
        check_finite(self.trainer.model, step, 0.0 if self.trainer.optim.amp else mean)
        result = super()._report_training(step, num_steps, learning_rate, patience, report_stats)
        if self.total_steps > 0:
            done = max(1, step - self.first_step)
            left = (self.total_steps - step) * (time.time() - self.start_time) / done
            self.log(f"{step / self.total_steps:.0%} done, about {tqdm.format_interval(left)} left")
        loss = self.trainer.train_loss
        if isinstance(loss, embeddings.DistillationLoss) and loss.teacher_losses.reconstruction is not None:
            distance = loss.take_mean()
            self.log(f"reconstruction loss: {distance:.5f}")
            if self.tensorboard_writer is not None:
                self.tensorboard_writer.add_scalar("progress/reconstruction", distance, step)
        return result


class Stopping:
    """Stops training on all ranks after the same step; only the first rank updates the `stopper`."""

    def __init__(self, stopper: Any) -> None:
        self.stopper = stopper
        self.interrupts = Interrupts()
        self.signal = 0  # the one that stopped training on all ranks
        self.steps = 0  # number of steps that this process has begun

    def next_batches(self, batches: Iterator[Any]) -> Any:
        """Return the batches of the next step, or None when training stops; every rank calls this.

        A signal interrupts the wait for batches. Batches of a step that is not made do not count as read.
        Before the first step, there is nothing to save: the signal raises `Interrupted`.
        """
        taken = None
        try:
            with self.interrupts.raised_now():
                taken = next(batches, None)
        except Interrupted:
            pass  # the other ranks must agree first
        if self.agree():
            if self.signal and not self.steps:
                raise Interrupted(self.signal)
            return None
        self.steps += 1
        return taken

    def agree(self) -> bool:
        """Return whether any rank wants to stop; every rank calls this at the same time."""
        asked, ends = self.interrupts.received or 0, bool(getattr(self.stopper, "ends", False))
        if torch.distributed.is_initialized():
            device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
            votes = torch.tensor([asked, int(ends)], device=device)
            torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX)
            asked, ends = int(votes[0]), bool(votes[1])
        self.signal = asked
        return bool(asked or ends)


def keep_freed_memory() -> None:
    """Make the C library keep freed memory; page faults take half of the time of training steps on CPUs."""
    trim_threshold, mmap_max, arena_max = -1, -4, -8  # of mallopt(3) in the GNU C library
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return  # another C library: slower
    for parameter, value in ((mmap_max, 0), (trim_threshold, 2**31 - 1), (arena_max, 1)):
        mallopt(parameter, value)


def run_process(opt: Namespace, device_id: int, record: dict[str, Any] | None = None) -> None:
    """Apply the patches, train, and leave the process group; see `train`."""
    apply_patches()
    train(opt, device_id, record)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # else torch may abort if other processes have ended


def train(opt: Namespace, device_id: int, record: dict[str, Any] | None) -> None:
    """Train in this process; raises `Interrupted` when a signal has stopped training.

    `device_id` is -1 for a single process on a CPU; `record` is that of the run, see `nmt.train.runs.begin`.
    """
    if opt.wandb is not None:
        require("wandb")  # before the long work
    train_single.configure_process(opt, device_id)
    onmt.utils.logging.init_logger(opt.log_file)
    if not torch.cuda.is_available():
        keep_freed_memory()
    with checkpoint_errors(opt.train_from):
        checkpoint, vocabs, transforms_cls = train_single._init_train(opt)
        model_opt = train_single._get_model_opts(opt, checkpoint=checkpoint)
        if checkpoint is not None:
            _check_same_embedding(opt, embeddings.requested_options(checkpoint["opt"]))
            check_same_positions(opt, checkpoint["opt"])
            _check_same_copying(opt, checkpoint["opt"])
            _warn_of_sizes(opt, checkpoint["opt"])
            embeddings.resume_distillation(opt, model_opt)
            record_transforms(opt, model_opt)
        model = train_single.build_model(model_opt, opt, vocabs, checkpoint, device_id)
    teacher_losses = embeddings.prepare_student(model, model_opt, vocabs, is_new=checkpoint is None)
    for tensor in [*model.parameters(), *model.buffers()] if torch.distributed.is_initialized() else ():
        torch.distributed.broadcast(tensor.data, src=0)
    logger.info(describe_parameters(model))
    with checkpoint_errors(opt.train_from):
        optim = _build_optimizer(opt, model, checkpoint)
    first_step = optim.training_step - 1
    check_same_start(opt, first_step)
    if not opt.single_pass and 0 < opt.train_steps <= first_step:
        logger.info(f"The checkpoint has {first_step} steps, train_steps is {opt.train_steps}: nothing to do")
        return
    saver = train_single.build_model_saver(model_opt, opt, model, vocabs, optim, device_id)
    saver.run = record
    if opt.keep_checkpoint > 0:  # counts the existing checkpoints of a resumed run
        earlier = [step for step in intact_steps(opt.save_model) if step <= first_step]
        bases = [f"{opt.save_model}_step_{step}" for step in earlier]
        saver.checkpoint_queue.extend(f"{base}.pt" for base in bases)
        if opt.save_format == "safetensors":
            saver.model_queue.extend(f"{base}.safetensors" for base in bases)
    trainer = _build_trainer(opt, device_id, model, vocabs, optim, saver)
    if any(teacher_losses):
        trainer.train_loss = embeddings.DistillationLoss(trainer.train_loss, teacher_losses, model.generator)
    trainer.report_manager = ProgressReport(opt, trainer, first_step)
    # Otherwise training only uses the weights of the checkpoint.
    continues = opt.train_from and opt.reset_optim == "none"
    resume = _own_resume_state(checkpoint, opt.num_workers) if continues else None
    if continues and first_step > 0:
        with checkpoint_errors(opt.train_from):
            _restore_average(trainer, opt, checkpoint.get("trained"))
    del checkpoint
    with checkpoint_errors(opt.train_from):
        batches = _build_training_batches(opt, transforms_cls, vocabs, device_id, resume)
    valid = train_single.build_dynamic_dataset_iter(
        opt, transforms_cls, vocabs, task=CorpusTask.VALID, copy=opt.copy_attn, device_id=device_id
    )
    onmt.utils.logging.init_logger(opt.log_file)  # OpenNMT-py closes the log file when it opens a corpus
    saver.resume_state = lambda: gather_resume_state(trainer, batches)
    with checkpoint_errors(opt.train_from):
        restore_state(trainer, resume)
    restore_dropout(model, opt, first_step)
    _train(trainer, batches, valid, opt)


def _build_optimizer(opt: Namespace, model: Any, checkpoint: dict[str, Any] | None) -> Any:
    if checkpoint is not None and checkpoint.get("optim") is None:
        # Compressed, averaged and released models have none.
        logger.info("The checkpoint has no optimizer state: starting one with the options of this run")
        checkpoint.pop("optim", None)
    optim = Optimizer.from_opt(model, opt, checkpoint=checkpoint)
    for part in getattr(optim._optimizer, "optimizers", [optim._optimizer]):
        check_optimizer(part)
    return optim


def check_same_start(opt: Namespace, first_step: int) -> None:
    """Check that all ranks start at the same step."""
    steps = _gather(first_step)
    if len(set(steps)) > 1:
        raise UserError(
            f"save_model: the ranks find different checkpoints of {opt.save_model} (their steps: "
            f"{', '.join(map(str, steps))}); put save_model where all machines see the same files"
        )


def _build_trainer(
    opt: Namespace, device_id: int, model: Any, vocabs: dict[str, Any], optim: Any, saver: Any
) -> Any:
    trainer = train_single.build_trainer(opt, device_id, model, vocabs, optim, model_saver=saver)
    trainer.average_interval, trainer.average_every = opt.average_every, 1  # see `nmt.fixes.training`
    if opt.autocast == "bf16":
        device = next(model.parameters()).device.type
        for module in (model, trainer.train_loss, trainer.valid_loss):
            # A new context per call, because contexts cache weights.
            module.forward = torch.autocast(device, torch.bfloat16)(module.forward)
    if trainer.earlystopper is not None:
        # OpenNMT-py's default scorers are global.
        stopper = trainer.earlystopper
        stopper.early_stopping_scorers = [type(scorer)() for scorer in stopper.early_stopping_scorers]
    return trainer


def _train(trainer: Any, batches: TrackedBatches, valid: Any, opt: Namespace) -> None:
    trainer.stopping = Stopping(trainer.earlystopper)
    try:
        with trainer.stopping.interrupts:
            trainer.train(
                batches,
                0 if opt.single_pass else opt.train_steps,
                save_checkpoint_steps=opt.save_checkpoint_steps,
                valid_iter=valid,
                valid_steps=opt.valid_steps,
            )
        if trainer.stopping.signal:
            raise Interrupted(trainer.stopping.signal)
    finally:
        end_workers()
        trainer.report_manager.bar.close()
        if trainer.report_manager.tensorboard_writer is not None:
            trainer.report_manager.tensorboard_writer.close()


def restore_dropout(model: Any, opt: Namespace, step: int) -> None:
    """Set the dropout of a resumed model to its schedule; OpenNMT-py only does it at the step itself."""
    reached = [place for place, start in enumerate(opt.dropout_steps) if start <= step]
    if reached and reached[-1] > 0:
        model.update_dropout(opt.dropout[reached[-1]], opt.attention_dropout[reached[-1]])


def _check_same_embedding(opt: Namespace, saved: Namespace) -> None:
    """Check that embedding options do not differ from those of the checkpoint."""
    wanted, found = read_plan(opt), read_plan(saved)
    asked = [name for name in OPTION_NAMES if getattr(opt, name, None) is not None]
    if asked and not (wanted and found and wanted.fits(found)):
        raise UserError(
            f"{asked[0]}: {getattr(opt, asked[0])} has no effect with train_from because the checkpoint was "
            f"trained with {getattr(saved, asked[0], None)}; remove the option, or train a new model"
        )


def _check_same_copying(opt: Namespace, saved: Namespace) -> None:
    """Check that the loss fits the output layer of the checkpoint."""
    found = bool(getattr(saved, "copy_attn", False))
    if opt.copy_attn != found:
        raise UserError(
            f"copy_attn: {str(opt.copy_attn).lower()}, but the model was trained with {str(found).lower()}; "
            "set it to that, or train a new model"
        )


def _warn_of_sizes(opt: Namespace, saved: Namespace) -> None:
    """Warn of given sizes that differ from those of the checkpoint, which are used."""
    defaults = ArgumentParser.defaults(model_opts)
    for name in (
        "word_vec_size",
        "hidden_size",
        "layers",
        "enc_layers",
        "dec_layers",
        "heads",
        "transformer_ff",
    ):
        asked, found = getattr(opt, name), getattr(saved, name, None)
        if found is not None and asked not in (found, getattr(defaults, name)):
            logger.warning(f"{name}: {asked} has no effect with train_from; the checkpoint has {found}")


def _build_training_batches(
    opt: Namespace, transforms_cls: Any, vocabs: dict[str, Any], device_id: int, resume: dict[str, Any] | None
) -> TrackedBatches:
    """Build the infinite stream of training batches of this process, starting at a saved position if any."""
    offset, stride = data_share(opt, device_id)
    cpu = torch.device("cpu")
    device = torch.device(device_id) if device_id >= 0 and torch.cuda.is_available() else cpu
    data = ResumableBatches.from_opt(
        get_corpora(opt, CorpusTask.TRAIN),
        make_transforms(opt, transforms_cls, vocabs),
        vocabs,
        opt,
        CorpusTask.TRAIN,
        copy=opt.copy_attn,
        device=cpu if opt.num_workers else device,
        stride=stride,
        offset=offset,
    )
    data.num_workers = opt.num_workers
    start = None if resume is None else resume["data"]
    if start is not None:
        data.start = start["workers"]
        data.first_worker = (start["last_worker"] + 1) % max(1, opt.num_workers)
    if opt.num_workers == 0:
        data._init_datasets(0)
        return TrackedBatches(data, start)
    loader = QuietLoader(
        data,
        batch_size=None,
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context="spawn",
        num_workers=opt.num_workers,
        worker_init_fn=data._init_datasets,
        prefetch_factor=opt.prefetch_factor,
    )
    return TrackedBatches(dynamic_iterator.OnDeviceDatasetIter(loader, device), start)


def data_share(opt: Namespace, device_id: int) -> tuple[int, int]:
    """Return the part of the training data that this process reads, and the number of parts.

    OpenNMT-py only counts the processes of one machine, so that all machines would read the same examples.
    """
    if opt.parallel_mode != "data_parallel" or device_id < 0:
        return 0, 1
    return opt.gpu_ranks[device_id], opt.world_size


def _gather(value: Any) -> list[Any]:
    return all_gather_list(value) if torch.distributed.is_initialized() else [value]


def gather_resume_state(trainer: Any, batches: TrackedBatches) -> list[dict[str, Any]]:
    """Return the state of each process for exact resumption, except weights and optimizer."""
    name, keys, *rest = np.random.get_state()
    stopper = trainer.earlystopper
    stopping = stopper and {
        "stalled": stopper.stalled_tolerance,
        "current": stopper.current_tolerance,
        "status": stopper.status.value,
        "best_step": stopper.current_step_best,
        "best": {scorer.name: float(scorer.best_score) for scorer in stopper.early_stopping_scorers},
    }
    state = {
        "data": batches.state(),
        "random": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
        "early_stopping": stopping,
    }
    return _gather(state)


def _own_resume_state(checkpoint: dict[str, Any], workers: int) -> dict[str, Any] | None:
    """Return the resume state of this process in a checkpoint.

    It is None for checkpoints of OpenNMT-py and after a change of the number of processes. After a change of
    the number of loader workers, it has no data position.
    """
    states = checkpoint.get("resume")
    distributed = torch.distributed.is_initialized()
    world = torch.distributed.get_world_size() if distributed else 1
    if not states:
        logger.warning("The checkpoint has no data position: starting the data over")
        return None
    if len(states) != world:
        logger.warning(
            f"The checkpoint has {len(states)} processes, this run {world}: starting the data over"
        )
        return None
    state = dict(states[torch.distributed.get_rank() if distributed else 0])
    before = ((checkpoint.get("run") or {}).get("settings") or {}).get("num_workers", workers)
    if before != workers:
        logger.warning(f"num_workers was {before} and is now {workers}: starting the data over")
        state["data"] = None
    return state


def _restore_average(trainer: Any, opt: Namespace, trained: dict[str, Tensor] | None) -> None:
    """Restore what `average_decay` averages; the model has been loaded with the averages."""
    if opt.average_decay > 0:
        parameters = [parameter.detach().float() for parameter in trainer.model.parameters()]
        # Without `trained`, the average is still the first one, which is the parameter itself.
        trainer.moving_average = parameters if trained is None else [mean.clone() for mean in parameters]
    if trained is not None:
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                parameter.copy_(trained[name])


def restore_state(trainer: Any, state: dict[str, Any] | None) -> None:
    """Restore random states and early stopping."""
    if state is None:
        return
    version, numbers, gauss = state["random"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    saved, stopper = state["early_stopping"], trainer.earlystopper
    if saved is not None and stopper is not None:
        stopper.stalled_tolerance = saved["stalled"]
        stopper.current_tolerance = saved["current"]
        stopper.status = type(stopper.status)(saved["status"])
        stopper.current_step_best = saved["best_step"]
        for scorer in stopper.early_stopping_scorers:
            scorer.best_score = saved["best"].get(scorer.name, scorer.best_score)
