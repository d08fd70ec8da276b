"""Embedding distillation: code that all hosts share.

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
from torch import Tensor, nn

from shared_embeddings.compress.fit import FitReport
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.utils.options import OptionError, option, parse_options, require, require_at_least
from shared_embeddings.utils.tracing import without_autocast

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


def parse_distillation(given: Mapping[str, Any]) -> Distillation:
    """The option ``embedding_distillation``; a frozen embedding has no reconstruction loss."""
    frozen = {"alpha": 0.0} if given.get("freeze") == "embedding" else {}
    return parse_options(OPTION, Distillation, {**frozen, **given})


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


def copy_network(own: Mapping[str, Tensor], found: Mapping[str, Tensor], path: str, remedy: str) -> None:
    """Copy every tensor of a network from its teacher's; `OptionError` if one is missing or differs in shape.

    Args:
        own: the student's tensors by name, without those of its embeddings.
        found: those of the teacher.
        path, remedy: of the teacher and what to do about a mismatch, for messages.
    """
    for name, tensor in own.items():
        other = found.get(name)
        if other is None or other.shape != tensor.shape:
            shape = "missing" if other is None else tuple(other.shape)
            raise OptionError(
                f"{OPTION}: {name} is {tuple(tensor.shape)} in this model, {shape} in the teacher {path}; "
                f"{remedy}"
            )
    left = [name for name in found if name not in own]
    if left:
        raise OptionError(f"{OPTION}: the teacher {path} has {left[0]}, but this model does not; {remedy}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(found[name])


def freeze(model: nn.Module, embeddings: Iterable[nn.Module], what: str) -> None:
    """Freeze the `embeddings` of a model, or everything else."""
    inner = {id(parameter) for embedding in embeddings for parameter in embedding.parameters()}
    for parameter in model.parameters():
        if what == ("embedding" if id(parameter) in inner else "network"):
            parameter.requires_grad_(False)


def softened(targets: Tensor, teacher_scores: Tensor, share: float) -> Tensor:
    """The targets of a student ``(n, V)``: a mixture of the teacher's predictions and the words of the text.

    Args:
        targets: word ids ``(n,)``.
        teacher_scores: ``(n, V)``.
        share: the weight of the teacher's predictions.
    """
    wanted = torch.softmax(teacher_scores.float(), dim=-1) * share
    return wanted.scatter_add_(1, targets.unsqueeze(1), wanted.new_full((len(targets), 1), 1 - share))


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
            kept = torch.ones_like(distances, dtype=torch.bool)
            if student.padding_idx is not None:
                kept[student.padding_idx] = False
            missed.append(distances[kept])
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

    @classmethod
    def of(cls, teacher: nn.Module, share: float, device: torch.device) -> SoftTargets | None:
        """The soft targets of a teacher, which is frozen and moved; None for a share of 0."""
        return cls(teacher.requires_grad_(False).eval().to(device), share) if share > 0 else None


class TeacherLosses(NamedTuple):
    """The losses against a teacher; None for unused ones."""

    reconstruction: Reconstruction | None = None
    soft_targets: SoftTargets | None = None
