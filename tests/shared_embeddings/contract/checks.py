"""Choosing the rows that a test of the contract runs on, and what several of its files compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shared_embeddings as se
from tests.helpers import in_turn_by
from tests.shared_embeddings.cases import CASES, OUTPUT_CASES, SOFTMAX_CASES, Case


def each_of(cases: Sequence[Case]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """One test per method, a loop over its rows.

    The first row of each kind (with and without output, bias, padding, clusters) is in the quick test, the
    others, which differ in details, are in a slow one.
    """
    groups: dict[str, dict[bool, list[Case]]] = {}
    kinds: set[tuple[object, ...]] = set()
    for case in cases:
        kind = (case.method, case.output, case.bias is None, case.padding_idx is None, case.adaptive)
        groups.setdefault(case.method, {}).setdefault(kind in kinds, []).append(case)
        kinds.add(kind)
    return in_turn_by(
        "cases",
        [
            pytest.param(rows, id=f"{method}-more" if slow else method, marks=[pytest.mark.slow] * slow)
            for method, parts in groups.items()
            for slow, rows in parts.items()
        ],
        "case",
    )


each_case = each_of(CASES)
each_output_case = each_of(OUTPUT_CASES)
each_softmax_case = each_of(SOFTMAX_CASES)


def all_ids(case: Case) -> Tensor:
    """Every id once, ``(V,)``."""
    return torch.arange(case.num_embeddings)


def some_targets(case: Case, *shape: int) -> Tensor:
    """Random targets ``shape``."""
    return torch.randint(case.num_embeddings, shape)


def dense_scores(emb: se.SharedEmbedding, hidden: Tensor) -> Tensor:
    """The scores that ``logits`` promises: a product with the dense table, plus the bias if there is one."""
    products, bias = hidden @ emb.output_table().T, emb.output_bias()
    return products if bias is None else products + bias


def dense_loss(emb: se.SharedEmbedding, hidden: Tensor, targets: Tensor, **options: object) -> Tensor:
    """The loss that ``cross_entropy`` promises, from dense scores; shapes as there."""
    logits = dense_scores(emb, hidden)
    reduction = options.get("reduction", "mean")
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)
    return loss.view(targets.shape) if reduction == "none" else loss


def trainable_loss(emb: se.SharedEmbedding, case: Case, hidden: Tensor | None = None) -> Tensor:
    """A loss that uses the input side and, where there is one, the output side."""
    loss = emb(all_ids(case)).square().sum()
    if case.output:
        hidden = case.hidden(5, scale=3.0) if hidden is None else hidden
        loss = loss + emb.cross_entropy(hidden, some_targets(case, hidden.shape[0]))
    return loss
