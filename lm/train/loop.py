"""The training of a language model, from any point of it on.

Axes: ``B`` columns of text of this process, ``T`` tokens of a segment.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lm.data.streams import Stream
from lm.evaluate.evaluation import evaluate
from lm.models.interface import LanguageModel, State
from lm.train.config import Configuration
from lm.train.distributed import Group
from lm.train.losses import SegmentLoss
from lm.train.optim import Averages, draw_length, is_stalled
from lm.train.progress import Report, Speed
from lm.train.schedules import Progress
from shared_embeddings.errors import UserError
from shared_embeddings.fitting.distillation import Reconstruction
from shared_embeddings.layers.dropout import set_updates
from shared_embeddings.utils.interrupts import Interrupted, Interrupts, signals_delayed


class Trainer:
    """One process of a training run.

    Args:
        config: all settings.
        model: on its device.
        train: the training text ``(N,)`` as word ids.
        valid: the validation text, likewise.
        group: the processes that train together.
        reconstruction: of the teacher's table, the loss beside the cross entropy; or None.

    Attributes:
        step: optimizer steps so far.
        epoch: whole passes through the data.
        position: tokens of every column that this pass has read.
        scores: nats per token of every validation.
        states: the model's state for every part of a batch.
        averages: of the parameters, once the optimizer asks for them.
        lengths: draws the lengths of segments; alike in all processes.
        window: nats and tokens since the last line of the log ``(2,)``, of this process.
    """

    def __init__(
        self,
        config: Configuration,
        model: LanguageModel,
        train: np.ndarray,
        valid: np.ndarray,
        group: Group,
        reconstruction: Reconstruction | None = None,
    ) -> None:
        self.options, self.schedule, self.optimizer_options = (
            config.training,
            config.schedule,
            config.optimizer,
        )
        self.model, self.valid, self.group = model, valid, group
        self.reconstruction = reconstruction
        self.stream = Stream(train, self.options.batch_size, group.rank, group.world_size)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer: torch.optim.Optimizer = config.optimizer.build(self.parameters)
        self.averages: Averages | None = None
        self.lengths = random.Random(self.options.seed)
        self.step, self.epoch, self.position = 0, 0, 0
        self.scores: list[float] = []
        self.states = self._fresh_states()
        self.window = torch.zeros(2, dtype=torch.float64, device=group.device)
        self._loss = self._wrapped_loss()
        self._interrupts = Interrupts()
        self._asked: Callable[[], int] = lambda: 0

    @property
    def epochs(self) -> float:
        """Passes through the data, with their fraction."""
        return self.epoch + self.position / (self.stream.length - 1)

    @property
    def done(self) -> float:
        """The share of training that is done."""
        if self.options.steps is not None:
            return self.step / self.options.steps
        assert self.options.epochs is not None
        return self.epochs / self.options.epochs

    @property
    def is_finished(self) -> bool:
        """Whether the wanted length is reached, or validation has stalled for too long."""
        patience = self.options.patience
        return self.done >= 1 or (patience is not None and is_stalled(self.scores, patience))

    @property
    def tokens(self) -> int:
        """Tokens that all processes together have read."""
        columns = self.options.batch_size * self.group.world_size
        return round(self.epochs * (self.stream.length - 1)) * columns

    @property
    def total_tokens(self) -> int:
        """About how many tokens all processes together will read."""
        columns = self.options.batch_size * self.group.world_size
        if self.options.steps is not None:
            return self.options.steps * self.options.sequence_length * columns
        assert self.options.epochs is not None
        return self.options.epochs * (self.stream.length - 1) * columns

    def run(self, report: Report, save: Callable[[], None], save_best: Callable[[], None]) -> None:
        """Train to the end.

        Args:
            report: hears of it.
            save: stores all that it takes to resume from here; called in every process.
            save_best: stores the model, whose averaged parameters are in place, after its best validation.

        Raises:
            UserError: the loss or a parameter is no finite number any more; nothing is saved then.
            Interrupted: a process was asked to stop; `output_dir` was called after the last whole step.
        """
        speed = Speed(self.tokens)
        with self._interrupts:
            while not self.is_finished:
                self._start_averaging_if_due()
                rate, norm = self._train_step()
                report.tokens(self._last_tokens)
                if self.step % self.options.log_every == 0:
                    report.training(self.step, self.epochs, self._figures(rate, norm, speed), self.done)
                if self._validation_is_due():
                    self._validate(report, save_best)
                    with signals_delayed():
                        save()
                    speed = Speed(self.tokens)
                elif self.options.save_every and self.step % self.options.save_every == 0:
                    self.check_finite()
                    with signals_delayed():
                        save()
                if number := self._asked_to_stop():
                    self.check_finite()
                    with signals_delayed():
                        save()
                    raise Interrupted(number)

    def check_finite(self) -> None:
        """Raise `UserError` unless losses since the last line of the log and all parameters are finite."""
        loss = self.group.mean(self.window)[0]
        parameters = all(bool(torch.isfinite(parameter).all()) for parameter in self.parameters)
        if not parameters or not bool(torch.isfinite(loss)):
            what = "a parameter is not finite" if bool(torch.isfinite(loss)) else f"the loss is {float(loss)}"
            raise UserError(
                f"{what} at step {self.step}; what was saved before is unchanged; lower learning_rate or "
                "max_grad_norm and train into another folder, with init_from to begin with what was saved"
            )

    # One step.

    def _train_step(self) -> tuple[float, Tensor]:
        """Follow the gradient of one segment; gives the learning rate and the gradient's norm."""
        options = self.options
        length = options.sequence_length
        if options.random_bptt:
            length = draw_length(length, self.lengths)
        ids, targets = self.stream.segment(self.position, length, self.group.device)
        rate = self._rate(ids.size(1))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        set_updates(self.model, self.step)
        self.optimizer.zero_grad(set_to_none=True)
        self._backward(ids, targets)
        norm = nn.utils.clip_grad_norm_(self.parameters, options.max_grad_norm or math.inf)
        self.optimizer.step()
        if self.averages is not None:
            self.averages.update()
        self._advance(ids.size(1))
        return rate, norm

    def _rate(self, length: int) -> float:
        """The learning rate of the next step, for segments of `length` tokens."""
        options = self.options
        rate = self.optimizer_options.learning_rate
        rate *= self.schedule.factor(Progress(self.done, self.epochs, self.scores))
        if options.warmup_steps:
            rate *= min(1.0, (self.step + 1) / options.warmup_steps)
        if options.random_bptt:
            rate *= length / options.sequence_length
        return float(rate)

    def _backward(self, ids: Tensor, targets: Tensor) -> None:
        """Add up the gradients of the parts of a batch ``(B, T)``, and go on to their next states."""
        parts = self.options.grad_accum_steps
        for part, (part_ids, part_targets) in enumerate(zip(ids.chunk(parts), targets.chunk(parts))):
            is_last = part == parts - 1
            with nullcontext() if is_last else self._without_exchange():
                with self.autocast():
                    loss, cross_entropy, state = self._loss(part_ids, part_targets, *self.states[part])
                (loss / parts).backward()
            self.states[part] = state
            tokens = part_ids.numel()
            self.window += torch.stack([cross_entropy.double() * tokens, self.window.new_tensor(tokens)])

    def _advance(self, length: int) -> None:
        """Move on in the data, to the beginning of the next pass where this one is over."""
        self.step += 1
        self.position += length
        self._last_tokens = length * self.options.batch_size * self.group.world_size
        if self.position >= self.stream.length - 1:
            self.epoch, self.position = self.epoch + 1, 0
            self.states = self._fresh_states()

    def _fresh_states(self) -> list[State]:
        """The states of all parts of a batch before the first word."""
        part_size = self.options.batch_size // self.options.grad_accum_steps
        return [self.model.initial_state(part_size) for _ in range(self.options.grad_accum_steps)]

    def autocast(self) -> AbstractContextManager[None]:
        """The precision of forward passes."""
        if self.options.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.group.device.type, torch.bfloat16)

    def _wrapped_loss(self) -> nn.Module:
        """The loss, compiled and shared with the other processes as wanted."""
        loss: nn.Module = SegmentLoss(self.model, self.reconstruction)
        if self.options.compile:
            loss = torch.compile(loss)  # type: ignore[assignment]
        if self.group.world_size == 1:
            return loss
        # A band of rare words that a segment has none of takes no part in its loss, and the processes differ
        # in which bands these are: so each has to look for the parameters that it will have no gradients of.
        return DistributedDataParallel(loss, find_unused_parameters=True, broadcast_buffers=False)

    def _without_exchange(self) -> AbstractContextManager[None]:
        """Keep gradients in this process for now."""
        if isinstance(self._loss, DistributedDataParallel):
            return self._loss.no_sync()
        return nullcontext()

    # Between steps.

    def _start_averaging_if_due(self) -> None:
        """Begin with the averages when the optimizer says so."""
        if self.averages is None and self.optimizer_options.starts_averaging(self.scores):
            self.averages = Averages(self.parameters)

    def _figures(self, rate: float, norm: Tensor, speed: Speed) -> dict[str, float]:
        """What the log says of the steps since its last line; see `Report.training`."""
        self.check_finite()
        nats, tokens = self.group.mean(self.window).tolist()
        self.window.zero_()
        per_second = speed.lap(self.tokens)
        figures = {"loss": nats / tokens, "rate": rate, "norm": float(norm), "speed": per_second}
        if self.reconstruction is not None:
            figures["reconstruction"] = self.reconstruction.current()
        return figures

    def _validation_is_due(self) -> bool:
        """Whether this step ends training, an epoch, or the steps between two validations."""
        every = self.options.evaluate_every
        return self.is_finished or (self.position == 0 if every is None else self.step % every == 0)

    def _validate(self, report: Report, save_best: Callable[[], None]) -> None:
        """Score the validation text with the averaged parameters where there are any."""
        self.check_finite()
        with self.evaluated_parameters():
            parts = self.options.valid_batch_size
            chunk = math.ceil((len(self.valid) - 1) / parts)
            with self.autocast():
                score = evaluate(
                    self.model,
                    self.valid,
                    target_length=self.options.sequence_length,
                    chunk_length=chunk,
                    batch_size=parts,
                    progress=report.is_terminal,
                )
            # All processes go by the same score, to the last bit.
            loss = self.group.from_first(score.nats / score.tokens)
            if not math.isfinite(loss):
                raise UserError(f"the validation loss is {loss} at step {self.step}; lower learning_rate")
            is_best = loss < min(self.scores, default=math.inf)
            self.scores.append(loss)
            report.validation(
                self.step, loss, min(self.scores), 0 if self.averages is None else self.averages.steps
            )
            if is_best:
                save_best()

    def evaluated_parameters(self) -> AbstractContextManager[None]:
        """Have the parameters that are evaluated and stored as the model in it: the averaged ones, if any."""
        return nullcontext() if self.averages is None else self.averages.in_place()

    def _asked_to_stop(self) -> int:
        """The number of the signal that asked any process to stop, or 0.

        Several processes learn of it one step later, all after the same step.
        """
        asked = self.group.largest(self._interrupts.received or 0)
        if self.group.world_size == 1:
            return asked()
        answer, self._asked = self._asked, asked
        return answer()
