"""Embeddings in training: distillation from a teacher, and quantization."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from onmt.utils.logging import logger
from torch import Tensor, nn

import shared_embeddings as se
from nmt.checkpoint.models import build_from_checkpoint
from nmt.data.vocabulary import SENTENCE_MARKS, vocabulary_counts
from nmt.model.embeddings import (
    is_position_encoding,
    output_bias,
    place_embeddings,
    shared_embeddings_of,
    words_module,
)
from nmt.model.plan import (
    OPTION_NAMES,
    EmbeddingPlan,
    method_options,
    padding_of,
    parse_text,
    read_plan,
    words_of,
)
from nmt.train.distillation import REQUESTED, check_words, parse_distillation
from shared_embeddings.checkpoints.token_counts import completed
from shared_embeddings.compress.host import copy_output_bias
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.errors import UserError
from shared_embeddings.fitting import straight_through
from shared_embeddings.fitting.distillation import (
    OPTION,
    Reconstruction,
    SoftTargets,
    TeacherLosses,
    copy_network,
    fit_line,
    freeze,
)
from shared_embeddings.fitting.straight_through import OPTION as QUANTIZATION


@dataclass(frozen=True)
class Teacher:
    """A trained model with full tables.

    Attributes:
        path: its checkpoint, for messages.
        model: the model in evaluation mode.
        vocab: the vocabularies in the checkpoint.
        tables: the table ``(V, D)`` of each side, including the output.
        state: all tensors by name.
        table_tensors: names of the tensors of its embeddings.
        output_bias: the output bias ``(V,)``, or ``None``.
    """

    path: str
    model: Any
    vocab: dict[str, Any]
    tables: dict[str, Tensor]
    state: dict[str, Tensor]
    table_tensors: frozenset[str]
    output_bias: Tensor | None


def read_teacher(path: str) -> Teacher:
    """Read a trained model on the CPU.

    Raises:
        UserError: it cannot be read.
    """
    try:
        model, *_, checkpoint = build_from_checkpoint(path)
    except UserError as error:
        raise UserError(f"{OPTION}: teacher: {error}") from error
    modules = {side: words_module(model, side) for side in ("source", "target", "output")}
    present = {side: module for side, module in modules.items() if module is not None}
    with torch.no_grad():
        tables = {side: _table_of(module) for side, module in present.items()}
    names = _names_of(model, list(present.values()))
    return Teacher(path, model, checkpoint["vocab"], tables, model.state_dict(), names, _bias_of_table(model))


def _bias_of_table(model: Any) -> Tensor | None:
    """Return the output bias ``(V,)`` of linear scores, or ``None``."""
    scoring = words_module(model, "output")
    if isinstance(scoring, se.SharedEmbedding) and not scoring.has_linear_scores:
        return None
    bias = output_bias(model)
    return None if bias is None else bias.detach()


def _table_of(module: nn.Module) -> Tensor:
    """Return the table ``(V, D)`` of an embedding or output layer."""
    if isinstance(module, se.SharedEmbedding):
        return module.table().detach().clone()
    assert isinstance(module, (nn.Embedding, nn.Linear))  # upstream has no other
    return module.weight.detach().clone()


def _names_of(model: nn.Module, parts: list[nn.Module]) -> frozenset[str]:
    """Return all names of the tensors of `parts` in a model."""
    own = {id(t) for part in parts for t in part.state_dict(keep_vars=True).values()}
    return frozenset(name for name, t in model.state_dict(keep_vars=True).items() if id(t) in own)


def prepare_student(model: Any, opt: Namespace, vocabs: dict[str, Any], is_new: bool) -> TeacherLosses:
    """Initialize a new student from its teacher, and freeze parts of a new or resumed one.

    Args:
        model: an initialized or loaded model; the embeddings of a new one are replaced.
        opt: options of the model for its checkpoints; sizes of fitted embeddings are set.
        vocabs: vocabularies of the model.
        is_new: whether the model does not come from a checkpoint.

    Returns:
        What the student learns from the teacher.

    Raises:
        UserError: the teacher cannot be read, its vocabulary, network or width differs, or soft targets do
            not work with other options.
    """
    distillation, plan = parse_distillation(getattr(opt, OPTION, None)), read_plan(opt)
    if distillation is None or plan is None:
        return TeacherLosses()
    _check_soft_targets(distillation.soft_targets, opt)
    freeze(model, shared_embeddings_of(model), distillation.freeze)
    if not is_new and distillation.alpha == 0 and distillation.soft_targets == 0:
        return TeacherLosses()
    teacher = read_teacher(distillation.teacher)
    check_words(distillation, plan, teacher.vocab, vocabs)
    for side in plan.sides():
        _check_table(side, words_module(model, side), teacher)
    if is_new and distillation.network_start == "teacher":
        _copy_network(model, teacher)
    if is_new and distillation.embedding_start == "fit":
        _fit_embeddings(model, teacher, plan, opt, vocabs, distillation.fit_steps)
        freeze(model, shared_embeddings_of(model), distillation.freeze)
    place = next(model.parameters())
    reconstruction = None
    if distillation.alpha > 0:
        tables = {side: teacher.tables[side].to(place.device) for side in plan.sides()}
        pairs: Any = [(words_module(model, side), table) for side, table in tables.items()]
        reconstruction = Reconstruction(pairs, distillation.alpha)
    soft_targets = SoftTargets.of(teacher.model, distillation.soft_targets, place.device)
    return TeacherLosses(reconstruction, soft_targets)


def _check_soft_targets(share: float, opt: Namespace) -> None:
    """Check that teacher and student score the same words at the same time."""
    for name in ("copy_attn", "truncated_decoder"):
        if share > 0 and getattr(opt, name, False):
            raise UserError(
                f"{OPTION}: soft_targets: {share:g} does not work with {name}: {getattr(opt, name)}; "
                "remove one of them"
            )


def _fit_embeddings(
    model: Any,
    teacher: Teacher,
    plan: EmbeddingPlan,
    opt: Namespace,
    vocabs: dict[str, Any],
    steps: int | None,
) -> None:
    """Replace the embeddings of a model by ones fitted to the teacher's tables."""
    place = next(model.parameters())
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    fitted = {}
    for side, settings in plan.sides().items():
        words = words_of(vocabs, side)
        is_scored = plan.is_scored(side)
        if is_scored and teacher.output_bias is not None:
            settings = {"output_bias": True, **settings}
        embedding, report = se.fit(
            settings["method"],
            teacher.tables[side].to(place.device),
            padding_idx=padding_of(vocabs, side),
            words=words,
            token_counts=token_counts(words, vocabulary_file(opt, side)),
            seed=opt.seed,
            steps=steps,
            progress=is_first,
            **method_options(side, settings, with_output=is_scored),
        )
        logger.info(fit_line(f"{side} embedding", report))
        if is_scored and teacher.output_bias is not None:
            for note in copy_output_bias(embedding, teacher.output_bias):
                logger.warning(note)
        fitted[side] = embedding.to(place)
    place_embeddings(model, plan, fitted)
    _store_options(opt, plan, fitted)


def _check_table(side: str, embedding: Any, teacher: Teacher) -> None:
    """Check the shape of the teacher's table."""
    wanted = (embedding.num_embeddings, embedding.embedding_dim)
    found = tuple(teacher.tables[side].shape) if side in teacher.tables else None
    if found != wanted:
        raise UserError(
            f"{OPTION}: the {side} table of the teacher {teacher.path} has shape {found}, that of this model "
            f"{wanted}; use the teacher's word_vec_size and vocabulary"
        )


def _copy_network(model: nn.Module, teacher: Teacher) -> None:
    """Copy the teacher's tensors except those of embeddings."""
    embeddings = _names_of(model, list(shared_embeddings_of(model)))
    own = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name not in embeddings and not is_position_encoding(name)
    }
    found = {
        name: tensor
        for name, tensor in teacher.state.items()
        if name in own or not (name in teacher.table_tensors or is_position_encoding(name))
    }
    remedy = "set the options of the network to the teacher's, or network_start: random"
    copy_network(own, found, teacher.path, remedy)


def token_counts(words: list[str], vocabulary: str) -> Tensor | None:
    """Return the counts of words ``(V,)``, or ``None`` if the vocabulary file has none."""
    counts = vocabulary_counts(vocabulary)
    return completed(words, counts, SENTENCE_MARKS) if counts else None


def vocabulary_file(opt: Namespace, side: str) -> str:
    """Return the vocabulary file of one side."""
    return str(opt.src_vocab if side == "source" or opt.share_vocab else opt.tgt_vocab)


def _store_options(opt: Namespace, plan: EmbeddingPlan, fitted: dict[str, se.SharedEmbedding]) -> None:
    """Replace the embedding options by ones that rebuild the fitted embeddings."""
    setattr(opt, REQUESTED, {name: getattr(opt, name, None) for name in OPTION_NAMES})
    resolved = {side: {"method": e.method, **e.stored_options()} for side, e in fitted.items()}
    opt.embedding = resolved["target"] if plan.share_inputs else None
    opt.src_embedding = None if plan.share_inputs else resolved.get("source")
    opt.tgt_embedding = None if plan.share_inputs else resolved.get("target")
    opt.output_embedding = resolved.get("output")


class DistillationLoss:
    """OpenNMT-py's loss of a batch, with soft targets, plus the reconstruction loss (Eq. 6).

    The trainer divides the sum over a batch by the number of target words. The reconstruction loss is
    therefore multiplied by this number.

    Args:
        loss: OpenNMT-py's loss.
        teacher_losses: losses against the teacher.
        generator: the student's output layer.
    """

    def __init__(self, loss: Any, teacher_losses: TeacherLosses, generator: nn.Module) -> None:
        self.loss = loss
        self.teacher_losses = teacher_losses
        self.generator = generator
        self.reported: Tensor | float = 0.0
        self.batches = 0

    @property
    def padding_idx(self) -> int:
        """The padding id of targets, which the trainer needs."""
        return int(self.loss.padding_idx)

    def ignore_prompt(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch without its prompts, see OpenNMT-py's loss."""
        return self.loss.ignore_prompt(batch)  # type: ignore[no-any-return]

    def __call__(self, *batch: Any, **options: Any) -> tuple[Tensor, Any]:
        """Return the summed loss of a batch and OpenNMT-py's statistics of its cross entropy."""
        loss, statistics = self.loss(*batch, **options)
        reconstruction, soft_targets = self.teacher_losses
        if soft_targets is not None:
            soft = self._soft_loss(soft_targets.teacher, batch[0], batch[1])
            loss = (1 - soft_targets.share) * loss + soft_targets.share * soft
        if reconstruction is not None:
            distance = reconstruction.loss()
            self.reported = self.reported + distance.detach()
            self.batches += 1
            loss = reconstruction.mixed_with(loss, statistics.n_words * distance)
        return loss, statistics

    def _soft_loss(self, teacher: Any, batch: dict[str, Any], output: Tensor) -> Tensor:
        """The summed cross entropy of decoder states ``(B, T, D)`` with the teacher's predictions."""
        with torch.no_grad():
            states, _ = teacher(batch["src"], batch["tgt"], batch["srclen"])
            wanted = torch.softmax(teacher.generator(states.flatten(0, 1)).float(), dim=-1)  # (N, V)
        scores = self.generator(output.flatten(0, 1)).float()
        targets = batch["tgt"][:, -output.size(1) :, 0].flatten()
        losses = F.cross_entropy(scores, wanted, reduction="none")
        return losses[targets != self.padding_idx].sum()

    def take_mean(self) -> float:
        """Return the mean reconstruction loss since the last call."""
        mean = float(self.reported) / max(1, self.batches)
        self.reported, self.batches = 0.0, 0
        return mean


def parse_quantization_option(value: Any, plan: EmbeddingPlan | None) -> dict[str, Any] | None:
    """Parse and check the option ``embedding_quantization``.

    Args:
        value: a mapping, YAML text, or ``None``.
        plan: the embeddings of the model.

    Raises:
        UserError: it is not a mapping, a key or value is invalid, or an embedding's method is not standard.
    """
    given = parse_text(QUANTIZATION, value, straight_through.EXAMPLE)
    if given is None:
        return None
    if not isinstance(given, dict):
        raise UserError(
            f"{QUANTIZATION}: {value!r} is not a mapping; write it like {straight_through.EXAMPLE}"
        )
    straight_through.parse_quantization(given)
    if plan is None:
        raise UserError(f"{QUANTIZATION}: has no effect without `embedding`; set it, or remove the option")
    for settings in plan.sides().values():
        straight_through.check_method(settings["method"])
    return given


def quantize_embeddings(model: Any, opt: Namespace, vocabs: dict[str, Any], trainer: Any) -> None:
    """Quantize the embeddings of a model in training if the option is set."""
    plan = read_plan(opt)
    if opt.embedding_quantization is None or plan is None:
        return
    for side in plan.sides():
        counts = token_counts(words_of(vocabs, side), vocabulary_file(opt, side))
        embedding = words_module(model, side)
        assert isinstance(embedding, SharedEmbedding)
        straight_through.quantize_in_training(
            embedding,
            opt.embedding_quantization,
            counts,
            lambda: trainer.optim.training_step - 1,
            opt.seed,
        )
