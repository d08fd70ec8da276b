"""How one attribute of OpenNMT-py is patched."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple


class Wrap(NamedTuple):
    """Wrap a function of OpenNMT-py.

    Attributes:
        owner: module or class that has the function.
        name: its name there.
        wrapper: called with the original function, returns the new one.
    """

    owner: Any
    name: str
    wrapper: Callable[[Any], Any]

    def apply(self) -> None:
        """Apply the patch."""
        original = getattr(self.owner, self.name)
        _replace(self.owner, self.name, functools.wraps(original)(self.wrapper(original)))


class Replace(NamedTuple):
    """Replace a function or class of OpenNMT-py.

    Attributes:
        owner: module or class that has it.
        name: its name there.
        new: what takes its place.
    """

    owner: Any
    name: str
    new: Any

    def apply(self) -> None:
        """Apply the patch."""
        _replace(self.owner, self.name, self.new)


def _replace(owner: Any, name: str, new: Any) -> None:
    """Replace an attribute, for a module also in the modules of OpenNMT-py that have imported it by name."""
    original = getattr(owner, name)
    setattr(owner, name, new)
    if isinstance(owner, ModuleType):
        for place, module in list(sys.modules.items()):
            if place.startswith("onmt") and module.__dict__.get(name) is original:
                setattr(module, name, new)
