"""Every method in ``torch.compile`` and ``torch.export``: the same vectors, losses and gradients.

The backends run what was captured without compiling it: this tests what is captured.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import shared_embeddings as se
from shared_embeddings.codecs import kernels, trellis
from shared_embeddings.layers.caching import cache_tensor
from shared_embeddings.registry import method_class

from .cases import Case, by_name, example_cases
from .support import assert_same_gradients, gradients

EXAMPLES = [case for case in example_cases() if not case.options.get("output_bias")]
DETAILS = ["adaptive-deep-map", "adaptive-untied", "define-delight", "uncle-sub-classes"]
CASES = [*EXAMPLES, *(by_name(name) for name in [*DETAILS, "group-funneling-relu"])]

each_case = pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda case: case.name,
)


class Scores(nn.Module):
    """The scores of an embedding as the forward pass of a module, which is what can be exported."""

    def __init__(self, embedding: se.SharedEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, hidden: Tensor) -> Tensor:
        return self.embedding.logits(hidden)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Nothing captured before or after."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def some_ids(case: Case, *shape: int) -> Tensor:
    """Random word ids."""
    return torch.randint(0, case.num_embeddings, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.slow_except("standard-example")
@each_case
def test_compiled_model_computes_the_same(case: Case) -> None:
    embedding = case.build().train()
    ids = some_ids(case, 3, 5)

    def loss() -> Tensor:
        vectors = embedding(ids)
        hidden = vectors[..., : case.score_dim].tanh()
        return vectors.square().sum() + embedding.cross_entropy(hidden, ids.roll(1), label_smoothing=0.1)

    compiled = torch.compile(loss, backend="eager")
    expected, found = loss(), compiled()
    torch.testing.assert_close(found, expected)
    assert_same_gradients(gradients(embedding, found), gradients(embedding, expected))
    embedding.eval()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(loss, backend="eager")(), loss())


@pytest.mark.slow_except("standard-example")
@each_case
def test_training_is_one_graph_or_has_a_fullgraph_limit(case: Case) -> None:
    embedding = case.build().train()
    ids, hidden = some_ids(case, 3, 5), case.hidden(3, 5)
    targets = ids.roll(1).masked_fill(ids == 4, -100)

    def inputs() -> Tensor:
        return embedding(ids).square().sum() + embedding.logits(hidden).square().mean()

    def loss() -> Tensor:
        each = embedding.cross_entropy(hidden, targets, reduction="none")
        return embedding.cross_entropy(hidden, targets, label_smoothing=0.1) + each.square().sum()

    for function in (inputs, loss):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        if function is loss and method_class(case.method).fullgraph_limit is not None:
            with pytest.raises(Exception, match="data-dependent"):
                compiled()
            continue
        expected, found = function(), compiled()
        torch.testing.assert_close(found, expected)
        wanted = gradients(embedding, expected, hidden)
        assert_same_gradients(gradients(embedding, found, hidden), wanted)


@pytest.mark.slow_except("standard-example*", "adaptive-example*")
@each_case
def test_vectors_and_scores_can_be_exported(case: Case) -> None:
    embedding = case.build().eval()
    batch, time = torch.export.Dim("batch"), torch.export.Dim("time")
    shapes = ({0: batch, 1: time},)
    with torch.no_grad():
        ids, hidden = some_ids(case, 3, 5), case.hidden(3, 5).detach()
        exported = torch.export.export(embedding, (ids,), dynamic_shapes=shapes).module()
        longer = some_ids(case, 2, 9)
        torch.testing.assert_close(exported(longer), embedding(longer), rtol=1e-4, atol=1e-6)
        exported = torch.export.export(Scores(embedding), (hidden,), dynamic_shapes=shapes).module()
        other = case.hidden(4, 7).detach()
        torch.testing.assert_close(exported(other), embedding.logits(other), rtol=1e-4, atol=1e-5)


def test_export_leaves_no_traced_tensors_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = cache_tensor(inspect.unwrap(trellis.successive_entries))
    monkeypatch.setattr(trellis, "successive_entries", fresh)
    monkeypatch.setattr(kernels, "usable", lambda *tensors: False)
    embedding = se.build("quantized", num_embeddings=9, embedding_dim=8, bits=2.5).eval()
    ids = torch.arange(9)
    with torch.no_grad():
        exported = torch.export.export(embedding, (ids,)).module()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(embedding(ids), FakeTensor)
    vectors = embedding(ids)
    assert type(vectors) is Tensor
    torch.testing.assert_close(exported(ids), vectors)
    assert fresh(2, ids.device) is fresh(2, ids.device)


def test_fullgraph_limits_have_reasons() -> None:
    limits = {method: method_class(method).fullgraph_limit for method in se.methods()}
    assert {method for method, limit in limits.items() if limit is not None} == {"adaptive"}
    assert all(limit is None or len(limit.split()) > 5 for limit in limits.values())
