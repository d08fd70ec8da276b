"""Distillation: the teacher's tables, its predictions, and how a student begins, for all hosts.

The three steps of Distilled Embedding (Lioutas et al., 2020, Algorithm 1): train a model with the full table,
the teacher; fit the small embedding to that table (`shared_embeddings.fit`, Eq. 5); train the whole model,
whose other parameters start from the teacher, with the reconstruction loss in addition to the cross entropy
(Eq. 6). The option of hosts is ``embedding_distillation``.

Axes: ``V`` vocabulary, ``D`` model dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.compress.fit import FitReport
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.nn.tracing import without_autocast
from shared_embeddings.utils.options import OptionError, option, parse_options, require, require_at_least

OPTION = "embedding_distillation"
EXAMPLE = "{teacher: run/model.pt, alpha: 0.01}"


@dataclass(frozen=True)
class Distillation:
    """The option ``embedding_distillation``."""

    teacher: str = option("checkpoint of the model with the full table.")
    alpha: float = option("weight of the reconstruction loss; the cross entropy has 1 - alpha (Eq. 6).", 0.01)
    embedding_start: Literal["fit", "random"] = option(
        "fit to the teacher's table, or random as when training from scratch.", "fit"
    )
    network_start: Literal["teacher", "random"] = option(
        "start of every other parameter: from the teacher, or random.", "teacher"
    )
    freeze: Literal["none", "embedding", "network"] = option(
        "what is not trained; the network is all but the embedding.", "none"
    )
    fit_steps: int | None = option("steps of gradient descent, for methods that use it; see `fit`.", None)
    soft_targets: float = option(
        "weight of the teacher's predictions in the targets (Hinton et al., 2015); the words of the text "
        "have the rest. With 0, the teacher is not run.",
        0.0,
    )

    def __post_init__(self) -> None:
        require(self.teacher != "", f"option 'teacher' is empty; name a trained checkpoint, like {EXAMPLE}")
        require_at_least("alpha", self.alpha, 0, below=1)
        require(
            0 <= self.soft_targets <= 1,
            f"option 'soft_targets' is {self.soft_targets}, but it must be from 0 to 1; change the value",
        )
        require_at_least("fit_steps", self.fit_steps, 1)
        require(
            self.freeze != "embedding" or self.alpha == 0,
            f"alpha: {self.alpha} has no effect with freeze: embedding; remove one of them",
        )
        random_start = self.embedding_start == "random"
        require(
            not random_start or self.fit_steps is None,
            f"fit_steps: {self.fit_steps} has no effect with embedding_start: random; remove one of them",
        )
        require(
            not (random_start and self.network_start == "random" and self.alpha == self.soft_targets == 0),
            "the teacher has no effect with embedding_start: random, network_start: random, alpha: 0 and "
            "soft_targets: 0; change one of them, or remove the option",
        )


def parse_distillation(settings: Mapping[str, Any]) -> Distillation:
    """The option ``embedding_distillation``; a frozen embedding has no reconstruction loss."""
    frozen = {"alpha": 0.0} if settings.get("freeze") == "embedding" else {}
    return parse_options(OPTION, Distillation, {**frozen, **settings})


def check_seed(distillation: Distillation, embedding: Mapping[str, Any]) -> None:
    """Reject an embedding's own ``seed``, because the fit uses the seed of the training."""
    if distillation.embedding_start == "fit" and "seed" in embedding:
        raise OptionError(
            f"{OPTION}: a fitted embedding cannot have its own `seed`; remove it, or set "
            "embedding_start: random"
        )


def fit_line(name: str, report: FitReport) -> str:
    """One line with the result of the fit of the embedding `name`."""
    return (
        f"Fitted the {name} to its teacher: reconstruction loss {report.loss:.5f}, relative error "
        f"{report.relative_error:.4f}, {report.parameters:,} parameters, {report.compression:.2f} times "
        f"fewer than the table's, {report.seconds:.1f} seconds"
    )


def copy_network(student: Mapping[str, Tensor], teacher: Mapping[str, Tensor], remedy: str) -> None:
    """Copy every tensor of a network, by name, from its teacher's.

    `OptionError` with a remedy if one is missing or differs in shape.
    """
    for name in {**student, **teacher}:
        ours, theirs = (tuple(state[name].shape) if name in state else None for state in (student, teacher))
        if ours != theirs:
            raise OptionError(
                f"{OPTION}: {name} is {ours or 'missing'} in this model, {theirs or 'missing'} in the "
                f"teacher; {remedy}"
            )
    with torch.no_grad():
        for name, tensor in student.items():
            tensor.copy_(teacher[name])


def freeze(model: nn.Module, embeddings: Iterable[nn.Module], what: str) -> None:
    """Freeze the `embeddings` of a model, or everything else."""
    inner = {id(parameter) for embedding in embeddings for parameter in embedding.parameters()}
    for parameter in model.parameters():
        if what == ("embedding" if id(parameter) in inner else "network"):
            parameter.requires_grad_(False)


def soft_cross_entropy(
    scores: Tensor,
    teacher_scores: Tensor,
    targets: Tensor | None = None,
    share: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """Return the cross entropy with a mixture of the teacher's predictions and the words of the text.

    Args:
        scores, teacher_scores: ``(n, V)``.
        targets: word ids ``(n,)``; None for the teacher's predictions alone.
        share: the weight of the teacher's predictions.
        reduction: as in ``torch.nn.functional.cross_entropy``.
    """
    wanted = torch.softmax(teacher_scores.float(), dim=-1) * share
    if targets is not None:
        wanted.scatter_add_(1, targets.unsqueeze(1), wanted.new_full((len(targets), 1), 1 - share))
    return F.cross_entropy(scores, wanted, reduction=reduction)


def divergence(log_targets: Tensor, scores: Tensor) -> Tensor:
    """Return the summed divergence of predictions from log-probabilities, both ``(n, V)``, in nats."""
    terms = log_targets.exp() * (log_targets - scores.float().log_softmax(dim=-1))
    return terms.masked_fill(log_targets == -torch.inf, 0.0).sum()


class Reconstruction(NamedTuple):
    """The reconstruction loss."""

    # Each embedding with the frozen table ``(V, D)`` of its teacher.
    pairs: Sequence[tuple[SharedEmbedding, Tensor]]
    alpha: float  # the weight of the loss; the cross entropy has 1 - alpha

    def loss(self) -> Tensor:
        """The mean L2 distance of the words' vectors to the teacher's (Eq. 5), without padding; a scalar.

        Always computed in float32.
        """
        missed = []
        for student, table in self.pairs:
            with without_autocast(table.device):
                distances = (student.table().float() - table).norm(dim=1)  # (V,)
            has_vector = torch.ones_like(distances, dtype=torch.bool)
            if student.padding_idx is not None:
                has_vector[student.padding_idx] = False
            missed.append(distances[has_vector])
        return torch.cat(missed).mean()

    def mixed_with(self, cross_entropy: Tensor, reconstruction: Tensor) -> Tensor:
        """``alpha * L_recon + (1 - alpha) * L_ce`` (Eq. 6); both are means, or both sums."""
        return self.alpha * reconstruction + (1 - self.alpha) * cross_entropy

    @torch.no_grad()
    def current(self) -> float:
        """The current `loss` without dropout, which draws no random numbers."""
        modes = [student.training for student, _ in self.pairs]
        for student, _ in self.pairs:
            student.eval()
        loss = float(self.loss())
        for (student, _), mode in zip(self.pairs, modes, strict=True):
            student.train(mode)
        return loss


class SoftTargets(NamedTuple):
    """A teacher whose predictions are soft targets."""

    teacher: Any  # the frozen teacher in evaluation mode
    share: float  # the weight of its predictions; the words of the text have the rest


class TeacherLosses(NamedTuple):
    """The losses against a teacher; None for unused ones."""

    reconstruction: Reconstruction | None = None
    soft_targets: SoftTargets | None = None


def prepare_student(student: Any, distillation: Distillation, is_new: bool) -> TeacherLosses:
    """Initialize a new student from its teacher, and freeze parts of a new or resumed one.

    Args:
        student: of a host, with a `model` on its device, the shared `embeddings()` of it, and the steps
            ``read_teacher(path)``, which returns an object with a `model`, ``copy_network(teacher)`` for all
            but the embeddings, ``fit(teacher, steps)`` for these, and ``pairs(teacher)``, which returns each
            embedding with the table ``(V, D)`` of the teacher.
        distillation: the option.
        is_new: False when training resumes.

    Raises:
        UserError: the teacher cannot be read, or has another vocabulary, architecture or width.
        OptionError: the network of the teacher has other tensors, or an embedding cannot be fitted.
    """
    teacher = None
    if is_new or distillation.alpha > 0 or distillation.soft_targets > 0:
        teacher = student.read_teacher(distillation.teacher)
    if is_new and distillation.network_start == "teacher":
        student.copy_network(teacher)
    if is_new and distillation.embedding_start == "fit":
        student.fit(teacher, distillation.fit_steps)
    freeze(student.model, student.embeddings(), distillation.freeze)
    reconstruction = soft_targets = None
    if distillation.alpha > 0:
        reconstruction = Reconstruction(student.pairs(teacher), distillation.alpha)
    if teacher is not None and distillation.soft_targets > 0:
        model = teacher.model.requires_grad_(False).eval().to(next(student.model.parameters()).device)
        soft_targets = SoftTargets(model, distillation.soft_targets)
    return TeacherLosses(reconstruction, soft_targets)
