"""Modules that keep tensors which they derive from their parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shared_embeddings.nn.tracing import autocast_dtype, has_values
from shared_embeddings.quant.packed_tensor import PackedTensor, inner_tensors

CachingSelf = TypeVar("CachingSelf", bound="CachingModule")


class CachingModule(nn.Module):
    """A module that can cache tensors derived from its parameters, in ``eval()`` without gradients.

    The cache is cleared on ``train()``, and when a parameter or buffer has been replaced or modified, also by
    ``load_state_dict`` or a move to another device or dtype. torch does not count changes through an alias
    such as ``parameter.data.add_(1)``: call `clear_cache` after those.

    Attributes:
        derived: the cached values by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clear_cache()

    def clear_cache(self) -> None:
        """Forget all cached values."""
        self.derived: dict[str, Any] = {}
        self._cached_state: list[object] | None = None
        # The parameters: otherwise a new tensor at the same address would look like an old one.
        self._sources: tuple[Tensor, ...] = ()

    def cached(self, name: str, make: Callable[[], Any]) -> Any:
        """Return `make()`, or its cached result for the same state of the parameters."""
        state = self.cache_state()
        if state is None:
            return make()
        *key, sources = state
        if self._cached_state != key:
            self.clear_cache()
            self._cached_state = key
            self._sources = tuple(source.detach() for source in sources)
        if name not in self.derived:
            self.derived[name] = make()
        return self.derived[name]

    def cache_state(self) -> tuple[Any, ...] | None:
        """Return values that change with parameters, buffers and autocast, and then these tensors.

        None to cache nothing.
        """
        # `torch.export` needs the computation itself.
        is_exporting = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
        if self.training or torch.is_grad_enabled() or is_exporting:
            return None
        tensors = (*self.parameters(), *self.buffers())
        sources = [source for tensor in tensors for source in inner_tensors(tensor)]
        # torch does not count changes of tensors made in inference mode.
        if any(source.is_inference() for source in sources) or not has_values(*sources):
            return None
        versions = [(source.data_ptr(), source._version, source.dtype) for source in sources]
        return autocast_dtype(sources[0].device), *versions, sources

    def train(self: CachingSelf, mode: bool = True) -> CachingSelf:
        self.clear_cache()
        if mode and any(isinstance(parameter, PackedTensor) for parameter in self.parameters()):
            # Python shows this once for each place of a program.
            warnings.warn(
                "the embedding is packed and frozen: to train it, load it with trainable=True", stacklevel=2
            )
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles start without a cache.
        return {**self.__dict__, "derived": {}, "_cached_state": None, "_sources": ()}
