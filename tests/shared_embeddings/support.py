"""Tools of the tests: gradients by name, closeness, and a meter of what a computation allocates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared_embeddings.layers.packed_tensor import inner_tensors


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
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    return {
        name: torch.zeros_like(tensor) if gradient is None else gradient
        for name, tensor, gradient in zip(names, tensors, found, strict=True)
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
        """Run the operator and note what it returned."""
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
