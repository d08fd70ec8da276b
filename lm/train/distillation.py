"""Embedding distillation: training a compressed language model from a trained one with a full table.

The model-independent part is in `shared_embeddings.compress.distillation`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shared_embeddings as se
from lm.checkpoint import load_model
from lm.data.vocabulary import Vocabulary
from lm.models import LanguageModel
from lm.train.config import TrainingOptions
from lm.train.distributed import Group
from shared_embeddings.compress.distillation import (
    OPTION,
    Reconstruction,
    SoftTargets,
    TeacherLosses,
    copy_network,
    fit_line,
    freeze,
    parse_distillation,
)
from shared_embeddings.compress.host import copy_output_bias
from shared_embeddings.utils.errors import UserError


def prepare_student(
    model: LanguageModel, options: TrainingOptions, vocabulary: Vocabulary, group: Group, is_new: bool
) -> tuple[TeacherLosses, list[str]]:
    """Initialize a new model from its teacher, and freeze parameters as requested.

    Args:
        model: model on its device; its embedding may be replaced by a fitted one.
        options: training options.
        vocabulary: words of the model and the teacher, and their counts.
        group: the training processes.
        is_new: False when training resumes.

    Returns:
        The losses against the teacher, and lines for the log.

    Raises:
        UserError: the teacher cannot be read, or has another vocabulary, architecture or width.
        OptionError: the network of the teacher has other tensors, or the embedding cannot be fitted.
    """
    if options.embedding_distillation is None:
        return TeacherLosses(), []
    distillation = parse_distillation(options.embedding_distillation)
    if not (is_new or distillation.alpha > 0 or distillation.soft_targets > 0):
        freeze(model, [model.embedding], distillation.freeze)
        return TeacherLosses(), []
    path, words = distillation.teacher, vocabulary.words
    try:
        teacher = load_model(Path(path))
    except UserError as error:
        raise UserError(f"{OPTION}: teacher: {error}") from error
    if teacher.words != words:
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
    with torch.no_grad():
        table = teacher.model.embedding.table().detach().clone().to(group.device)
    lines = []
    if is_new and distillation.network_start == "teacher":
        _copy_network(model, teacher.model, path)
    if is_new and distillation.embedding_start == "fit":
        lines = _fit(model, teacher.model, table, options, vocabulary, group, distillation.fit_steps)
    freeze(model, [model.embedding], distillation.freeze)
    reconstruction = None
    if distillation.alpha > 0:
        reconstruction = Reconstruction([(model.embedding, table)], distillation.alpha)
    soft_targets = SoftTargets.of(teacher.model, distillation.soft_targets, group.device)
    return TeacherLosses(reconstruction, soft_targets), lines


def _copy_network(model: LanguageModel, teacher: LanguageModel, path: str) -> None:
    """Copy all tensors outside the embedding from the teacher, which was read from `path`."""
    if teacher.kind != model.kind:
        raise UserError(
            f"{OPTION}: the teacher {path} is a {teacher.kind}, this model a {model.kind}; set model: "
            f"{teacher.kind}, or network_start: random"
        )
    remedy = "set the options of the model to the teacher's, or network_start: random"
    widths = [each.embedding.score_dim for each in (teacher, model)]
    if widths[0] != widths[1]:
        remedy = (
            f"the teacher's embedding has score_dim {widths[0]}, this {model.embedding.method} embedding "
            f"{widths[1]}, so the last layers differ; choose options with score_dim {widths[0]}, or "
            "network_start: random"
        )
    copy_network(_network(model), _network(teacher), path, remedy)


def _network(model: LanguageModel) -> dict[str, Tensor]:
    """The tensors of a model outside its embedding, by name."""
    inner = {id(tensor) for tensor in model.embedding.state_dict(keep_vars=True).values()}
    state = model.state_dict(keep_vars=True)
    return {name: tensor.detach() for name, tensor in state.items() if id(tensor) not in inner}


def _fit(
    model: LanguageModel,
    teacher: LanguageModel,
    table: Tensor,
    options: TrainingOptions,
    vocabulary: Vocabulary,
    group: Group,
    steps: int | None,
) -> list[str]:
    """Replace the embedding of a model by one fitted to the teacher's table; returns lines for the log."""
    settings: dict[str, Any] = dict(options.embedding)
    old = teacher.embedding
    bias = old.output_bias() if old.has_linear_scores else None
    if bias is not None:
        settings.setdefault("output_bias", True)
    model.embedding, report = se.fit(
        settings.pop("method"),
        table,
        words=vocabulary.words,
        token_counts=torch.tensor(vocabulary.counts).clamp(min=1),
        seed=options.seed,
        steps=steps,
        progress=group.is_first,
        **settings,
    )
    lines = [fit_line("embedding", report)]
    if bias is not None:
        lines += copy_output_bias(model.embedding, bias)
    elif old.output_bias() is not None:
        lines.append("The teacher's output bias is not used: it belongs to a two-step softmax")
    return lines
