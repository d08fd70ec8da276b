"""The option ``embedding_quantization`` of this host; see `shared_embeddings.fitting.straight_through`."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from nmt.model.embeddings import words_module
from nmt.model.plan import EmbeddingPlan, parse_text, read_plan, words_of
from nmt.train.teacher import token_counts, vocabulary_file
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.errors import UserError
from shared_embeddings.fitting.straight_through import (
    EXAMPLE,
    OPTION,
    check_method,
    parse_quantization,
    quantize_in_training,
)


def parse_mapping(value: Any, plan: EmbeddingPlan | None) -> dict[str, Any] | None:
    """The option ``embedding_quantization`` as it is given, after checks.

    Args:
        value: a mapping, its YAML spelling as a string, or ``None``.
        plan: the embeddings of the model.

    Raises:
        UserError: the text is not a mapping, a key or a value is not known, or an embedding is not of method
            standard.
    """
    given = parse_text(OPTION, value, EXAMPLE)
    if given is None:
        return None
    if not isinstance(given, dict):
        raise UserError(f"{OPTION}: {value!r} is not a mapping; write it like {EXAMPLE}")
    parse_quantization(given)
    if plan is None:
        raise UserError(f"{OPTION}: has no effect without `embedding`; set it, or remove the option")
    for settings in plan.sides().values():
        check_method(settings["method"])
    return given


def quantize_embeddings(model: Any, opt: Namespace, vocabs: dict[str, Any], trainer: Any) -> None:
    """Let the embeddings of a model use rounded rows in training, if the option is set."""
    plan = read_plan(opt)
    if opt.embedding_quantization is None or plan is None:
        return
    for side in plan.sides():
        counts = token_counts(words_of(vocabs, side), vocabulary_file(opt, side))
        embedding = words_module(model, side)
        assert isinstance(embedding, SharedEmbedding)
        quantize_in_training(
            embedding,
            opt.embedding_quantization,
            counts,
            lambda: trainer.optim.training_step - 1,
            opt.seed,
        )
