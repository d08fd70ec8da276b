"""Every method inside ``torch.compile``: the same vectors, losses and gradients, in training and without.

The backend runs what was captured as it stands: this is about what is captured, and needs no compiler.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import shared_embeddings as se
from tests.loops import slow_except

from .cases import CASES, Case, by_name
from .support import assert_same_gradients, gradients

# One row of each method: the others differ in options that are no concern of a compiler.
FIRST = [next(case for case in CASES if case.method == method) for method in se.methods()]
FIRST.append(by_name("define-delight"))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Nothing captured before or after."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    "case", slow_except([by_name("standard"), by_name("funnel")], FIRST), ids=lambda case: case.name
)
def test_compiled_model_computes_the_same(case: Case) -> None:
    embedding = case.build().train()
    ids = torch.randint(0, case.num_embeddings, (3, 5), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(1)

    def loss() -> torch.Tensor:
        vectors = embedding(ids)
        if not case.output:
            return vectors.square().sum()
        hidden = vectors[..., : case.score_dim].tanh()
        return vectors.square().sum() + embedding.cross_entropy(hidden, targets, label_smoothing=0.1)

    compiled = torch.compile(loss, backend="eager")
    expected, found = loss(), compiled()
    torch.testing.assert_close(found, expected)
    assert_same_gradients(gradients(embedding, found), gradients(embedding, expected))
    embedding.eval()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(loss, backend="eager")(), loss())
