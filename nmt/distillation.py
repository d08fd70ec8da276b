"""The option ``embedding_distillation``: what it may hold, and with what it can be combined.

The three steps of Distilled Embedding (Lioutas et al., 2020, Algorithm 1): a model is trained with the full
table, the teacher; the small embedding is fitted to that table (Eq. 5); the whole model, which starts from
the teacher in all else, is trained on with the reconstruction loss beside the cross entropy (Eq. 6). The last
two are in `nmt.teacher`.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
from argparse import Namespace
from dataclasses import dataclass
from typing import Any, Literal, get_args

from nmt.errors import UserError
from nmt.files import read_checkpoint
from nmt.plan import EmbeddingPlan, parse_text, words_of

OPTION = "embedding_distillation"
EXAMPLE = "{teacher: run/model_step_20000.pt, alpha: 0.01}"
# In a checkpoint: the embedding options as they were given, because what is fitted may have other sizes.
ASKED = "embeddings_before_fit"

Start = Literal["fit", "random"]
NetworkStart = Literal["teacher", "random"]
Freeze = Literal["none", "embedding", "network"]


@dataclass(frozen=True)
class Distillation:
    """The option ``embedding_distillation``.

    Attributes:
        teacher: checkpoint of the model with the full table, of this package or of OpenNMT-py.
        alpha: weight of the reconstruction loss; the cross entropy has 1 - alpha (Eq. 6). 0 for no such loss.
        embedding_start: ``fit`` to the teacher's table, or ``random`` as when training from scratch.
        network_start: every other parameter from the ``teacher``, or ``random``.
        freeze: what is not trained: ``none``, ``embedding``, or ``network`` (all but the embedding).
    """

    teacher: str
    alpha: float = 0.01
    embedding_start: Start = "fit"
    network_start: NetworkStart = "teacher"
    freeze: Freeze = "none"


CHOICES = {"embedding_start": Start, "network_start": NetworkStart, "freeze": Freeze}


def parse_mapping(value: Any) -> dict[str, Any] | None:
    """Return the option ``embedding_distillation`` as it is given.

    Args:
        value: a mapping, its YAML or Python spelling as a string, or ``None``.

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
    known = [field.name for field in dataclasses.fields(Distillation)]
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {close[0]}?" if close else f"it may hold {', '.join(known)}"
            raise UserError(f"{OPTION}: unknown key {key!r}; {hint}")
    teacher = given.get("teacher")
    if not isinstance(teacher, str) or not teacher:
        raise UserError(f"{OPTION}: teacher is {teacher!r}; name a trained checkpoint, like {EXAMPLE}")
    alpha = given.get("alpha", 0.0 if given.get("freeze") == "embedding" else Distillation.alpha)
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha < 1:
        raise UserError(f"{OPTION}: alpha is {alpha!r}; it must be a number from 0 to below 1")
    for key, choices in CHOICES.items():
        if key in given and given[key] not in get_args(choices):
            raise UserError(f"{OPTION}: {key} is {given[key]!r}; it must be {' or '.join(get_args(choices))}")
    distillation = Distillation(**{**given, "alpha": float(alpha)})
    _check_effects(distillation)
    return distillation


def _check_effects(distillation: Distillation) -> None:
    """Refuse keys that together have no effect.

    Raises:
        UserError: names them.
    """
    if distillation.freeze == "embedding" and distillation.alpha > 0:
        raise UserError(
            f"{OPTION}: alpha: {distillation.alpha} has no effect with freeze: embedding; remove one of them"
        )
    nothing_fitted = distillation.embedding_start == "random" and distillation.alpha == 0
    if nothing_fitted and distillation.network_start == "random":
        raise UserError(
            f"{OPTION}: the teacher has no effect with embedding_start: random, network_start: random and "
            "alpha: 0; change one of them, or remove the option"
        )


def check_new(distillation: Distillation, plan: EmbeddingPlan | None, vocabs: dict[str, Any]) -> None:
    """Refuse what cannot work for a new model, as far as it shows without building one.

    Raises:
        UserError: there is no embedding to distil into or it sets what the fit sets, or the teacher cannot be
            read, has another vocabulary, or does not share what this model shares.
    """
    if plan is None:
        raise UserError(f"{OPTION}: has no effect without `embedding`; set it, or remove the option")
    if distillation.embedding_start == "fit" and any("seed" in side for side in plan.sides().values()):
        raise UserError(
            f"{OPTION}: the embedding's own `seed` cannot be set where it is fitted; remove it, or set "
            "embedding_start: random"
        )
    path = distillation.teacher
    try:
        checkpoint = read_checkpoint(path)
    except UserError as error:
        raise UserError(f"{OPTION}: teacher: {error}") from error
    for side in plan.sides():
        key = "src" if side == "source" else "tgt"
        found, wanted = checkpoint["vocab"].get(key), words_of(vocabs, side)
        if found != wanted:
            raise UserError(
                f"{OPTION}: the {side} vocabulary of the teacher {path} ({len(found or ())} words) is not "
                f"that of this model ({len(wanted)} words); use the one that the teacher was trained with"
            )
    shared = {"share_embeddings": plan.share_inputs, "share_decoder_embeddings": plan.share_output}
    for name, is_shared in shared.items():
        if is_shared and not getattr(checkpoint["opt"], name, False):
            raise UserError(
                f"{name}: true, but the teacher {path} was trained with {name}: false, and its "
                f"tables cannot become one; set {name}: false, or take another teacher"
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
