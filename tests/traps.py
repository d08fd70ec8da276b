"""Texts and values that leave a mark where something runs them as code."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


class Trap:
    """Texts and values that leave a mark where they are run."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / "mark"
        (folder / "planted.py").write_text(
            f"import pathlib\npathlib.Path({str(self.mark)!r}).touch()\nf = print\n"
        )
        # To importlib.metadata it is an installed package.
        (folder / "planted-1.0.dist-info").mkdir()
        (folder / "planted-1.0.dist-info" / "METADATA").write_text("Name: planted\nVersion: 1.0\n")
        self.shell = f"$(touch {self.mark})"
        # For a shell as well, where it stands between quotation marks.
        self.python = f"__import__('pathlib').Path({str(self.mark)!r}).touch() or {{'mode': '{self.shell}'}}"
        self.yaml = f"!!python/object/apply:os.mkdir [{str(self.mark)!r}]"
        self.module = "planted.f"
        self.texts = (self.python, self.yaml, self.shell, self.module, "planted")
        self.bomb = Bomb(self.mark)
