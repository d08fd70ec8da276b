"""How one attribute of OpenNMT is replaced."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple


def around(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Put in place what ``make`` returns for the original; it goes by the name of the original."""
    return lambda original: functools.wraps(original)(make(original))


def instead(new: Any) -> Callable[[Any], Any]:
    """Put ``new`` in place."""
    return lambda original: new


class Seam(NamedTuple):
    """One attribute of OpenNMT that is replaced.

    Attributes:
        owner: the module or class that has it.
        name: of the attribute.
        how: returns for the original what goes there.
        why: in a few words.
        is_imported: also replaced in the modules that have imported it by name.
    """

    owner: Any
    name: str
    how: Callable[[Any], Any]
    why: str
    is_imported: bool = False

    def put_in_place(self) -> None:
        """Replace the attribute where it is, and where it is imported by name."""
        original = getattr(self.owner, self.name)
        new = self.how(original)
        setattr(self.owner, self.name, new)
        if self.is_imported:
            for module in _importing(self.name, original):
                setattr(module, self.name, new)


def _importing(name: str, original: Any) -> list[Any]:
    """Return the loaded modules of OpenNMT that have ``original`` under its name."""
    return [
        module
        for place, module in list(sys.modules.items())
        if place.startswith("onmt") and module.__dict__.get(name) is original
    ]
