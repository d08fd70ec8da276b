"""Embeddings in training: distillation from a teacher (``embedding_distillation``).

`shared_embeddings.compress.distillation` defines the keys of the option.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
from onmt.utils.logging import logger
from torch import Tensor, nn

import shared_embeddings as se
from nmt import embeddings
from nmt import plan as plans
from nmt.models import build_from_checkpoint
from nmt.vocabulary import SENTENCE_MARKS, vocabulary_counts
from shared_embeddings.compress import distillation
from shared_embeddings.compress.host import copy_output_bias
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.utils.errors import UserError
from shared_embeddings.words.token_counts import completed

OPTION = distillation.OPTION
# Option in checkpoints: the embedding options before the fit, which may change sizes.
REQUESTED = "embeddings_before_fit"


def resume_distillation(opt: Namespace, saved: Namespace) -> None:
    """Resume the distillation of a checkpoint; only the path of the teacher may change, in `saved`, too."""
    if getattr(opt, OPTION, None) is None:
        return
    asked, before = distillation.parse_distillation(getattr(opt, OPTION)), getattr(saved, OPTION, None)
    trained = None if before is None else distillation.parse_distillation(before)
    if trained is None or dataclasses.replace(asked, teacher=trained.teacher) != trained:
        raise UserError(
            f"{OPTION}: {dataclasses.asdict(asked)} has no effect with train_from because the checkpoint was "
            f"trained with {trained and dataclasses.asdict(trained)}; remove the option, or train a new model"
        )
    setattr(saved, OPTION, getattr(opt, OPTION))


# Teacher and student


@dataclass(frozen=True)
class Teacher:
    """A trained model with full tables."""

    model: Any
    tables: dict[str, Tensor]  # (V, D) of each side, including the output
    table_tensors: frozenset[str]  # names of the tensors of its embeddings
    output_bias: Tensor | None  # (V,) of linear scores


def _names_of(model: nn.Module, parts: list[Any]) -> frozenset[str]:
    """Return all names of the tensors of `parts` in a model."""
    ids = {id(t) for part in parts for t in part.state_dict(keep_vars=True).values()}
    return frozenset(name for name, t in model.state_dict(keep_vars=True).items() if id(t) in ids)


@dataclass
class TranslationStudent:
    """A model that learns from a teacher, see `distillation.prepare_student`."""

    model: Any
    asked: distillation.Distillation
    plan: plans.EmbeddingPlan
    opt: Namespace
    vocabs: dict[str, Any]
    is_new: bool  # False when training resumes

    def embeddings(self) -> list[SharedEmbedding]:
        return list(embeddings.shared_embeddings_of(self.model))

    @torch.no_grad()
    def read_teacher(self, path: str) -> Teacher:
        try:
            model, vocabs, opt, _ = build_from_checkpoint(path)
        except UserError as error:
            raise UserError(f"{OPTION}: teacher: {error}") from error
        copied = ("source", "target") if self.asked.network_start == "teacher" else ()
        for side in {**self.plan.sides(), **dict.fromkeys(copied)}:
            if plans.words_of(vocabs, side) != plans.words_of(self.vocabs, side):
                raise UserError(
                    f"{OPTION}: the {side} vocabulary of the teacher {path} differs from that of this model; "
                    "use the teacher's"
                )
        ties = {
            "share_embeddings": self.plan.share_inputs,
            "share_decoder_embeddings": self.plan.share_output,
        }
        for name, is_tied in ties.items() if self.is_new else ():
            if is_tied and not getattr(opt, name, False):
                raise UserError(
                    f"{name}: true, but the teacher {path} was trained with {name}: false, and its tables "
                    f"cannot be merged; set {name}: false, or use another teacher"
                )
        layers: dict[str, Any] = {
            side: layer
            for side in ("source", "target", "output")
            if (layer := embeddings.words_module(model, side)) is not None
        }
        tables = {
            side: (layer.table() if isinstance(layer, SharedEmbedding) else layer.weight).detach().clone()
            for side, layer in layers.items()
        }
        for side, settings in self.plan.sides().items():
            if self.is_new:
                distillation.check_seed(self.asked, settings)
            embedding: Any = embeddings.words_module(self.model, side)
            wanted, shape = (embedding.num_embeddings, embedding.embedding_dim), tuple(tables[side].shape)
            if shape != wanted:
                raise UserError(
                    f"{OPTION}: the {side} table of the teacher {path} has shape {shape}, that of this "
                    f"model {wanted}; use the teacher's word_vec_size and vocabulary"
                )
        bias, scoring = embeddings.output_bias(model), layers["output"]
        if bias is not None and isinstance(scoring, SharedEmbedding) and not scoring.has_linear_scores:
            bias = None
        bias = None if bias is None else bias.detach()
        return Teacher(model, tables, _names_of(model, list(layers.values())), bias)

    def copy_network(self, teacher: Teacher) -> None:
        replaced = _names_of(self.model, self.embeddings())
        state, full = (
            embeddings.without_positions(model.state_dict()) for model in (self.model, teacher.model)
        )
        ours = {name: tensor for name, tensor in state.items() if name not in replaced}
        theirs = {name: t for name, t in full.items() if name in ours or name not in teacher.table_tensors}
        remedy = "set the options of the network to the teacher's, or network_start: random"
        distillation.copy_network(ours, theirs, remedy)

    def fit(self, teacher: Teacher, steps: int | None) -> None:
        """Replace the embeddings of the model, and its options, by ones fitted to the teacher's tables."""
        place = next(self.model.parameters())
        is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        fitted = {}
        for side, settings in self.plan.sides().items():
            words, is_scored = plans.words_of(self.vocabs, side), self.plan.is_scored(side)
            if is_scored and teacher.output_bias is not None:
                settings = {"output_bias": True, **settings}
            embedding, report = se.fit(
                settings["method"],
                teacher.tables[side].to(place.device),
                padding_idx=plans.padding_of(self.vocabs, side),
                words=words,
                token_counts=token_counts(words, self.opt, side),
                seed=self.opt.seed,
                steps=steps,
                progress=is_first,
                **plans.method_options(side, settings, with_output=is_scored),
            )
            logger.info(distillation.fit_line(f"{side} embedding", report))
            if is_scored and teacher.output_bias is not None:
                for note in copy_output_bias(embedding, teacher.output_bias):
                    logger.warning(note)
            fitted[side] = embedding.to(place)
        embeddings.place_embeddings(self.model, self.plan, fitted)
        requested = {name: getattr(self.opt, name, None) for name in plans.OPTION_NAMES}
        sides: Any = {
            side: embeddings.stored_settings(fitted[side]) if side in fitted else None
            for side in ("source", "target", "output")
        }
        resolved = dataclasses.replace(self.plan, **sides).options()
        vars(self.opt).update({**dict.fromkeys(plans.OPTION_NAMES), **resolved, REQUESTED: requested})

    def pairs(self, teacher: Teacher) -> list[tuple[SharedEmbedding, Tensor]]:
        device = next(self.model.parameters()).device
        sides: Any = {side: embeddings.words_module(self.model, side) for side in self.plan.sides()}
        return [(embedding, teacher.tables[side].to(device)) for side, embedding in sides.items()]


def prepare_student(
    model: Any, opt: Namespace, vocabs: dict[str, Any], is_new: bool
) -> distillation.TeacherLosses:
    """Initialize a new student from its teacher, and freeze parts of a new or resumed one.

    The embeddings of a new model are replaced, and the sizes of fitted ones set in its options.
    """
    if getattr(opt, OPTION, None) is None:
        return distillation.TeacherLosses()
    asked, plan = distillation.parse_distillation(getattr(opt, OPTION)), plans.read_plan(opt)
    if plan is None:
        raise UserError(f"{OPTION}: has no effect without `embedding`; set it, or remove the option")
    for name in ("copy_attn", "truncated_decoder"):  # the teacher scores the same words at the same time
        if asked.soft_targets > 0 and getattr(opt, name, False):
            raise UserError(
                f"{OPTION}: soft_targets: {asked.soft_targets:g} does not work with {name}: "
                f"{getattr(opt, name)}; remove one of them"
            )
    return distillation.prepare_student(
        TranslationStudent(model, asked, plan, opt, vocabs, is_new), asked, is_new
    )


def token_counts(words: list[str], opt: Namespace, side: str) -> Tensor | None:
    """Return the counts of words ``(V,)`` of one side, or ``None`` if its vocabulary file has none."""
    counts = vocabulary_counts(str(opt.src_vocab if side == "source" or opt.share_vocab else opt.tgt_vocab))
    return completed(words, counts, SENTENCE_MARKS) if counts else None


class DistillationLoss:
    """OpenNMT-py's loss of a batch, with soft targets, plus the reconstruction loss (Eq. 6).

    The trainer divides the sum over a batch by the number of target words. The reconstruction loss is
    therefore multiplied by this number. `generator` is the student's output layer.
    """

    def __init__(self, loss: Any, teacher_losses: distillation.TeacherLosses, generator: nn.Module) -> None:
        self.loss = loss
        self.teacher_losses = teacher_losses
        self.generator = generator
        self.reported: Tensor | float = 0.0
        self.batches = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss, name)

    def __call__(self, *batch: Any, **options: Any) -> tuple[Tensor, Any]:
        """Return the summed loss of a batch and OpenNMT-py's statistics of its cross entropy."""
        loss, statistics = self.loss(*batch, **options)
        reconstruction, soft_targets = self.teacher_losses
        if soft_targets is not None:
            inputs, output = batch[0], batch[1]  # of the decoder states (B, T, D)
            with torch.no_grad():
                states, _ = soft_targets.teacher(inputs["src"], inputs["tgt"], inputs["srclen"])
                wanted = soft_targets.teacher.generator(states.flatten(0, 1))  # (N, V)
            scores = self.generator(output.flatten(0, 1)).float()
            targets = inputs["tgt"][:, -output.size(1) :, 0].flatten()
            losses = distillation.soft_cross_entropy(scores, wanted, reduction="none")
            soft = losses[targets != self.loss.padding_idx].sum()
            loss = (1 - soft_targets.share) * loss + soft_targets.share * soft
        if reconstruction is not None:
            distance = reconstruction.loss()
            self.reported = self.reported + distance.detach()
            self.batches += 1
            loss = reconstruction.mixed_with(loss, statistics.n_words * distance)
        return loss, statistics

    def take_mean(self) -> float:
        """Return the mean reconstruction loss since the last call."""
        mean = float(self.reported) / max(1, self.batches)
        self.reported, self.batches = 0.0, 0
        return mean
