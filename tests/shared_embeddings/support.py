"""Tools of the tests: choosing cases, dense references, gradients by name, a memory meter, and kill -9."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shared_embeddings as se
from shared_embeddings.quant.packed_tensor import inner_tensors
from tests.shared_embeddings.cases import CASES, OUTPUT_CASES, SOFTMAX_CASES, Case


class ReLUOfCodes(torch.autograd.Function):
    """A ReLU whose gradient below zero is half of that above."""

    @staticmethod
    def forward(ctx: Any, codes: Tensor) -> Tensor:
        ctx.save_for_backward(codes)
        return codes.clamp(min=0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (codes,) = ctx.saved_tensors
        return torch.where(codes > 0, gradient, gradient / 2)


# f of Distilled Embedding, Eq. 3.
ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda codes: codes,
    "relu": ReLUOfCodes.apply,
    "gelu": F.gelu,
    "tanh": torch.tanh,
}


def gradients(module: nn.Module, loss: Tensor, *inputs: Tensor) -> dict[str, Tensor]:
    """Gradients of ``loss`` for every trainable parameter, by name, and for ``inputs``; zero where unused."""
    names, tensors = [], []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            names.append(name)
            tensors.append(parameter)
    for position, tensor in enumerate(inputs):
        names.append(f"input {position}")
        tensors.append(tensor)
    grads = torch.autograd.grad(loss, tensors, allow_unused=True)
    return {
        name: torch.zeros_like(tensor) if gradient is None else gradient
        for name, tensor, gradient in zip(names, tensors, grads, strict=True)
    }


def assert_same_gradients(
    actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-3, atol: float = 1e-5
) -> None:
    """Assert that two results of ``gradients`` agree, naming the tensor that does not.

    `atol` is for gradients of up to one; sums of larger ones are as much less exact.
    """
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            actual[name],
            gradient,
            rtol=rtol,
            atol=atol * max(1.0, float(gradient.detach().abs().max())),
            msg=lambda text, name=name: f"gradient of {name}: {text}",
        )


def training_step(module: nn.Module, loss: Tensor, rate: float = 0.1) -> None:
    """One step of gradient descent on ``loss``, in place."""
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class MemoryMeter(TorchDispatchMode):
    """Watches every tensor that operators return while it is active, in the forward and in the backward pass.

    ``largest`` is the largest single allocation in bytes, ``peak`` the most bytes that were alive at once.
    Memory that existed before is not counted as long as it is named in ``known``.
    """

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.largest = 0
        self.peak = 0
        self._known = {
            part.untyped_storage().data_ptr() for tensor in known for part in inner_tensors(tensor)
        }
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and count what it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                for part in inner_tensors(leaf):
                    self._note(part)
        return result

    def _note(self, tensor: Tensor) -> None:
        """Count the storage of one returned tensor."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._known or size == 0:
            return
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self._alive[address] = (StorageWeakRef(storage), size)
        self.largest = max(self.largest, size)
        self.peak = max(self.peak, sum(entry[1] for entry in self._alive.values()))


def each_of(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """One test per row.

    The first row of each kind (with and without output, bias, padding, clusters) is quick, the others, which
    differ in details, are slow.
    """
    kinds: set[tuple[object, ...]] = set()
    rows = []
    for case in cases:
        kind = (case.method, case.output, case.bias is None, case.padding_idx is None, case.adaptive)
        rows.append(pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (kind in kinds)))
        kinds.add(kind)
    return pytest.mark.parametrize("case", rows)


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
    """The expected ``logits``: a product with the dense table, plus the bias if there is one.

    Of a hierarchical distribution, which is no softmax of products, they are log-probabilities.
    """
    if not emb.has_linear_scores:
        return emb.log_prob(hidden)
    products, bias = hidden @ emb.output_table().T, emb.output_bias()
    return products if bias is None else products + bias


def dense_loss(emb: se.SharedEmbedding, hidden: Tensor, targets: Tensor, **options: object) -> Tensor:
    """The expected ``cross_entropy``, from dense scores."""
    logits = dense_scores(emb, hidden)
    reduction = options.get("reduction", "mean")
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)
    return loss.view(targets.shape) if reduction == "none" else loss


def trainable_loss(emb: se.SharedEmbedding, case: Case, hidden: Tensor | None = None) -> Tensor:
    """A loss that uses the input side and the output side, if any."""
    loss = emb(all_ids(case)).square().sum()
    if case.output:
        hidden = case.hidden(5, scale=3.0) if hidden is None else hidden
        loss = loss + emb.cross_entropy(hidden, some_targets(case, hidden.shape[0]))
    return loss


# Formulas of papers in the simplest form; only the values of tensors come from the library.


def zero_row(table: Tensor, row: int | None) -> Tensor:
    """The table ``(V, D)`` with a row of zeros, through which no gradient flows."""
    if row is None:
        return table
    keep = torch.ones(len(table), 1, dtype=table.dtype)
    keep[row] = 0
    return table * keep


# Tensor train


def tensor_train_row(cores: Sequence[Tensor], word: int) -> Tensor:
    """A row entry by entry, a product of one matrix of each core; the last digit changes fastest."""
    vocab, widths = [core.shape[1] for core in cores], [core.shape[2] for core in cores]
    digits = list(itertools.product(*map(range, vocab)))[word]
    entries = []
    for place in itertools.product(*map(range, widths)):
        matrix = torch.eye(1, dtype=cores[0].dtype)
        for core, i, j in zip(cores, digits, place):
            matrix = matrix @ core[:, i, j, :]
        entries.append(matrix.squeeze())
    return torch.stack(entries)
