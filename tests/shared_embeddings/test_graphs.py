"""Every method in graphs of torch.compile, torch.export and ONNX Runtime, and without values."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shared_embeddings as se
from shared_embeddings.embedding import WordEmbedding
from shared_embeddings.export.onnx import Exported, export_embedding
from shared_embeddings.nn.tracing import cache_tensor
from shared_embeddings.quant import kernels
from shared_embeddings.quant.codecs import trellis
from shared_embeddings.quant.packed_tensor import install
from shared_embeddings.quant.storage import hold, pack
from tests.shared_embeddings.cases import CASES, Case, by_name, example_cases
from tests.shared_embeddings.support import assert_same_gradients, gradients
from tests.shared_embeddings.support import each_case as every_case

EXAMPLES = [case for case in example_cases() if not case.options.get("output_bias")]
DETAILS = ["adaptive-deep-map", "adaptive-untied", "define-delight", "uncle-sub-classes"]
COMPILED_CASES = [*EXAMPLES, *(by_name(name) for name in [*DETAILS, "group-funneling-relu"])]

each_case = pytest.mark.parametrize(
    "case",
    COMPILED_CASES,
    ids=lambda case: case.name,
)


class Scores(nn.Module):
    """The scores of an embedding as the forward pass of a module, which is what can be exported."""

    def __init__(self, embedding: se.SharedEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, hidden: Tensor) -> Tensor:
        return self.embedding.logits(hidden)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Reset the compiler before and after."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def some_ids(case: Case, *shape: int) -> Tensor:
    """Random word ids."""
    return torch.randint(0, case.num_embeddings, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow_except("standard-example")
@each_case
def test_training_is_one_graph_or_has_a_fullgraph_limit(case: Case) -> None:
    embedding = case.build().train()
    ids, hidden = some_ids(case, 3, 5), case.hidden(3, 5)
    targets = ids.roll(1).masked_fill(ids == 4, -100)

    def inputs() -> Tensor:
        return embedding(ids).square().sum() + embedding.logits(hidden).square().mean()

    def loss() -> Tensor:
        losses = embedding.cross_entropy(hidden, targets, reduction="none")
        return embedding.cross_entropy(hidden, targets, label_smoothing=0.1) + losses.square().sum()

    for function in (inputs, loss):
        is_whole = function is inputs or se.get_method_config(case.method).fullgraph_limit is None
        if not is_whole:
            with pytest.raises(Exception, match="data-dependent"):
                torch.compile(function, backend="aot_eager", fullgraph=True)()
        expected, value = function(), torch.compile(function, backend="aot_eager", fullgraph=is_whole)()
        torch.testing.assert_close(value, expected)
        wanted = gradients(embedding, expected, hidden)
        assert_same_gradients(gradients(embedding, value, hidden), wanted)
    embedding.eval()
    with torch.no_grad():
        # Loops for some codes, which graphs do not have, read hidden states in 16 bits.
        torch.testing.assert_close(torch.compile(loss, backend="eager")(), loss(), rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("fresh_compiler")
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
        # Loops for some codes, which graphs do not have, read hidden states in 16 bits.
        torch.testing.assert_close(exported(other), embedding.logits(other), rtol=1e-4, atol=2e-4)


@pytest.mark.usefixtures("fresh_compiler")
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


class OneDevice(TorchDispatchMode):
    """Fails at an operation on tensors of several devices; copies and single numbers may differ."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors if tensor.dim() > 0}
        assert len(devices) <= 1 or "copy" in str(func), f"{func} mixes {devices}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), FakeTensorMode], ids=["meta", "fake"])
@every_case
def test_computes_without_values(case: Case, mode: Any) -> None:
    with mode():
        emb = case.build()
        ids, hidden = torch.ones(3, 5, dtype=torch.long), case.hidden(3, 5)
        with OneDevice():
            vectors = emb(ids)
            loss = vectors.sum()
            if case.output:
                scores, losses = emb.logits(hidden), emb.cross_entropy(hidden, ids, reduction="none")
                assert scores.shape == (3, 5, case.num_embeddings) and losses.shape == (3, 5)
                entropy = emb.cross_entropy(hidden, ids, label_smoothing=0.1)
                loss = loss + scores.sum() + losses.sum() + entropy
            loss.backward()
        assert vectors.shape == (3, 5, case.embedding_dim) and loss.shape == ()
        for name, parameter in emb.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None and parameter.grad.shape == parameter.shape, name
        assert not case.output or hidden.grad.shape == hidden.shape
        emb.eval()
        with torch.no_grad():
            assert emb(ids).shape == (3, 5, case.embedding_dim)
            assert emb.table().shape == (case.num_embeddings, case.embedding_dim)
            if case.output:
                assert emb.log_prob(hidden).shape == (3, 5, case.num_embeddings)
                assert emb.output_table().shape == (case.num_embeddings, case.score_dim)
                loss, predictions = emb.cross_entropy_and_predictions(hidden, ids)
                assert loss.shape == () and predictions.shape == (3, 5) and predictions.dtype == torch.long


WORDS, DIM = 200, 64


def exported(module: Any, output: Path) -> Exported:
    pytest.importorskip("onnxruntime")
    words = [f"w{number}" for number in range(module.num_embeddings)]
    return export_embedding(WordEmbedding("words", words, module.padding_idx, module), output)


def fitted(method: str, dim: int = DIM, **options: Any) -> se.SharedEmbedding:
    table = torch.randn(WORDS, dim, generator=torch.Generator().manual_seed(1))
    return se.fit(method, table, padding_idx=3, progress=False, **options)[0]


def held(module: se.SharedEmbedding, store: str) -> se.SharedEmbedding:
    """An embedding with tensors as in a checkpoint."""
    state = module.state_dict()
    module.load_state_dict(install(module, hold(pack(state, state, store))), strict=False)
    return module


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_method(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared_embeddings.export.onnx._SECONDS", 0.0)
    export = exported(case.build(), tmp_path / "embedding.onnx")
    assert export.error < 2e-3 and export.bytes == (tmp_path / "embedding.onnx").stat().st_size


def uniform(dim: int = DIM, **options: Any) -> se.SharedEmbedding:
    return held(fitted("quantized", dim, codec="uniform", **options), "fp16")


def test_compact_forms(tmp_path: Path) -> None:
    output, factors = tmp_path / "embedding.onnx", "two factors of rank"
    for module, form, numbers in (
        (uniform(bits=4), "4-bit blocks of 32", WORDS * (32 + 2 * 2)),
        (uniform(bits=8, group_size=64), "8-bit blocks of 64", WORDS * (64 + 2)),
        # Blocks smaller than the groups, and rows padded to whole blocks.
        (uniform(40, bits=4), "4-bit blocks of 16", WORDS * (24 + 2 * 2)),
        (held(fitted("standard"), "int8"), "8-bit blocks of 64 numbers table", WORDS * (64 + 2)),
        (held(fitted("projective", rank=16), "int8"), f"{factors} 16 in 8-bit", WORDS * (16 + 2) + 16 * 66),
        (fitted("projective", rank=8), f"{factors} 8", 4 * 8 * (WORDS + DIM)),
        (
            held(fitted("structured", num_groups=8, num_clusters=16), "fp16"),
            "codes of 8 centroids",
            8 * WORDS + 2 * 16 * DIM,
        ),
        (fitted("standard"), "dense table", 4 * WORDS * DIM),
        (nn.Embedding(WORDS, DIM), "dense table", 4 * WORDS * DIM),
    ):
        export = exported(module, output)
        assert export.form.startswith(form)
        assert numbers <= export.bytes <= 1.02 * numbers + 2700, form
        assert (export.tokens_per_second is None) == isinstance(module, nn.Embedding)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_blocks_are_exact(bits: int, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", minversion="1.27")
    module = uniform(bits=bits, group_size=32)
    exported(module, tmp_path / "embedding.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "embedding.onnx")
    hidden = torch.randn(5, DIM, generator=torch.Generator().manual_seed(2))
    hidden[1], hidden[2, :32], hidden[3, 5] = 0, 0, 1e4
    inputs = {"ids": np.arange(WORDS), "hidden": hidden.numpy()}
    vectors, scores = session.run(["vectors", "scores"], inputs)
    np.testing.assert_allclose(vectors, module.table().detach(), rtol=1e-6)
    expected = module.logits(hidden).detach()
    expected[:, 3] = torch.from_numpy(scores[:, 3])  # the padding word
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-4 * expected.abs().max())


def test_an_old_runtime_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **options: Any) -> None:
        raise RuntimeError("only 4b quantization is supported")

    monkeypatch.setattr("onnxruntime.InferenceSession", fail)
    with pytest.raises(ValueError, match="does not load the model .only 4b quantization"):
        exported(fitted("standard"), tmp_path / "embedding.onnx")
    assert not list(tmp_path.iterdir())


def test_a_file_that_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = fitted("standard")
    monkeypatch.setattr(type(module), "forward", lambda self, ids: torch.ones(len(ids), DIM))
    with pytest.raises(ValueError, match="ONNX Runtime differs from torch"):
        exported(module, tmp_path / "embedding.onnx")
    assert not list(tmp_path.iterdir())
