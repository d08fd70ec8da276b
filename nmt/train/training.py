"""One training process: OpenNMT-py's trainer with exact resumption and a report of parameters and ties."""

from __future__ import annotations

import copy
import math
import random
import sys
import time
from argparse import Namespace
from collections.abc import Callable
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
from onmt.transforms import make_transforms
from onmt.utils.logging import logger
from onmt.utils.misc import set_random_seed
from onmt.utils.optimizers import Optimizer
from onmt.utils.report_manager import ReportMgr
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from nmt.checkpoints import diverged, step_files
from nmt.embeddings import describe_parameters
from nmt.fixes.training import all_gather_list
from nmt.length_control import OPTION as POSITIONS
from nmt.plan import OPTION_NAMES, read_plan
from nmt.train import embeddings
from nmt.train.batches import ResumableBatches, TrackedBatches, end_workers
from nmt.transforms import record_transforms
from shared_embeddings.utils.command_line import StopFlag
from shared_embeddings.utils.errors import UserError, require
from shared_embeddings.utils.results import WandbWriter

# Whether to stop training.
MustStop = Callable[[], bool]


class ProgressReport(ReportMgr):  # type: ignore[misc]
    """OpenNMT-py's report with a progress bar on terminals and the remaining time in the log.

    It stops training that diverges; in distillation, it has the mean reconstruction loss since the last one.
    """

    def __init__(self, opt: Namespace, trainer: Any, first_step: int) -> None:
        writer = trainer.report_manager.tensorboard_writer
        if opt.wandb is not None and trainer.gpu_rank <= 0:
            others = [] if writer is None else [writer]
            writer = WandbWriter(opt.wandb, Path(opt.save_model).parent, vars(opt), *others)
        super().__init__(opt.report_every, start_time=-1, tensorboard_writer=writer)
        self.trainer = trainer
        self.begun: tuple[int, float] | None = None  # the first step of this process and its time
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
        self.begun = self.begun or (step, time.time())  # the first step waits for a bucket
        return super().report_training(step, *args, **kwargs)

    def _report_training(
        self, step: int, num_steps: int, learning_rate: float, patience: Any, report_stats: Any
    ) -> Any:
        mean = report_stats.loss / max(1, report_stats.n_words)
        if not math.isfinite(mean) and not self.trainer.optim.amp:  # gradient scaling skips such steps
            raise diverged(step, f"the loss is {mean}")
        result = super()._report_training(step, num_steps, learning_rate, patience, report_stats)
        assert self.begun is not None, "report_training comes first"
        first, start = self.begun
        if self.total_steps > 0 and step > first:
            left = (self.total_steps - step) * (time.time() - start) / (step - first)
            self.log(f"{step / self.total_steps:.0%} done, about {tqdm.format_interval(left)} left")
        loss = self.trainer.train_loss
        if isinstance(loss, embeddings.DistillationLoss) and loss.teacher_losses.reconstruction is not None:
            distance = loss.take_mean()
            self.log(f"reconstruction loss: {distance:.5f}")
            if self.tensorboard_writer is not None:
                self.tensorboard_writer.add_scalar("progress/reconstruction", distance, step)
        return result


def train(opt: Namespace, device_id: int, record: dict[str, Any], must_stop: MustStop | None) -> None:
    """Train in this process; raises `KeyboardInterrupt` when a signal has stopped training.

    Args:
        device_id: -1 for a single process on a CPU.
        record: the settings of the run, which its checkpoints store; see `nmt.train.runs.begin`.
        must_stop: whether a rank must stop, asked between steps; None to stop at signals.
    """
    if opt.wandb is not None:
        require("wandb")  # before the long work
    has_gpu = device_id >= 0 and torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(device_id)
    set_random_seed(opt.seed, has_gpu)
    onmt.utils.logging.init_logger(opt.log_file)
    checkpoint, vocabs, transforms_cls = train_single._init_train(opt)
    model_opt = train_single._get_model_opts(opt, checkpoint=checkpoint)
    if checkpoint is not None:
        _check_same_model(opt, vars(checkpoint["opt"]))
        embeddings.resume_distillation(opt, model_opt)
        record_transforms(opt, model_opt)
        if checkpoint.get("optim") is None:  # of compressed, averaged and released models
            logger.info("The checkpoint has no optimizer state: starting one with the options of this run")
            checkpoint.pop("optim", None)
    model = train_single.build_model(model_opt, opt, vocabs, checkpoint, device_id)
    teacher_losses = embeddings.prepare_student(model, model_opt, vocabs, is_new=checkpoint is None)
    for tensor in [*model.parameters(), *model.buffers()] if torch.distributed.is_initialized() else ():
        torch.distributed.broadcast(tensor.data, src=0)
    logger.info(describe_parameters(model))
    optim = Optimizer.from_opt(model, opt, checkpoint=checkpoint)
    first_step = optim.training_step - 1
    if not opt.single_pass and 0 < opt.train_steps <= first_step:
        logger.info(f"The checkpoint has {first_step} steps, train_steps is {opt.train_steps}: nothing to do")
        return
    saver = _build_saver(opt, model_opt, model, vocabs, optim, device_id, first_step)
    saver.run = record
    trainer = _build_trainer(opt, device_id, model, vocabs, optim, saver)
    if any(teacher_losses):
        trainer.train_loss = embeddings.DistillationLoss(trainer.train_loss, teacher_losses, model.generator)
    trainer.report_manager = ProgressReport(opt, trainer, first_step)
    # Otherwise training only uses the weights of the checkpoint.
    continues = opt.train_from and opt.reset_optim == "none"
    resume = _resume_state_of_process(checkpoint, opt.num_workers) if continues else None
    if continues and first_step > 0:
        _restore_average(trainer, opt, checkpoint.get("trained"))
    del checkpoint
    batches = _build_training_batches(opt, transforms_cls, vocabs, device_id, resume)
    valid = train_single.build_dynamic_dataset_iter(
        opt, transforms_cls, vocabs, task=CorpusTask.VALID, copy=opt.copy_attn, device_id=device_id
    )
    onmt.utils.logging.init_logger(opt.log_file)  # OpenNMT-py closes the log file when it opens a corpus
    saver.resume_state = lambda: gather_resume_state(trainer, batches)
    if resume is not None:
        restore_state(trainer, resume)
    # OpenNMT-py only follows the schedule at the step itself.
    reached = [place for place, start in enumerate(opt.dropout_steps) if start <= first_step]
    if reached and reached[-1] > 0:
        model.update_dropout(opt.dropout[reached[-1]], opt.attention_dropout[reached[-1]])
    _run_steps(trainer, batches, valid, opt, must_stop)


def _build_saver(
    opt: Namespace, model_opt: Namespace, model: Any, vocabs: Any, optim: Any, device_id: int, first_step: int
) -> Any:
    """Build the model saver, which removes old checkpoints of a resumed run, too (``keep_checkpoint``)."""
    saver = train_single.build_model_saver(model_opt, opt, model, vocabs, optim, device_id)
    if opt.keep_checkpoint > 0:
        for file, step in step_files(opt.save_model).items():
            if step <= first_step and file.suffix == ".pt":
                saver.checkpoint_queue.append(str(file))
                if opt.save_format == "safetensors":
                    saver.model_queue.append(str(file.with_suffix(".safetensors")))
    return saver


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
        stopper.early_stopping_scorers = copy.deepcopy(stopper.early_stopping_scorers)
    return trainer


def _run_steps(
    trainer: Any, batches: TrackedBatches, valid: Any, opt: Namespace, must_stop: MustStop | None
) -> None:
    """Train until the end, or until all ranks stop; see `nmt.fixes.training.end_at_same_step`."""
    try:
        with StopFlag() as flag:
            trainer.must_stop = must_stop or (lambda: bool(flag.requested))
            logger.info(f"Reading up to {opt.bucket_size:,} examples before the first step (bucket_size)")
            trainer.train(
                batches,
                0 if opt.single_pass else opt.train_steps,
                save_checkpoint_steps=opt.save_checkpoint_steps,
                valid_iter=valid,
                valid_steps=opt.valid_steps,
            )
        flag.raise_requested()
    finally:
        end_workers()
        trainer.report_manager.bar.close()
        if trainer.report_manager.tensorboard_writer is not None:
            trainer.report_manager.tensorboard_writer.close()


def _check_same_model(opt: Namespace, saved: dict[str, Any]) -> None:
    """Check that options of embeddings and of positions do not differ from those of the checkpoint."""
    before = {**saved, **saved.get(embeddings.REQUESTED, {})}
    wanted, trained = read_plan(opt), read_plan(Namespace(**before))
    differing = [name for name in OPTION_NAMES if getattr(opt, name, None) is not None]
    if differing and wanted and trained and wanted.fits(trained):
        differing = []
    positions = getattr(opt, POSITIONS, None)
    if positions is not None and set(positions) != set(saved.get(POSITIONS) or ["pe"]):
        differing.append(POSITIONS)
    for name in differing:
        raise UserError(
            f"{name}: {getattr(opt, name)} has no effect with train_from because the checkpoint was trained "
            f"with {before.get(name)}; remove the option, or train a new model"
        )


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
    loader: DataLoader[Any] = DataLoader(
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
    """Return the part of the training data that this process reads, and the parts of all machines."""
    is_split = opt.parallel_mode == "data_parallel" and device_id >= 0
    return (opt.gpu_ranks[device_id], opt.world_size) if is_split else (0, 1)


def gather_resume_state(trainer: Any, batches: TrackedBatches) -> list[dict[str, Any]]:
    """Return the state of each process for exact resumption, except weights and optimizer."""
    name, keys, *rest = np.random.get_state()
    stopper = trainer.earlystopper
    state = {
        "data": batches.marked,
        "random": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
        "early_stopping": stopper
        and {
            "stalled": stopper.stalled_tolerance,
            "current": stopper.current_tolerance,
            "status": stopper.status.value,
            "best_step": stopper.current_step_best,
            "best": {scorer.name: float(scorer.best_score) for scorer in stopper.early_stopping_scorers},
        },
    }
    return all_gather_list(state) if torch.distributed.is_initialized() else [state]


def _resume_state_of_process(checkpoint: dict[str, Any], workers: int) -> dict[str, Any] | None:
    """Return the resume state of this process in a checkpoint; None if it is of other processes.

    After a change of the number of loader workers, it has no data position.
    """
    states = checkpoint.get("resume") or []
    distributed = torch.distributed.is_initialized()
    processes = torch.distributed.get_world_size() if distributed else 1
    if len(states) != processes:
        logger.warning(
            f"The checkpoint has data positions of {len(states)} processes, this run {processes}: "
            "starting the data over"
        )
        return None
    state = dict(states[torch.distributed.get_rank() if distributed else 0])
    before = checkpoint["run"]["settings"]["num_workers"] if checkpoint.get("run") else workers
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


def restore_state(trainer: Any, state: dict[str, Any]) -> None:
    """Restore random states and early stopping."""
    random.setstate(state["random"])
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
