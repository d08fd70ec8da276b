"""Registers the method of docs/adding_a_method.md; works as a pytest plugin (``-p``)."""

from __future__ import annotations

import sys
import types
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "adding_a_method.md"
SOURCE = DOCUMENT.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
MODULE = types.ModuleType("documented_method")
# Dataclasses look up their module there.
sys.modules[MODULE.__name__] = MODULE
exec(compile(SOURCE, str(DOCUMENT), "exec"), MODULE.__dict__)
