"""Train a compressed model briefly, to bring its predictions closer to those of the original.

The loss is the Kullback-Leibler divergence from the predictions of the original, which is read a second time.
The layers of the model are trained, and embeddings whose numbers are not rounded to codes; codes, and with
them the size and the format of the file, stay the same. Weights are float32 while they are trained. The
divergence on other lines is measured several times with the values that the file would have, and the best
ones are kept: at worst those before. The learning rate doubles each time, until the divergence rises: then it
halves, and training continues from the best values.

Axes: ``n`` predictions, ``V`` words that are scored.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_embeddings.checkpoints import KEY, load_tensors, state_digest, with_checksum
from shared_embeddings.compress.distillation import divergence
from shared_embeddings.compress.fit_tables import Fitted, hold_as
from shared_embeddings.compress.host import TrainedModel, find_host, place_plain, scores_rows, scoring_only
from shared_embeddings.compress.measure import Batch, Samples, ScoredWords, in_float32
from shared_embeddings.compress.options import Duration, parse_duration
from shared_embeddings.compress.report import RecoveryReport
from shared_embeddings.compress.session import Session
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.quant.packed_tensor import unfreeze
from shared_embeddings.quant.storage import pack, unpack
from shared_embeddings.registry import get_method_config
from shared_embeddings.utils.command_line import RESUME, StopFlag
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import replacing
from shared_embeddings.utils.progress import begin_phase, progress_bar

# Predictions that are sampled together, and the least tokens that are read for a step.
TOKENS, STEP = 12_000, 512
# The first learning rate of Adam for numbers of size one, and the least size of the numbers of a tensor.
RATE, LEAST = 5e-4, 1e-3
# The share of the training in which the rate rises, and the largest norm of the gradients.
WARMUP, LARGEST = 0.1, 1.0
# How often the divergence is measured, and after how many seconds the state is saved.
CHECKS, SAVE_EVERY = 10, 300.0


class SavedRecovery:
    """The file beside an output in which a training that was interrupted waits.

    UserError if it is of another training than `about`, tensors and plain values, determine.
    """

    def __init__(self, output: Path, about: object) -> None:
        self.path = output.with_name(f"{output.name}.recovery")
        self._digest = state_digest(about)
        if self.path.exists() and self.read().get("digest") != self._digest:
            raise UserError(
                f"recovery {self.path}: does not match this command; run the one that began it, or remove it"
            )

    def read(self) -> dict[str, Any]:
        """Return what was written; UserError if it cannot be read, or does not match its checksum."""
        try:
            content = load_tensors(self.path, self.path.name)
            if content.pop(KEY, None) != state_digest(content):
                raise UserError("it does not match its checksum")
        except UserError as error:
            reason = f"is damaged ({error}); remove it to train again"
            raise UserError(f"recovery {self.path}: {reason}") from error
        return content

    def write(self, content: Mapping[str, object]) -> None:
        """Replace what was written."""
        with replacing(self.path) as temporary, temporary.open("wb") as file:
            torch.save(with_checksum({**content, "digest": self._digest}), file)


def recover(session: Session, fitted: Fitted, saved: SavedRecovery) -> tuple[RecoveryReport, list[str]]:
    """Train a compressed model to predict as the original does, which is read again.

    The fitted embeddings, which are in place, are plain afterwards unless they are rounded to codes.

    Returns:
        What was measured, and notes.

    Raises:
        UserError: there is nothing to train, or the state in the file is damaged.
        KeyboardInterrupt: by a signal; the state is saved.
    """
    options, tables, module = session.options, session.tables, session.trained.module
    samples = session.held_out.samples
    assert samples is not None and options.recover is not None
    begin_phase("training")
    original = find_host(options.model, options.skip_undecodable)[1].read(options.model)
    inner: dict[int, str] = {}  # parameters of embeddings -> their names in them
    for embedding in fitted.embeddings.values():
        # The scales of codes are stored in steps that are too large for small changes.
        if get_method_config(embedding.method).takes_metric:
            embedding.requires_grad_(False)
        else:
            unfreeze(embedding)
        inner.update({id(part): name for name, part in embedding.named_parameters()})
    trained = {name: part for name, part in module.named_parameters() if part.requires_grad and part.numel()}
    if not trained:
        raise UserError("recover trains layers, but this model has no numbers but its codes; remove it")
    scored = [fitted.embeddings[table.name] for table in tables if table.is_scored]

    def stored(name: str, value: Tensor) -> Tensor:
        """Return the value that the file would have."""
        value, key = value.to(trained[name].dtype), inner.get(id(trained[name]))
        return value if key is None else unpack(pack({key: value}, [key], fitted.store))[key]

    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        texts = session.calibration_texts or None
        if texts is None:
            notes.append("recovery read what the original generates; pass a real text")
        stack.enter_context(in_float32(module))
        stack.enter_context(samples.running())
        # Rare tokens differ between samples.
        words = session.held_out.words
        if words is not None and not all(scores_rows(embedding, words.ids) for embedding in scored):
            words = None
        plain = [] if words is None else place_plain(original, tables)
        select = session.words_of if plain else lambda *_: None
        batches = TeacherBatches(original, texts, options.seed + 2, [*scored, *plain], select)
        stack.callback(batches.contexts.close)

        def measure() -> float:
            """Return the divergence from the original on other lines; infinite if predictions are NaN."""
            try:
                with scoring_only(scored, words):
                    kl = session.held_out.retention().kl
            except UserError:
                return math.inf
            assert kl is not None
            return kl

        # In float32 now.
        parameters = {name: part for name, part in module.named_parameters() if name in trained}
        student = Student(parameters, samples.predict, measure, stored)
        report = train(student, batches, parse_duration(options.recover), saved)
        with torch.no_grad():
            for name, part in trained.items():
                part.copy_(student.best[name])
    if report.kl_after >= report.kl_before:
        notes.append("recovery did not bring predictions nearer to the original's; the model is as before it")
    for embedding in fitted.embeddings.values():
        hold_as(embedding, fitted.store)
    return report, notes


class TeacherBatches:
    """The predictions of the original, for one sample of the texts after the other.

    Args:
        original: the model; no gradients are computed for it.
        texts: what it reads; None for what it generates.
        seed: of the first sample; later ones have the next.
        scored: the embeddings of both models that score only `words` of a sample.
        words: given the tokens of a sample and its number, these; None for all.
    """

    def __init__(
        self,
        original: TrainedModel,
        texts: Sequence[Path] | None,
        seed: int,
        scored: Sequence[SharedEmbedding],
        words: Callable[[Tensor | None, int], ScoredWords | None],
    ) -> None:
        self._original, self._texts, self._seed = original, texts, seed
        self._scored, self._words = scored, words
        self.contexts = contextlib.ExitStack()  # of the sample
        self.place = 0, 0  # the number of the sample, and of the next part of it
        self._samples: Samples | None = None

    def turn_to(self, number: int, part: int) -> Samples:
        """Draw a sample, of which a part is next."""
        self.contexts.close()
        self._samples = samples = self._original.samples(self._texts, self._seed + number, TOKENS)
        self.contexts.enter_context(samples.running())
        self.contexts.enter_context(scoring_only(self._scored, self._words(samples.words, number)))
        self.place = number, part
        return samples

    @torch.no_grad()
    def next(self) -> tuple[Any, Tensor, int]:
        """A part, its log-probabilities ``(n, V)``, and about how many tokens are read for them."""
        samples = self._samples or self.turn_to(*self.place)
        number, part = self.place
        if part == len(samples.parts):
            samples = self.turn_to(number + 1, 0)
            number, part = self.place
        self.place = number, part + 1
        inputs = samples.parts[part]
        targets = samples.predict(inputs).scores.float().log_softmax(dim=-1)
        return inputs, targets, samples.read * len(targets)


class Student:
    """A model that is trained, and its best values so far.

    Args:
        tensors: what is trained, in float32, by name.
        predict: the predictions of the model for a part of a sample.
        measure: the divergence of its predictions on other lines.
        stored: the value of a tensor of a name that the file would have.
    """

    def __init__(
        self,
        tensors: Mapping[str, nn.Parameter],
        predict: Callable[[Any], Batch],
        measure: Callable[[], float],
        stored: Callable[[str, Tensor], Tensor],
    ) -> None:
        self.tensors, self._predict, self._measure, self._stored = tensors, predict, measure, stored
        sizes = [float(part.detach().abs().median()) for part in tensors.values()]
        groups = [{"params": [part], "size": max(size, LEAST)} for part, size in zip(tensors.values(), sizes)]
        self._optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95), fused=True)
        self.steps = self.tokens = self.checks = 0
        self.seconds, self.factor, self.growth = 0.0, 1.0, 2.0
        self.before = self.divergence = measure()
        self.best = {name: stored(name, part.detach()).clone() for name, part in tensors.items()}

    def step(self, batches: TeacherBatches, rate: float) -> float:
        """Take a step of gradient descent; returns the mean divergence of the predictions."""
        count, read, total = 0, 0, 0.0
        while read < STEP:
            inputs, targets, tokens = batches.next()
            loss = divergence(targets, self._predict(inputs).scores)
            loss.backward()
            count, read, total = count + len(targets), read + tokens, total + float(loss.detach())
        for tensor in self.tensors.values():
            if tensor.grad is not None:
                tensor.grad.div_(count)
        norm = nn.utils.clip_grad_norm_(self.tensors.values(), LARGEST)
        for group in self._optimizer.param_groups:
            group["lr"] = self.factor * rate * group["size"]
        if bool(norm.isfinite()):  # others would stay in the means of gradients
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps, self.tokens = self.steps + 1, self.tokens + count
        return total / count

    @torch.no_grad()
    def check(self) -> None:
        """Keep the current values if predictions are better with them, as they would be stored.

        The learning rate doubles each time, until they are worse: then it halves, and training continues from
        the best values.
        """
        current = {name: part.clone() for name, part in self.tensors.items()}
        stored, measured = current, math.inf
        if all(bool(part.isfinite().all()) for part in current.values()):
            stored = {name: self._stored(name, part) for name, part in current.items()}
            self.copy(stored)
            measured = self._measure()
            self.copy(current)
        if measured < self.divergence:
            self.divergence = measured
            self.best = {name: part.clone() for name, part in stored.items()}
            self.factor *= self.growth
        else:
            self.copy(self.best)
            self.factor, self.growth = self.factor / 2, 1.0

    @torch.no_grad()
    def copy(self, values: Mapping[str, Tensor]) -> None:
        """Copy values into the model."""
        for name, tensor in self.tensors.items():
            tensor.copy_(values[name])

    _NUMBERS = ("steps", "tokens", "checks", "seconds", "factor", "growth", "before", "divergence")

    def state(self) -> dict[str, Any]:
        """Everything that is needed to resume a training."""
        return {
            **{name: getattr(self, name) for name in self._NUMBERS},
            "tensors": {name: part.detach() for name, part in self.tensors.items()},
            "best": self.best,
            "optimizer": self._optimizer.state_dict(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        for name in self._NUMBERS:
            setattr(self, name, state[name])
        self.copy(state["tensors"])
        self.best = state["best"]
        self._optimizer.load_state_dict(state["optimizer"])


def train(
    student: Student, batches: TeacherBatches, duration: Duration, saved: SavedRecovery
) -> RecoveryReport:
    """Train a model as planned, from the saved state if there is one; it has its best values afterwards.

    Raises:
        UserError: the predictions are not finite in any check.
        KeyboardInterrupt: by a signal; the state is saved.
    """
    if saved.path.exists():
        state = saved.read()
        student.load(state)
        batches.place = state["place"]
    began = last_saved = time.monotonic()
    before = student.seconds
    with StopFlag() as stop, contextlib.closing(progress_bar(1.0, "recovery", "")) as bar:
        while (done := duration.done(student.steps, student.seconds)) < 1.0:
            loss = student.step(batches, RATE * min(1.0, 0.1 + done / WARMUP) * (1.0 - done))
            student.seconds = before + time.monotonic() - began
            done = min(1.0, duration.done(student.steps, student.seconds))
            if int(CHECKS * done) > student.checks:
                student.checks = int(CHECKS * done)
                student.check()
            bar.set_postfix_str(f"loss {loss:.4f}, KL {student.divergence:.4f}", refresh=False)
            bar.update(done - bar.n)
            if stop.requested or time.monotonic() - last_saved > SAVE_EVERY:
                saved.write({**student.state(), "place": batches.place})
                last_saved = time.monotonic()
            stop.raise_requested(RESUME)
    if not math.isfinite(student.divergence):
        raise UserError(
            f"the predictions of the compressed model are not finite in any check of {student.steps} steps; "
            "compress without recovery, or choose more bits"
        )
    student.copy(student.best)
    return RecoveryReport(
        student.seconds / 60, student.steps, student.tokens, student.before, student.divergence
    )
