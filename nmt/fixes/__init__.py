"""Faults of OpenNMT-py 3.5.1 that are fixed, and how its functions are replaced.

The decorators below register a function to take the place of one of OpenNMT-py; the docstring of the function
says why. `nmt.hooks` has the seams for shared embeddings, and applies everything.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

New = TypeVar("New")

# The function that makes the new attribute from the original one, by the owner and the name of the attribute.
_PATCHES: dict[tuple[Any, str], Callable[[Any], Any]] = {}
_APPLIED: set[tuple[Any, str]] = set()
_LOCK = threading.RLock()


def wrap(name: str, *places: Any) -> Callable[[New], New]:
    """Call the decorated function in place of one of OpenNMT-py, with the original as its first argument.

    `places` are the classes or modules that have it; modules of OpenNMT-py that import it are patched, too.
    """

    def register(new: Any) -> Any:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                return new(original, *args, **kwargs)

            return wrapped

        _PATCHES.update({(place, name): make for place in places})
        return new

    return register


def replace(name: str, *places: Any) -> Callable[[New], New]:
    """Put the decorated function or class in place of one of OpenNMT-py; see `wrap`."""

    def register(new: Any) -> Any:
        _PATCHES.update({(place, name): lambda original: new for place in places})
        return new

    return register


def apply_registered() -> None:
    """Apply all fixes of this folder, and the patches registered elsewhere so far; each is applied once.

    When it returns they are in place, also if another thread began to apply them.
    """
    with _LOCK:
        for module in pkgutil.iter_modules(__path__):
            importlib.import_module(f"{__name__}.{module.name}")
        for (place, name), make in _PATCHES.items():
            if (place, name) in _APPLIED:
                continue
            _APPLIED.add((place, name))
            original = getattr(place, name)
            # A copy, since other threads may import modules.
            importing = [module for key, module in list(sys.modules.items()) if key.startswith("onmt")]
            patched = make(original)
            for owner in (place, *(module for module in importing if vars(module).get(name) is original)):
                setattr(owner, name, patched)
