"""The training loop of a language model in the processes of torchrun, and its reports: a bar, log lines,
TensorBoard, Weights & Biases.

Axes: ``B`` columns of text of this process, ``T`` tokens of a segment.
"""

from __future__ import annotations

import gc
import math
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  (imported later, its defaults would keep the group alive)
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from lm.cli import chosen_device
from lm.data.corpus import Columns
from lm.evaluation import Reading, evaluate, perplexity
from lm.models import LanguageModel, State
from lm.train.config import Configuration
from lm.train.optim import Averages, build_optimizer, draw_length, is_stalled, rate_factor, starts_averaging
from shared_embeddings.compress.distillation import Reconstruction, SoftTargets, soft_cross_entropy
from shared_embeddings.nn.layers import set_updates
from shared_embeddings.utils.command_line import StopFlag
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.results import WandbWriter


@dataclass(frozen=True)
class Group:
    """This process and its group."""

    device: torch.device  # of this process
    rank: int = 0  # rank 0 writes and prints
    world_size: int = 1  # number of processes

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes by rank, in every process."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a tensor over all processes."""
        if self.world_size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value / self.world_size


@contextmanager
def joined(device: str) -> Iterator[Group]:
    """Join the process group of torchrun, or create a group of one process, on a `chosen_device`."""
    place = chosen_device(device, int(os.environ.get("LOCAL_RANK", 0)))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1:
        yield Group(place)
        return
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield Group(place, dist.get_rank(), world_size)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they hold the model, and the model the group
        raise
    finally:
        dist.destroy_process_group()
        # A thread of gloo that frees a tensor while the interpreter shuts down aborts the process. Threads
        # end with the last reference to the group, which `DistributedDataParallel` has in cycles.
        gc.collect()


class Report:
    """Reports the progress of a run.

    Args:
        folder: of ``train.log``, which is appended to, and ``tensorboard/``. None in processes that report
            nothing.
        first_step: steps before this process.
        total_tokens, done_tokens: approximate tokens of the run, and before this process.
        writers: also get what TensorBoard gets.
    """

    def __init__(
        self,
        folder: Path | None = None,
        first_step: int = 0,
        total_tokens: int = 0,
        done_tokens: int = 0,
        writers: Iterable[WandbWriter] = (),
    ) -> None:
        self._log, self._writers = None, list[Any](writers)
        self.is_terminal = folder is not None and sys.stderr.isatty()
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            self._log = (folder / "train.log").open("a", encoding="utf-8")
            tensorboard: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
            self._writers.insert(0, tensorboard)
        self.bar = tqdm(
            total=max(total_tokens, done_tokens),
            initial=done_tokens,
            unit="tok",
            unit_scale=True,
            disable=not self.is_terminal,
            dynamic_ncols=True,
        )
        self._begin = time.monotonic()
        self._start = done_tokens / max(total_tokens, 1)

    def line(self, text: str) -> None:
        """Write a line to stdout and the log."""
        if self._log is not None:
            print(text, file=self._log, flush=True)
            with tqdm.external_write_mode(sys.stdout):
                print(text, flush=True)

    def training(self, step: int, epoch: float, values: Mapping[str, float], done: float) -> None:
        """Report the steps since the last line.

        Args:
            step, epoch: their numbers so far.
            values: ``loss`` (nats per token), ``rate`` (learning rate), ``norm`` (gradient norm), ``speed``
                (tokens per second), ``step_ms`` (milliseconds per step), and optionally ``reconstruction``
                (loss of the teacher's table).
            done: fraction of training that is done.
        """
        passed = time.monotonic() - self._begin
        left = tqdm.format_interval(min(passed * (1 - done) / max(done - self._start, 1e-9), 1e9))
        distance = f" reconstruction {values['reconstruction']:.5f}" if "reconstruction" in values else ""
        self.line(
            f"step {step} epoch {epoch:.2f} loss {values['loss']:.6f} ppl {perplexity(values['loss']):.2f} "
            f"lr {values['rate']:.4g}{distance} | {values['speed']:,.0f} tokens/s, "
            f"{values['step_ms']:.1f} ms per step, {left} left"
        )
        self.bar.set_postfix(loss=f"{values['loss']:.3f}", refresh=False)
        self._write({f"train/{name}": value for name, value in values.items()}, step)

    def validation(self, step: int, loss: float, best: float, averaged: int) -> None:
        """Report a validation: nats per token, now and at best, and the number of averaged steps."""
        note = f", averaged over {averaged} steps" if averaged else ""
        place = "the best so far" if loss <= best else f"best {perplexity(best):.2f}"
        self.line(f"step {step} valid loss {loss:.6f} ppl {perplexity(loss):.2f} ({place}){note}")
        self._write({"valid/loss": loss, "valid/perplexity": perplexity(loss)}, step)

    def _write(self, values: Mapping[str, float], step: int) -> None:
        for writer in self._writers:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the progress bar and the files."""
        for file in (self.bar, *self._writers, self._log):
            if file is not None:
                file.close()


class Trainer:
    """One process of a training run.

    Args:
        model: on its device.
        train, valid: word ids ``(N,)`` of the texts.
        reconstruction, soft_targets: see `SegmentLoss`.
    """

    def __init__(
        self,
        config: Configuration,
        model: LanguageModel,
        train: np.ndarray,
        valid: np.ndarray,
        group: Group,
        reconstruction: Reconstruction | None = None,
        soft_targets: SoftTargets | None = None,
    ) -> None:
        self.options, self.schedule, self.rule = config.training, config.schedule, config.optimizer
        self.model, self.valid, self.group = model, valid, group
        self.reconstruction = reconstruction
        self._columns = self.options.batch_size * group.world_size
        self.text_columns = Columns(train, self.options.batch_size, group.rank, group.world_size)
        # Those with sparse gradients have an optimizer of their own; they are neither clipped nor averaged.
        sparse = [] if model.ngrams is None else model.ngrams.sparse_parameters()
        known = {id(parameter) for parameter in sparse}
        self.parameters = [
            parameter
            for parameter in model.parameters()
            if parameter.requires_grad and id(parameter) not in known
        ]
        self.optimizer: torch.optim.Optimizer = build_optimizer(self.rule, self.parameters)
        self.ngram_rate = config.ngrams.ngram_learning_rate
        self.row_optimizer = torch.optim.SGD(sparse, self.ngram_rate) if sparse else None
        self.averages: Averages | None = None  # once averaging has started
        self.lengths = random.Random(self.options.seed)  # of segments, the same in all processes
        self.step, self.epoch = 0, 0  # complete ones
        self.position = 0  # tokens of each column read in this epoch
        self.scores: list[float] = []  # validation losses in nats per token
        loss = SegmentLoss(model, reconstruction, soft_targets)
        parts = self.options.grad_accum_steps
        self._start = [loss.initial_state(self.options.batch_size // parts) for _ in range(parts)]
        self.states = list(self._start)  # of each part of a batch
        # Nats and tokens of this process since the last log line.
        self.window = torch.zeros(2, dtype=torch.float64, device=group.device)
        self._loss: nn.Module = torch.compile(loss) if self.options.compile else loss  # type: ignore[assignment]
        if group.world_size > 1:
            if model.ngrams is not None:
                model.ngrams.embedding.has_sparse_gradients = False  # which are not reduced here
            # Clusters of rare words get no gradient from segments without their words.
            self._loss = DistributedDataParallel(
                self._loss, find_unused_parameters=True, broadcast_buffers=False
            )
        is_mixed = self.options.precision == "bf16"
        self.autocast = torch.autocast(group.device.type, torch.bfloat16, enabled=is_mixed)
        self._stop = StopFlag()
        self._asked: tuple[Tensor, Any] | None = None  # the largest signal of all processes, when it is known

    @property
    def epochs(self) -> float:
        """Number of epochs, including fractions."""
        return self.epoch + self.position / (self.text_columns.length - 1)

    @property
    def tokens(self) -> int:
        """Tokens read by all processes together."""
        return round(self.epochs * (self.text_columns.length - 1)) * self._columns

    @property
    def done(self) -> float:
        """Fraction of training that is done."""
        if self.options.steps is not None:
            return self.step / self.options.steps
        return self.epochs / (self.options.epochs or 1)

    def run(self, report: Report, save: Callable[[], None], save_best: Callable[[], None]) -> None:
        """Run the training loop.

        All processes call `save`, which saves the state for resumption; the first one calls `save_best` with
        averaged parameters in place.

        Raises:
            UserError: the loss or a parameter is not finite; the state is not saved.
            KeyboardInterrupt: a process was asked to stop; `save` was called after the last whole step.
        """
        options = self.options
        since = time.monotonic(), self.step, self.tokens
        with self._stop:
            while self.done < 1:
                if options.patience is not None and is_stalled(self.scores, options.patience):
                    break
                if self.averages is None and starts_averaging(self.rule, self.scores):
                    self.averages = Averages(self.parameters)
                figures = self._train_step()
                report.bar.update(self._last_tokens)
                if self.step % options.log_every == 0:
                    self.check_finite()
                    nats, tokens = self.group.mean(self.window).tolist()
                    self.window.zero_()
                    now = time.monotonic(), self.step, self.tokens
                    seconds, steps, read = (end - start for start, end in zip(since, now))
                    since, seconds = now, max(seconds, 1e-9)
                    speeds = {"speed": read / seconds, "step_ms": 1000 * seconds / steps}
                    figures = {"loss": nats / tokens, **figures, **speeds, "norm": float(figures["norm"])}
                    if self.reconstruction is not None:
                        figures["reconstruction"] = self.reconstruction.current()
                    report.training(self.step, self.epochs, figures, self.done)
                every = options.evaluate_every
                is_epoch = self.position == 0 if every is None else self.step % every == 0
                is_saved = validates = self.done >= 1 or is_epoch
                if validates:
                    self._validate(report, save_best)
                    since = time.monotonic(), self.step, self.tokens
                elif options.save_every:
                    is_saved = self.step % options.save_every == 0
                if is_saved:
                    self.check_finite()
                    save()
                if number := self._asked_to_stop():
                    if not is_saved:
                        self.check_finite()
                        save()
                    self._stop.requested = number
                    self._stop.raise_requested()

    def check_finite(self) -> None:
        """Raise `UserError` if a parameter or the loss since the last log line is not finite."""
        loss = self.group.mean(self.window)[0]
        parameters = all(bool(torch.isfinite(parameter).all()) for parameter in self.model.parameters())
        if not parameters or not bool(torch.isfinite(loss)):
            what = "a parameter is not finite" if bool(torch.isfinite(loss)) else f"the loss is {float(loss)}"
            raise UserError(
                f"{what} at step {self.step}; earlier checkpoints are unchanged; lower learning_rate or "
                "max_grad_norm and train with another output_dir, optionally with init_from"
            )

    def _train_step(self) -> dict[str, Any]:
        """Train on one segment; returns the learning rate and the gradient norm."""
        options = self.options
        length = options.sequence_length
        if options.random_bptt:
            length = draw_length(length, self.lengths)
        ids, targets = self.text_columns.segment(self.position, length, self.group.device)
        length = ids.size(1)  # the last segment of an epoch may be shorter
        rate = self.rule.learning_rate * rate_factor(self.schedule, self.done, self.epochs, self.scores)
        if options.warmup_steps:
            rate *= min(1.0, (self.step + 1) / options.warmup_steps)
        if options.random_bptt:
            rate *= length / options.sequence_length
        for group in self.optimizer.param_groups:
            group["lr"] = float(rate)
        if self.row_optimizer is not None:
            [rows] = self.row_optimizer.param_groups
            rows["lr"] = self.ngram_rate * float(rate) / self.rule.learning_rate
        set_updates(self.model, self.step)
        self.model.zero_grad(set_to_none=True)
        parts = options.grad_accum_steps
        for part, (part_ids, part_targets) in enumerate(zip(ids.chunk(parts), targets.chunk(parts))):
            # Processes exchange gradients with the last part only.
            is_shared = isinstance(self._loss, DistributedDataParallel) and part < parts - 1
            with self._loss.no_sync() if is_shared else nullcontext():  # type: ignore[operator]
                with self.autocast:
                    loss, cross_entropy, self.states[part] = self._loss(
                        part_ids, part_targets, *self.states[part]
                    )
                (loss / parts).backward()
            tokens = part_ids.numel()
            self.window += torch.stack([cross_entropy.double() * tokens, self.window.new_tensor(tokens)])
        norm = nn.utils.clip_grad_norm_(self.parameters, options.max_grad_norm or math.inf)
        self.optimizer.step()
        if self.row_optimizer is not None:
            self.row_optimizer.step()
        if self.averages is not None:
            self.averages.update()
        self.step += 1
        self.position += length
        self._last_tokens = length * self._columns
        if self.position >= self.text_columns.length - 1:
            self.epoch, self.position = self.epoch + 1, 0
            self.states = list(self._start)
        return {"rate": rate, "norm": norm}

    def _validate(self, report: Report, save_best: Callable[[], None]) -> None:
        """Evaluate on the validation text, with averaged parameters if there are any."""
        self.check_finite()
        parts = self.options.valid_batch_size
        chunk = math.ceil((len(self.valid) - 1) / parts)
        reading = Reading(self.options.sequence_length, chunk_length=chunk, batch_size=parts)
        with self.averages.in_place() if self.averages else nullcontext():
            with self.autocast:
                score = evaluate(self.model, self.valid, reading, report.is_terminal)
            # All processes use bitwise the same score.
            loss = float(self.group.gather(score.nats / score.tokens)[0])
            if not math.isfinite(loss):
                raise UserError(f"the validation loss is {loss} at step {self.step}; lower learning_rate")
            is_best = loss < min(self.scores, default=math.inf)
            self.scores.append(loss)
            averaged = 0 if self.averages is None else self.averages.steps
            report.validation(self.step, loss, min(self.scores), averaged)
            if is_best and self.group.is_first:
                save_best()

    def _asked_to_stop(self) -> int:
        """The number of a signal that any process has received, or 0.

        With several processes, the answer is one step late, so that all stop after the same step.
        """
        if self.group.world_size == 1:
            return self._stop.requested
        asked, largest = self._asked, torch.tensor(self._stop.requested, device=self.group.device)
        self._asked = largest, dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True)
        if asked is None:
            return 0
        asked[1].wait()
        return int(asked[0])


class SegmentLoss(nn.Module):
    """A model and its training loss in one module, for compilation and data parallelism.

    A distilled model also has the reconstruction loss of the teacher's table, and learns its predictions.
    """

    def __init__(
        self,
        model: LanguageModel,
        reconstruction: Reconstruction | None = None,
        soft_targets: SoftTargets | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.reconstruction = reconstruction
        self.soft_targets = soft_targets

    def initial_state(self, batch_size: int) -> State:
        """The state at the beginning of texts: that of the model, then that of the teacher."""
        models = [self.model] if self.soft_targets is None else [self.model, self.soft_targets.teacher]
        return tuple(tensor for model in models for tensor in model.initial_state(batch_size))

    def forward(self, ids: Tensor, targets: Tensor, *state: Tensor) -> tuple[Tensor, Tensor, State]:
        """Return the loss, the mean cross entropy in nats, and the next state.

        Args:
            ids: ``(B, T)``.
            targets: ``(B, T)``, next words.
            state: as from `initial_state`.
        """
        if self.soft_targets is None:
            output = self.model(ids, state)
            loss = self.model.embedding.cross_entropy(output.hidden, targets)
            cross_entropy, after = loss.detach(), output.state
        else:
            teacher, share = self.soft_targets
            split = len(state) - len(teacher.initial_state(1))
            output = self.model(ids, state[:split])
            with torch.no_grad():
                taught = teacher(ids, state[split:])
                teacher_scores = teacher.embedding.logits(taught.hidden).flatten(0, 1)
            scores = self.model.embedding.logits(output.hidden).flatten(0, 1)
            loss = soft_cross_entropy(scores, teacher_scores, targets.flatten(), share)
            cross_entropy = F.cross_entropy(scores.detach(), targets.flatten())
            after = output.state + taught.state
        if self.reconstruction is not None:
            loss = self.reconstruction.mixed_with(loss, self.reconstruction.loss())
        return loss + output.penalty, cross_entropy, after
