"""Modules with packed tensors: putting them in, making them plain again, and what training them means."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shared_embeddings.layers.packed_tensor import PackedTensor


def install(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put the packed tensors of a state in place of a module's own, frozen, wherever the module uses them.

    Args:
        module: the module.
        state: its state; packed tensors have the shapes of those of the module.

    Returns:
        The rest of the state.
    """
    own = module.state_dict(keep_vars=True)
    _replace(module, {id(own[key]): new for key, new in state.items() if isinstance(new, PackedTensor)})
    return {name: tensor for name, tensor in state.items() if not isinstance(tensor, PackedTensor)}


def unfreeze(module: nn.Module) -> None:
    """Make the packed tensors of a module plain ones, and those that are parameters trainable."""
    tensors = (*module.parameters(), *module.buffers())
    with torch.no_grad():
        _replace(module, {id(old): old.decoded() for old in tensors if isinstance(old, PackedTensor)})


def _replace(module: nn.Module, new: Mapping[int, Tensor]) -> None:
    """Replace parameters and buffers, given the new ones by the id of the old."""
    parameters = {
        key: nn.Parameter(tensor, requires_grad=not isinstance(tensor, PackedTensor))
        for key, tensor in new.items()
    }
    for part in module.modules():
        for parameter, old in part._parameters.items():
            part._parameters[parameter] = parameters.get(id(old), old)
        for buffer, value in part._buffers.items():
            part._buffers[buffer] = new.get(id(value), value)


@functools.cache
def warn_of_frozen() -> None:
    """Warn once that packed tensors are not trained."""
    warnings.warn(
        "the embedding is packed and frozen, so it is not trained: load it with trainable=True to train it",
        stacklevel=3,
    )
