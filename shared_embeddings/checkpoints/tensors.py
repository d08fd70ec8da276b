"""What the checkpoints of all hosts have in common: a quick look into one, and what its parts must be."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shared_embeddings.checkpoints.checksums import is_verified
from shared_embeddings.errors import UserError

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# The type of a part of a checkpoint: its description for messages, and a test.
Kind = tuple[str, Callable[[Any], bool]]


def mapped(path: str | os.PathLike[str]) -> Any:
    """The content of a file of ``torch.save`` with memory-mapped tensors, read on first use.

    Raises:
        shared_embeddings.utils.files.UNREADABLE: it is missing or truncated, or contains other objects.
    """
    # The format before torch 1.6 cannot be mapped.
    can_be_mapped = zipfile.is_zipfile(path)
    return torch.load(os.fspath(path), map_location="cpu", weights_only=True, mmap=can_be_mapped)


def check_parts(content: Mapping[str, Any], kinds: Mapping[str, Kind], name: str) -> None:
    """Check the types of the parts of a checkpoint; missing parts pass.

    Args:
        content: the checkpoint, or a part of it.
        kinds: key -> expected type.
        name: the name of the file, for messages.

    Raises:
        UserError: a part has another type.
    """
    for part, (wanted, is_right) in kinds.items():
        if part in content and not is_right(content[part]):
            raise UserError(
                f"{name}: its '{part}' is {described(content[part])}, expected {wanted}; use another "
                "checkpoint"
            )


def described(value: object) -> str:
    """A short description of a value of an unexpected type or shape."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "a mapping with other content"
    return f"a {type(value).__name__}"


def is_state(value: object) -> bool:
    """Whether a value is a state: a mapping of names to dense tensors."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and is_dense(tensor) for name, tensor in value.items()
    )


def is_dense(value: object) -> bool:
    """Whether a value is a dense tensor with data: neither sparse nor on the meta device."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta


def is_words(value: object) -> bool:
    """Whether a value is a list of words."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(word, str) for word in value)


def is_optimizer(value: object) -> bool:
    """Whether a value has the structure of a torch optimizer's state, with dense tensors."""
    if not isinstance(value, Mapping):
        return False
    groups, state = value.get("param_groups"), value.get("state")
    return (
        isinstance(groups, list)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)
        and isinstance(state, Mapping)
        and all(isinstance(own, Mapping) and _tensors_are_dense(own) for own in state.values())
    )


def _tensors_are_dense(values: Mapping[Any, Any]) -> bool:
    """Whether all tensors among the values are dense."""
    return all(is_dense(value) for value in values.values() if isinstance(value, Tensor))


# Elementwise optimizer states.
_PER_NUMBER = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Check the shapes of an optimizer's loaded state, which torch does not.

    Raises:
        ValueError: a shape does not match its parameter.
    """
    for parameter, own in optimizer.state.items():
        for name in _PER_NUMBER:
            found = own.get(name)
            if isinstance(found, Tensor) and found.shape != parameter.shape:
                raise ValueError(
                    f"{name} of the optimizer is {tuple(found.shape)}, but the parameter is "
                    f"{tuple(parameter.shape)}"
                )


def check_finite(state: Mapping[str, Tensor], name: str) -> None:
    """Check that a model contains no NaN or infinity.

    Args:
        state: its tensors.
        name: the name of the file, for messages.

    Raises:
        UserError: a tensor contains NaN or infinity.
    """
    if not is_verified():
        return
    for key, tensor in state.items():
        if tensor.dtype in _FLOATS and not _is_finite(tensor):
            raise UserError(
                f"{name}: its tensor {key} contains NaN or infinity, perhaps because training diverged; use "
                "an earlier checkpoint"
            )


def _is_finite(tensor: Tensor) -> bool:
    """Whether all values of a tensor are finite."""
    # The sum is a fast check, but may overflow.
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())
