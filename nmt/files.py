"""Writing files so that an interruption never leaves half of one, and reading checkpoints without running
code.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nmt.errors import UserError


def write_atomically(path: str | os.PathLike[str], write: Callable[[str], None]) -> None:
    """Call ``write`` with a temporary name beside ``path``, then rename it to ``path``.

    Args:
        path: a file or a directory that appears only when it is complete.
        write: creates the file or directory of the name that it is given.

    Raises:
        OSError: the directory cannot be written to.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    workspace = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        fresh = os.path.join(workspace, target.name)
        write(fresh)
        if target.is_dir() and os.path.isdir(fresh):
            target.rename(os.path.join(workspace, "previous"))
        os.replace(fresh, target)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def save_checkpoint(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint with ``torch.save``, all at once."""
    write_atomically(path, lambda name: torch.save(checkpoint, name))


def allow_checkpoint_types() -> None:
    """Let ``torch.load(weights_only=True)`` read the options that OpenNMT keeps in its checkpoints."""
    torch.serialization.add_safe_globals([Namespace])


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read an OpenNMT checkpoint without running code from it.

    Raises:
        UserError: the file is missing, cut short, or not a checkpoint of OpenNMT-py.
    """
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise UserError(f"checkpoint {name}: no such file; check the path")
    allow_checkpoint_types()
    try:
        checkpoint = torch.load(name, map_location="cpu", weights_only=True)
    except (
        RuntimeError,
        EOFError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
        KeyError,
        ValueError,
        OSError,
    ) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"checkpoint {name}: cannot be read ({reason[:160]}); it is cut short, or not a file that "
            "OpenNMT-py "
            "wrote; take another one"
        ) from error
    wanted = {"opt", "vocab"}
    if (
        not isinstance(checkpoint, dict)
        or not wanted <= set(checkpoint)
        or not hasattr(checkpoint["opt"], "__dict__")
    ):
        raise UserError(
            f"checkpoint {name}: is not a translation model of OpenNMT-py (it has no options or vocabulary)"
        )
    return checkpoint
