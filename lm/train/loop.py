"""The training loop of a language model.

Axes: ``B`` columns of text of this process, ``T`` tokens of a segment.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lm.data.corpus import Columns
from lm.evaluate.evaluation import evaluate
from lm.models.interface import LanguageModel, State
from lm.train.config import Configuration
from lm.train.distributed import Group
from lm.train.optim import Averages, Progress, draw_length, is_stalled
from lm.train.progress import Report, Speed
from shared_embeddings.compress.distillation import Reconstruction, SoftTargets, softened
from shared_embeddings.layers.dropout import set_updates
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.interrupts import Interrupted, Interrupts, signals_delayed


class Trainer:
    """One process of a training run.

    Args:
        config: the configuration.
        model: model on its device.
        train: word ids ``(N,)`` of the training text.
        valid: word ids of the validation text.
        group: the training processes.
        reconstruction: reconstruction loss of the teacher's table, or None.
        soft_targets: the teacher whose predictions are learned, or None.

    Attributes:
        step: number of optimizer steps.
        epoch: number of complete epochs.
        position: tokens of each column read in this epoch.
        scores: validation losses in nats per token.
        states: model state of each part of a batch.
        averages: averaged parameters, once averaging has started.
        lengths: random generator of segment lengths, the same in all processes.
        window: nats and tokens of this process since the last log line ``(2,)``.
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
        self.options, self.schedule, self.optimizer_options = (
            config.training,
            config.schedule,
            config.optimizer,
        )
        self.model, self.valid, self.group = model, valid, group
        self.reconstruction = reconstruction
        self.text_columns = Columns(train, self.options.batch_size, group.rank, group.world_size)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer: torch.optim.Optimizer = config.optimizer.build(self.parameters)
        self.averages: Averages | None = None
        self.lengths = random.Random(self.options.seed)
        self.step, self.epoch, self.position = 0, 0, 0
        self.scores: list[float] = []
        loss = SegmentLoss(model, reconstruction, soft_targets)
        self._initial_state = loss.initial_state
        self.states = self._fresh_states()
        self.window = torch.zeros(2, dtype=torch.float64, device=group.device)
        self._loss = self._wrapped(loss)
        self._interrupts = Interrupts()
        self._asked: Callable[[], int] = lambda: 0

    @property
    def epochs(self) -> float:
        """Number of epochs, including fractions."""
        return self.epoch + self.position / (self.text_columns.length - 1)

    @property
    def done(self) -> float:
        """Fraction of training that is done."""
        if self.options.steps is not None:
            return self.step / self.options.steps
        assert self.options.epochs is not None
        return self.epochs / self.options.epochs

    @property
    def is_finished(self) -> bool:
        """Whether training is complete or early stopping applies."""
        patience = self.options.patience
        return self.done >= 1 or (patience is not None and is_stalled(self.scores, patience))

    @property
    def tokens(self) -> int:
        """Tokens read by all processes together."""
        columns = self.options.batch_size * self.group.world_size
        return round(self.epochs * (self.text_columns.length - 1)) * columns

    @property
    def total_tokens(self) -> int:
        """Approximate number of tokens of the whole training over all processes."""
        columns = self.options.batch_size * self.group.world_size
        if self.options.steps is not None:
            return self.options.steps * self.options.sequence_length * columns
        assert self.options.epochs is not None
        return self.options.epochs * (self.text_columns.length - 1) * columns

    def run(self, report: Report, save: Callable[[], None], save_best: Callable[[], None]) -> None:
        """Run the training loop.

        Args:
            report: receives progress.
            save: saves the state for resumption; called in all processes.
            save_best: saves the model, with averaged parameters in place, after its best validation.

        Raises:
            UserError: the loss or a parameter is not finite; the state is not saved.
            Interrupted: a process was asked to stop; `output_dir` was called after the last whole step.
        """
        speed = Speed(self.step, self.tokens)
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
                    speed = Speed(self.step, self.tokens)
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
        """Raise `UserError` if a parameter or the loss since the last log line is not finite."""
        loss = self.group.mean(self.window)[0]
        parameters = all(bool(torch.isfinite(parameter).all()) for parameter in self.parameters)
        if not parameters or not bool(torch.isfinite(loss)):
            what = "a parameter is not finite" if bool(torch.isfinite(loss)) else f"the loss is {float(loss)}"
            raise UserError(
                f"{what} at step {self.step}; earlier checkpoints are unchanged; lower learning_rate or "
                "max_grad_norm and train with another output_dir, optionally with init_from"
            )

    # One step.

    def _train_step(self) -> tuple[float, Tensor]:
        """Train on one segment; returns the learning rate and the gradient norm."""
        options = self.options
        length = options.sequence_length
        if options.random_bptt:
            length = draw_length(length, self.lengths)
        ids, targets = self.text_columns.segment(self.position, length, self.group.device)
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
        """The learning rate of the next step, for a segment of `length` tokens."""
        options = self.options
        rate = self.optimizer_options.learning_rate
        rate *= self.schedule.factor(Progress(self.done, self.epochs, self.scores))
        if options.warmup_steps:
            rate *= min(1.0, (self.step + 1) / options.warmup_steps)
        if options.random_bptt:
            rate *= length / options.sequence_length
        return float(rate)

    def _backward(self, ids: Tensor, targets: Tensor) -> None:
        """Accumulate the gradients of the parts of a batch ``(B, T)`` and update their states."""
        parts = self.options.grad_accum_steps
        for part, (part_ids, part_targets) in enumerate(zip(ids.chunk(parts), targets.chunk(parts))):
            is_last = part == parts - 1
            with nullcontext() if is_last else self._no_sync():
                with self.autocast():
                    loss, cross_entropy, state = self._loss(part_ids, part_targets, *self.states[part])
                (loss / parts).backward()
            self.states[part] = state
            tokens = part_ids.numel()
            self.window += torch.stack([cross_entropy.double() * tokens, self.window.new_tensor(tokens)])

    def _advance(self, length: int) -> None:
        """Advance in the data, starting the next epoch at the end."""
        self.step += 1
        self.position += length
        self._last_tokens = length * self.options.batch_size * self.group.world_size
        if self.position >= self.text_columns.length - 1:
            self.epoch, self.position = self.epoch + 1, 0
            self.states = self._fresh_states()

    def _fresh_states(self) -> list[State]:
        """The initial states of all parts of a batch."""
        part_size = self.options.batch_size // self.options.grad_accum_steps
        return [self._initial_state(part_size) for _ in range(self.options.grad_accum_steps)]

    def autocast(self) -> AbstractContextManager[None]:
        """Context for the precision of forward passes."""
        if self.options.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.group.device.type, torch.bfloat16)

    def _wrapped(self, loss: nn.Module) -> nn.Module:
        """The loss, compiled and wrapped for data parallelism as configured."""
        if self.options.compile:
            loss = torch.compile(loss)  # type: ignore[assignment]
        if self.group.world_size == 1:
            return loss
        # Clusters of rare words get no gradient from segments without their words.
        return DistributedDataParallel(loss, find_unused_parameters=True, broadcast_buffers=False)

    def _no_sync(self) -> AbstractContextManager[None]:
        """Context without gradient synchronization."""
        if isinstance(self._loss, DistributedDataParallel):
            return self._loss.no_sync()
        return nullcontext()

    # Between steps.

    def _start_averaging_if_due(self) -> None:
        """Start averaging when the optimizer requires it."""
        if self.averages is None and self.optimizer_options.starts_averaging(self.scores):
            self.averages = Averages(self.parameters)

    def _figures(self, rate: float, norm: Tensor, speed: Speed) -> dict[str, float]:
        """Metrics since the last log line; see `Report.training`."""
        self.check_finite()
        nats, tokens = self.group.mean(self.window).tolist()
        self.window.zero_()
        figures = {"loss": nats / tokens, "rate": rate, "norm": float(norm)}
        figures |= speed.lap(self.step, self.tokens)
        if self.reconstruction is not None:
            figures["reconstruction"] = self.reconstruction.current()
        return figures

    def _validation_is_due(self) -> bool:
        """Whether to validate after this step."""
        every = self.options.evaluate_every
        return self.is_finished or (self.position == 0 if every is None else self.step % every == 0)

    def _validate(self, report: Report, save_best: Callable[[], None]) -> None:
        """Evaluate on the validation text, with averaged parameters if there are any."""
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
            # All processes use bitwise the same score.
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
        """Context with the averaged parameters, if any, in the model."""
        return nullcontext() if self.averages is None else self.averages.in_place()

    def _asked_to_stop(self) -> int:
        """The number of a signal that any process has received, or 0.

        With several processes, the answer is one step late, so that all stop after the same step.
        """
        asked = self.group.largest(self._interrupts.received or 0)
        if self.group.world_size == 1:
            return asked()
        answer, self._asked = self._asked, asked
        return answer()


class SegmentLoss(nn.Module):
    """A model and its training loss in one module, for compilation and data parallelism.

    Args:
        model: the model.
        reconstruction: reconstruction loss of the teacher's table, or None.
        soft_targets: the teacher whose predictions are learned, or None.
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
            own = len(state) - len(self.soft_targets.teacher.initial_state(1))
            output = self.model(ids, state[:own])
            wanted, others = self._softened(ids, targets, state[own:])
            scores = self.model.embedding.logits(output.hidden).flatten(0, 1)
            loss = F.cross_entropy(scores, wanted)
            cross_entropy = F.cross_entropy(scores.detach(), targets.flatten())
            after = output.state + others
        if self.reconstruction is not None:
            loss = self.reconstruction.mixed_with(loss, self.reconstruction.loss())
        return loss + output.penalty, cross_entropy, after

    @torch.no_grad()
    def _softened(self, ids: Tensor, targets: Tensor, state: State) -> tuple[Tensor, State]:
        """What is learned ``(B * T, V)``, and the next state of the teacher."""
        assert self.soft_targets is not None
        teacher, share = self.soft_targets
        output = teacher(ids, state)
        scores = teacher.embedding.logits(output.hidden).flatten(0, 1)
        return softened(targets.flatten(), scores, share), output.state
