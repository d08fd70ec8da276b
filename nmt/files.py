"""Writing files so that an interruption never leaves half of one, and reading checkpoints without running
code.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmt.errors import UserError
from shared_embeddings.files import UNREADABLE, first_line, save_tensors
from shared_embeddings.storage import HEADER, StorageError, packing_of, unpack

# OpenNMT's checkpoints have the tensors of the output layer, whose names begin so, apart from the others.
_GENERATOR = "generator."


def check_output(option: str, path: str | os.PathLike[str]) -> None:
    """Refuse a file that could not be written, before the work whose result goes there; makes its folder.

    Args:
        option: the name of the option, for messages.
        path: of the file.

    Raises:
        UserError: it is a folder, or its own folder cannot be made or written to.
    """
    folder = Path(path).parent
    if Path(path).is_dir():
        raise UserError(f"{option}: {path} is a folder; name a file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{option}: the folder {folder} cannot be made ({error.strerror}); name another one"
        ) from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"{option}: the folder {folder} cannot be written to; name another one")


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


def clear_remains(save_model: str) -> None:
    """Take away what processes that were killed while they saved have left beside the checkpoints of a run.

    Args:
        save_model: the option of ``onmt_train``, which the names of its checkpoints begin with.
    """
    start = Path(save_model)
    for workspace in start.parent.glob(f".{glob.escape(start.name)}_step_*.*.????????"):
        shutil.rmtree(workspace, ignore_errors=True)


def save_checkpoint(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint with ``torch.save``, all at once."""
    write_atomically(path, lambda name: save_tensors(checkpoint, name))


def allow_checkpoint_types() -> None:
    """Let ``torch.load(weights_only=True)`` read the options that OpenNMT keeps in its checkpoints."""
    torch.serialization.add_safe_globals([Namespace])


@contextlib.contextmanager
def reading_checkpoint(path: str) -> Iterator[None]:
    """Turn whatever goes wrong while a checkpoint is read into one line about its file.

    Raises:
        UserError: the file is missing, cut short, or not a checkpoint of OpenNMT-py.
    """
    if not os.path.isfile(path):
        raise UserError(f"checkpoint {path}: no such file; check the path")
    allow_checkpoint_types()
    try:
        yield
    except StorageError as error:
        raise UserError(f"checkpoint {path}: {error}") from error
    except UNREADABLE as error:
        raise UserError(
            f"checkpoint {path}: cannot be read ({first_line(error)}); it is cut short, or not a model "
            "that OpenNMT-py wrote; take another one"
        ) from error


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read an OpenNMT checkpoint without running code from it.

    Raises:
        UserError: the file is missing, cut short, or not a checkpoint of OpenNMT-py.
    """
    name = os.fspath(path)
    with reading_checkpoint(name):
        checkpoint = torch.load(name, map_location="cpu", weights_only=True)
        missing = {"opt", "vocab"} - set(checkpoint)
        if missing:
            raise ValueError(f"it has no {' and no '.join(sorted(missing))}")
        return with_plain_tensors(checkpoint)


def with_plain_tensors(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint whose model's tensors are plain ones; ``packing`` says how they were stored, where
    they were not.

    Raises:
        shared_embeddings.storage.StorageError: in a way that this program does not know.
    """
    if HEADER not in checkpoint.get("model", {}):
        return dict(checkpoint)
    stored = joined_generator(checkpoint["model"], checkpoint.get("generator"))
    body, head = split_generator(unpack(stored))
    return {**checkpoint, "model": body, "generator": head, "packing": packing_of(stored)}


def split_generator(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a model without its generator's, and the generator's under their own names."""
    body = {name: tensor for name, tensor in state.items() if not name.startswith(_GENERATOR)}
    return body, {name.removeprefix(_GENERATOR): state[name] for name in state if name not in body}


def joined_generator(body: dict[str, Tensor], head: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """Return all tensors of a model from the two parts of `split_generator`."""
    return {**body, **{f"{_GENERATOR}{name}": tensor for name, tensor in (head or {}).items()}}
