"""The option ``embedding_distillation`` of this host: with what it can be combined, and resumption.

`shared_embeddings.fitting.distillation` defines its fields; `nmt.train.embeddings` reads its teacher.
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

# In a checkpoint: the embedding options as they were given, because what is fitted may have other sizes.
ASKED = "embeddings_before_fit"


def parse_mapping(value: Any) -> dict[str, Any] | None:
    """Return the option ``embedding_distillation`` as it is given.

    Args:
        value: a mapping, its YAML spelling as a string, or ``None``.

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
        value: as in `parse_mapping`.

    Raises:
        UserError: a key or a value is not known, the teacher is missing, or keys contradict each other.
    """
    given = parse_mapping(value)
    if given is None:
        return None
    try:
        return parse_given(given)
    except se.OptionError as error:
        raise UserError(str(error)) from None


def check_new(distillation: Distillation, plan: EmbeddingPlan | None, vocabs: dict[str, Any]) -> None:
    """Reject what cannot work for a new model, as far as it shows without building one.

    Raises:
        UserError: there is no embedding to distil into or it sets what the fit sets, or the teacher cannot be
            read, has another vocabulary, or does not share what this model shares.
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
                f"tables cannot become one; set {name}: false, or take another teacher"
            )


def check_words(
    distillation: Distillation, plan: EmbeddingPlan, stored: dict[str, Any], vocabs: dict[str, Any]
) -> None:
    """Reject a teacher with other words, whose vectors would become those of this model's.

    Args:
        distillation: where plain tables are copied, too, all vocabularies have to be the teacher's.
        plan: which embeddings learn from it.
        stored: the vocabularies of its checkpoint.
        vocabs: of this model.

    Raises:
        UserError: names the side.
    """
    copied = ("source", "target") if distillation.network_start == "teacher" else ()
    for side in {**plan.sides(), **dict.fromkeys(copied)}:
        found, wanted = stored.get("src" if side == "source" else "tgt"), words_of(vocabs, side)
        if found != wanted:
            raise UserError(
                f"{OPTION}: the {side} vocabulary of the teacher {distillation.teacher} ({len(found or ())} "
                f"words) is not that of this model ({len(wanted)} words); use the one that the teacher was "
                "trained with"
            )


def resume_distillation(opt: Namespace, saved: Namespace) -> None:
    """Let training go on as the checkpoint says, with another path to the same teacher where one is given.

    Args:
        opt: of this run.
        saved: of the checkpoint; its teacher's path may change.

    Raises:
        UserError: `opt` asks for anything else than the checkpoint was trained with.
    """
    asked, found = (parse_distillation(getattr(options, OPTION, None)) for options in (opt, saved))
    if asked is None:
        return
    if found is None or dataclasses.replace(asked, teacher=found.teacher) != found:
        raise UserError(
            f"{OPTION}: {_shown(asked)} has no effect with train_from, because the checkpoint was trained "
            f"with {_shown(found)}; remove the option, or train a new model"
        )
    setattr(saved, OPTION, getattr(opt, OPTION))


def _shown(distillation: Distillation | None) -> str:
    """Return the option as it may be written."""
    if distillation is None:
        return "none"
    return str(dataclasses.asdict(distillation))


def asked_options(saved: Namespace) -> Namespace:
    """Return the options of a checkpoint with the embeddings as they were asked for."""
    asked = copy.copy(saved)
    vars(asked).update(getattr(saved, ASKED, {}))
    return asked
