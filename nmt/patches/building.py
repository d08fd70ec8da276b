"""Patches of model building: shared embeddings, length control, fast dropout, long sentences."""

from __future__ import annotations

import copy
from argparse import Namespace
from typing import Any

from torch import Tensor, nn

from nmt.model.embeddings import insert_embeddings, reset_embeddings
from nmt.model.plan import check_combinations, check_sizes, read_plan
from nmt.summarization import length_control
from shared_embeddings.layers.dropout import Dropout
from shared_embeddings.layers.packed_tensor import unfreeze


def with_shared_embeddings(original: Any) -> Any:
    """Build the model with plain, untied tables, then replace them by the configured embeddings."""

    def build_base_model(model_opt: Namespace, vocabs: dict[str, Any]) -> nn.Module:
        plan = read_plan(model_opt)
        if plan is None:
            return original(model_opt, vocabs)  # type: ignore[no-any-return]
        check_combinations(plan, model_opt)
        check_sizes(plan, model_opt, vocabs)
        untied = copy.copy(model_opt)
        untied.share_embeddings = False
        untied.share_decoder_embeddings = model_opt.share_decoder_embeddings and plan.target is None
        model: nn.Module = original(untied, vocabs)
        insert_embeddings(model, plan, model_opt, vocabs)
        return model

    return build_base_model


def with_length_control(original: Any) -> Any:
    """Insert length-controlled positions into the decoder if the options ask for them."""

    def build_base_model(model_opt: Namespace, vocabs: dict[str, Any]) -> nn.Module:
        length_control.check_positions(model_opt)
        model: nn.Module = original(model_opt, vocabs)
        length_control.insert_positions(model, model_opt)
        return model

    return build_base_model


def with_fast_dropout(original: Any) -> Any:
    """Replace ``nn.Dropout``, whose masks take a sixth of the training time on CPUs."""

    def build_base_model(model_opt: Namespace, vocabs: dict[str, Any]) -> nn.Module:
        model: nn.Module = original(model_opt, vocabs)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Dropout:
                    setattr(module, name, Dropout(child.p))
        return model

    return build_base_model


def with_embedding_initialization(original: Any) -> Any:
    """Initialize the shared embeddings of a new model after OpenNMT-py has initialized everything.

    Those of a loaded model are made trainable.
    """

    def build_model(
        model_opt: Namespace, opt: Namespace, vocabs: Any, checkpoint: Any, device_id: int
    ) -> nn.Module:
        model: nn.Module = original(model_opt, opt, vocabs, checkpoint, device_id)
        if checkpoint is None:
            reset_embeddings(model)
        else:
            unfreeze(model)
        return model

    return build_model


def with_growing_table(original: Any) -> Any:
    """Extend the sinusoids when a sentence is longer than their table; OpenNMT-py fails."""

    def forward(self: Any, emb: Tensor, step: int | None = None) -> Tensor:
        needed = (step or 0) + emb.size(1)
        if needed > self.pe.size(0):
            kind = "SinusoidalConcat" if _is_concatenated(self.pe) else "SinusoidalInterleaved"
            longer = type(self)(self.dim, kind, max_len=2 * needed)
            self.pe = longer.pe.to(self.pe)
        return original(self, emb, step)  # type: ignore[no-any-return]

    return forward


def _is_concatenated(table: Tensor) -> bool:
    """Whether a table ``(T, 1, D)`` has all sines first; interleaved tables have cos(0) in column 1."""
    return table.size(-1) > 2 and float(table[0, 0, 1]) == 0.0
