"""Embedding distillation: a language model that begins where a trained one with the full table has ended.

What does not depend on this host is in `shared_embeddings.fitting.distillation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shared_embeddings as se
from lm.checkpoint import Trained, load_model
from lm.data.vocabulary import Vocabulary
from lm.models.interface import LanguageModel
from lm.train.config import TrainingOptions
from lm.train.distributed import Group
from shared_embeddings.checkpoints.adapter import copy_output_bias
from shared_embeddings.errors import UserError
from shared_embeddings.fitting.distillation import (
    OPTION,
    Reconstruction,
    copy_network,
    fit_line,
    freeze,
    parse_distillation,
)


def prepare_student(
    model: LanguageModel, options: TrainingOptions, vocabulary: Vocabulary, group: Group, is_new: bool
) -> tuple[Reconstruction | None, list[str]]:
    """Let a new model begin where its teacher ended, and freeze what is to be frozen, in a resumed one, too.

    Args:
        model: built as `options` say, on its device; a new one gets another embedding where that is fitted.
        options: of training.
        vocabulary: the words of the model, which must be the teacher's, and how often each occurs.
        group: the processes that train together; all fit alike, and the first shows a bar.
        is_new: whether the model is not of a checkpoint of its own.

    Returns:
        What the reconstruction loss needs, None where there is no teacher or alpha is 0; lines for the log.

    Raises:
        UserError: the teacher cannot be read, or has other words, or another kind or width.
        OptionError: its network has other tensors, or the embedding cannot be fitted.
    """
    if options.embedding_distillation is None:
        return None, []
    distillation = parse_distillation(options.embedding_distillation)
    lines = []
    teacher = None
    if is_new or distillation.alpha > 0:
        teacher = _read_teacher(distillation.teacher, model, vocabulary.words)
    if is_new and teacher is not None:
        if distillation.network_start == "teacher":
            _copy_from(model, teacher, distillation.teacher)
        if distillation.embedding_start == "fit":
            lines = _fit(model, teacher, options, vocabulary, group, distillation.fit_steps)
    freeze(model, [model.embedding], distillation.freeze)
    if teacher is None or distillation.alpha == 0:
        return None, lines
    table = _table(teacher).to(group.device)
    return Reconstruction([(model.embedding, table)], distillation.alpha), lines


def _read_teacher(path: str, model: LanguageModel, words: Sequence[str]) -> Trained:
    """The teacher on the CPU.

    Raises:
        UserError: it cannot be read, has other words, or its table is of another shape.
    """
    try:
        teacher = load_model(Path(path))
    except UserError as error:
        raise UserError(f"{OPTION}: teacher: {error}") from error
    if teacher.words != list(words):
        raise UserError(
            f"{OPTION}: the vocabulary of the teacher {path} ({len(teacher.words)} words) is not that of "
            f"this model ({len(words)} words); use the data that the teacher was trained with"
        )
    width, wanted = teacher.model.embedding.embedding_dim, model.embedding.embedding_dim
    if width != wanted:
        raise UserError(
            f"{OPTION}: the vectors of the teacher {path} have {width} dimensions, those of this model "
            f"{wanted}; set embedding_dim: {width}"
        )
    return teacher


def _copy_from(model: LanguageModel, teacher: Trained, path: str) -> None:
    """Copy every tensor that is no part of the embedding from the teacher.

    Raises:
        UserError: the teacher is of another kind.
        OptionError: names the first tensor that does not fit, or that only one of the two has.
    """
    if teacher.model.kind != model.kind:
        raise UserError(
            f"{OPTION}: the teacher {path} is a {teacher.model.kind}, this model a {model.kind}; set model: "
            f"{teacher.model.kind}, or network_start: random"
        )
    remedy = "set the options of the model to the teacher's, or network_start: random"
    widths = [each.embedding.score_dim for each in (teacher.model, model)]
    if widths[0] != widths[1]:
        remedy = (
            f"the teacher's embedding scores {widths[0]} dimensions, this {model.embedding.method} embedding "
            f"{widths[1]}, so the last layer does not fit; choose options that score {widths[0]}, or "
            "network_start: random"
        )
    copy_network(_network(model), _network(teacher.model), path, remedy)


def _network(model: LanguageModel) -> dict[str, Tensor]:
    """The tensors of a model, but for its embedding's, by name."""
    inner = {id(tensor) for tensor in model.embedding.state_dict(keep_vars=True).values()}
    state = model.state_dict(keep_vars=True)
    return {name: tensor.detach() for name, tensor in state.items() if id(tensor) not in inner}


def _fit(
    model: LanguageModel,
    teacher: Trained,
    options: TrainingOptions,
    vocabulary: Vocabulary,
    group: Group,
    steps: int | None,
) -> list[str]:
    """Replace the embedding of a model by one that is fitted to the teacher's table, in `steps` if given.

    Returns:
        Lines about it.
    """
    settings: dict[str, Any] = dict(options.embedding)
    old = teacher.model.embedding
    bias = old.output_bias() if old.has_linear_scores else None
    if bias is not None:
        settings.setdefault("output_bias", True)
    fitted, report = se.fit(
        settings.pop("method"),
        _table(teacher).to(group.device),
        words=vocabulary.words,
        token_counts=torch.tensor(vocabulary.counts).clamp(min=1),
        seed=options.seed,
        steps=steps,
        progress=group.is_first,
        **settings,
    )
    model.embedding = fitted
    lines = [fit_line("embedding", report)]
    if bias is not None:
        lines += copy_output_bias(fitted, bias)
    elif old.output_bias() is not None:
        lines.append("The teacher's output bias is left out: it belongs to a softmax of two steps")
    return lines


@torch.no_grad()
def _table(teacher: Trained) -> Tensor:
    """The teacher's table ``(V, D)``."""
    return teacher.model.embedding.table().detach().clone()
