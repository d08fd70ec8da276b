"""Caching tensors derived from parameters in inference, as long as the parameters do not change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from shared_embeddings.quant.packed_tensor import inner_tensors
from shared_embeddings.utils.tracing import autocast_dtype, has_values

Self = TypeVar("Self", bound="CachingModule")


class _Derived(NamedTuple):
    """Tensors derived from the parameters, and the state of the parameters that they were derived from."""

    state: tuple[object, ...]
    # References to the sources: otherwise a new tensor at the same address would look like an old one.
    sources: tuple[Tensor, ...]
    tensors: dict[str, Any]


class CachingModule(nn.Module):
    """A module that can cache tensors derived from its parameters, in ``eval()`` without gradients.

    The cache is cleared when a parameter or buffer is replaced or modified, on ``train()``, on
    ``load_state_dict``, and on a move to another device or dtype. torch does not count changes through an
    alias such as ``parameter.data.add_(1)``: call `clear_cache` after those.
    """

    def __init__(self) -> None:
        super().__init__()
        self._derived: _Derived | None = None

    def clear_cache(self) -> None:
        """Clear the cache."""
        self._derived = None

    def cached(self, name: str, make: Callable[[], Any]) -> Any:
        """`make()`, or its cached result for the same state of the parameters."""
        state = self.cache_state()
        if state is None:
            return make()
        derived = self._derived
        if derived is None or derived.state != state:
            derived = _Derived(state, tuple(source.detach() for source in self._sources()), {})
        if name not in derived.tensors:
            derived.tensors[name] = make()
        self._derived = derived
        return derived.tensors[name]

    def bytes_in_memory(self) -> int:
        """The bytes of parameters, buffers and cached tensors, each memory block once."""
        found: dict[int, int] = {}
        for module in self.modules():
            derived = module._derived if isinstance(module, CachingModule) else None
            cached = [] if derived is None else _tensors(derived.tensors.values())
            own = (
                *module.parameters(recurse=False),
                *module.buffers(recurse=False),
                *_tensors(vars(module).values()),
            )
            for tensor in (part for held in (*own, *cached) for part in inner_tensors(held)):
                memory = tensor.untyped_storage()
                found[memory.data_ptr()] = memory.nbytes()
        return sum(found.values())

    def cache_state(self) -> tuple[object, ...] | None:
        """A value that changes with parameters, buffers and autocast; None if nothing may be cached."""
        # `torch.export` needs the computation itself.
        is_exporting = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
        if self.training or torch.is_grad_enabled() or is_exporting:
            return None
        sources = tuple(self._sources())
        # torch does not count changes of tensors made in inference mode.
        if any(source.is_inference() for source in sources) or not has_values(*sources):
            return None
        return (
            autocast_dtype(sources[0].device),
            *((source.data_ptr(), source._version, source.dtype) for source in sources),
        )

    def _sources(self) -> Iterator[Tensor]:
        """All tensors that results can be derived from."""
        for tensor in (*self.parameters(), *self.buffers()):
            yield from inner_tensors(tensor)

    def train(self: Self, mode: bool = True) -> Self:
        """As in ``nn.Module``; clears the cache."""
        self.clear_cache()
        return super().train(mode)

    def _apply(self: Self, fn: Any, recurse: bool = True) -> Self:
        self.clear_cache()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.clear_cache()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles start without a cache.
        return {**self.__dict__, "_derived": None}


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among values and tuples of values."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)
