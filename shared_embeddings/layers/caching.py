"""Keeping what is derived from parameters in inference, and never for longer than it is true."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

Self = TypeVar("Self", bound="CachingModule")


class _Derived(NamedTuple):
    """Tensors derived from the parameters, and the state of the parameters that they were derived from."""

    state: tuple[object, ...]
    # Holding the sources keeps their memory from a newer tensor, which would look like the old one there.
    sources: tuple[Tensor, ...]
    tensors: dict[str, Any]


class CachingModule(nn.Module):
    """A module that can keep what it derives from its parameters in ``eval()`` without gradients.

    What is kept is forgotten as soon as a parameter or buffer is replaced or written to, on ``train()``, on
    ``load_state_dict``, and on a move to another device or type. Only writes through an alias like
    ``parameter.data.add_(1)`` stay unseen, since torch does not count them: call `clear_cache` after those.
    """

    def __init__(self) -> None:
        super().__init__()
        self._derived: _Derived | None = None

    def clear_cache(self) -> None:
        """Forget what was derived from the parameters."""
        self._derived = None

    def cached(self, name: str, make: Callable[[], Any]) -> Any:
        """`make()`, or what it gave before in the same state of the parameters."""
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

    def cache_state(self) -> tuple[object, ...] | None:
        """What changes whenever a parameter, a buffer or autocast does; None where nothing may be kept."""
        if self.training or torch.is_grad_enabled():
            return None
        sources = tuple(self._sources())
        # Of tensors made in inference mode, torch does not track changes.
        if any(source.is_inference() for source in sources):
            return None
        kind = sources[0].device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return (autocast, *((source.data_ptr(), source._version, source.dtype) for source in sources))

    def _sources(self) -> Iterator[Tensor]:
        """All tensors that something can be derived from."""
        yield from self.parameters()
        yield from self.buffers()

    def train(self: Self, mode: bool = True) -> Self:
        """As in ``nn.Module``; forgets what was derived."""
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
