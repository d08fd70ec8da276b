"""The option ``embedding_distillation``: parsing, checks and resumption.

`shared_embeddings.fitting.distillation` defines its fields; `nmt.train.embeddings` reads the teacher.
"""

from __future__ import annotations

import copy
import dataclasses
from argparse import Namespace
from typing import Any

import shared_embeddings as se
from nmt.checkpoint.files import peek
from nmt.model.plan import EmbeddingPlan, parse_text, words_of
from shared_embeddings.errors import UserError
from shared_embeddings.fitting.distillation import EXAMPLE, OPTION, Distillation, check_seed
from shared_embeddings.fitting.distillation import parse_distillation as parse_given

# Option in checkpoints: the embedding options before the fit, which may change sizes.
REQUESTED = "embeddings_before_fit"


def parse_mapping(value: Any) -> dict[str, Any] | None:
    """Parse the option ``embedding_distillation`` to a mapping.

    Args:
        value: a mapping, YAML text, or ``None``.

    Raises:
        UserError: the text is not a mapping.
    """
    given = parse_text(OPTION, value, EXAMPLE)
    if given is not None and not isinstance(given, dict):
        raise UserError(f"{OPTION}: {value!r} is not a mapping; write it like {EXAMPLE}")
    return given


def parse_distillation(value: Any) -> Distillation | None:
    """Return the option ``embedding_distillation`` with its defaults.

    Args:
        value: see `parse_mapping`.

    Raises:
        UserError: a key or value is invalid, the teacher is missing, or keys contradict each other.
    """
    given = parse_mapping(value)
    if given is None:
        return None
    try:
        return parse_given(given)
    except se.OptionError as error:
        raise UserError(str(error)) from None


def check_new(distillation: Distillation, plan: EmbeddingPlan | None, vocabs: dict[str, Any]) -> None:
    """Check the distillation of a new model, as far as possible without building it.

    Raises:
        UserError: the model has no shared embedding, or sets a seed that the fit sets; or the teacher cannot
            be read, has another vocabulary, or lacks ties of this model.
    """
    if plan is None:
        raise UserError(f"{OPTION}: has no effect without `embedding`; set it, or remove the option")
    for settings in plan.sides().values():
        check_seed(distillation, settings)
    path = distillation.teacher
    try:
        checkpoint = peek(path)
    except UserError as error:
        raise UserError(f"{OPTION}: teacher: {error}") from error
    check_words(distillation, plan, checkpoint["vocab"], vocabs)
    shared = {"share_embeddings": plan.share_inputs, "share_decoder_embeddings": plan.share_output}
    for name, is_shared in shared.items():
        if is_shared and not getattr(checkpoint["opt"], name, False):
            raise UserError(
                f"{name}: true, but the teacher {path} was trained with {name}: false, and its "
                f"tables cannot be merged; set {name}: false, or use another teacher"
            )


def check_words(
    distillation: Distillation, plan: EmbeddingPlan, stored: dict[str, Any], vocabs: dict[str, Any]
) -> None:
    """Check that the teacher has the vocabularies of this model.

    Args:
        distillation: if the network is copied, both vocabularies are checked.
        plan: the embeddings of this model.
        stored: vocabularies of the teacher's checkpoint.
        vocabs: vocabularies of this model.

    Raises:
        UserError: a vocabulary differs.
    """
    copied = ("source", "target") if distillation.network_start == "teacher" else ()
    for side in {**plan.sides(), **dict.fromkeys(copied)}:
        found, wanted = stored.get("src" if side == "source" else "tgt"), words_of(vocabs, side)
        if found != wanted:
            raise UserError(
                f"{OPTION}: the {side} vocabulary of the teacher {distillation.teacher} ({len(found or ())} "
                f"words) differs from that of this model ({len(wanted)} words); use the teacher's"
            )


def resume_distillation(opt: Namespace, saved: Namespace) -> None:
    """Resume the distillation of a checkpoint; only the path of the teacher may change.

    Args:
        opt: options of this run.
        saved: options of the checkpoint; its path of the teacher is replaced.

    Raises:
        UserError: the option differs from that of the checkpoint.
    """
    asked, found = (parse_distillation(getattr(options, OPTION, None)) for options in (opt, saved))
    if asked is None:
        return
    if found is None or dataclasses.replace(asked, teacher=found.teacher) != found:
        raise UserError(
            f"{OPTION}: {_shown(asked)} has no effect with train_from because the checkpoint was trained "
            f"with {_shown(found)}; remove the option, or train a new model"
        )
    setattr(saved, OPTION, getattr(opt, OPTION))


def _shown(distillation: Distillation | None) -> str:
    """Format the option."""
    if distillation is None:
        return "none"
    return str(dataclasses.asdict(distillation))


def requested_options(saved: Namespace) -> Namespace:
    """Return the options of a checkpoint with the embedding options before the fit."""
    asked = copy.copy(saved)
    vars(asked).update(getattr(saved, REQUESTED, {}))
    return asked
