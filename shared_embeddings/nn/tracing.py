"""Tensors without values: on the meta device, in ``FakeTensorMode``, and in graphs that are captured.

Code whose shapes depend on values (distinct words, words per group) asks `needs_fixed_shapes`, and then does
more work for the same result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

_PLAIN = (Tensor, nn.Parameter)


def has_values(*tensors: Tensor) -> bool:
    """Whether operations on these tensors compute values. True while a graph is captured, see below."""
    if torch.compiler.is_compiling():
        return True
    if any(tensor.is_meta for tensor in tensors):
        return False
    # The detection takes a part of the time of a look-up.
    is_plain = not torch._C._len_torch_dispatch_stack() and all(type(tensor) in _PLAIN for tensor in tensors)
    return is_plain or detect_fake_mode(tensors) is None


def needs_fixed_shapes(*tensors: Tensor) -> bool:
    """Whether shapes must not depend on values: without values, and while a graph is captured."""
    return torch.compiler.is_compiling() or not has_values(*tensors)


def true_positions(mask: Tensor) -> Tensor:
    """The positions where `mask` ``(n,)`` is true; all of them without values.

    While a graph is captured, this ends the graph, which is faster than computing all positions.
    """
    if has_values(mask):
        return mask.nonzero().squeeze(1)
    return torch.arange(mask.size(0), device=mask.device)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on a device; None where autocast is off or does not exist."""
    is_on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if is_on else None


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast on a device."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def cache_tensor(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Cache the tensors that a function returns, like ``functools.cache``.

    Nothing is cached while a graph is captured or in ``FakeTensorMode``: those tensors are invalid elsewhere.
    """
    results: dict[tuple[Hashable, ...], Tensor] = {}

    @functools.wraps(make)
    def cached(*arguments: Hashable) -> Tensor:
        if needs_fixed_shapes():
            return make(*arguments)
        result = results.get(arguments)
        if result is None:
            with torch.inference_mode(False):  # inference tensors cannot be used in training later
                result = results[arguments] = make(*arguments)
        return result

    return cached
