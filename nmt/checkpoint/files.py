"""Writing files so that an interruption never leaves half of one, and reading checkpoints without running
code.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nmt.checkpoint.parts import check_checkpoint
from shared_embeddings.checkpoints.checksums import KEY, verified, with_checksum
from shared_embeddings.checkpoints.storage import HEADER, StorageError, packing_of, unpack
from shared_embeddings.checkpoints.tensors import check_finite, mapped, unreadable
from shared_embeddings.errors import UserError
from shared_embeddings.options import OptionError
from shared_embeddings.utils import files
from shared_embeddings.utils.files import UNREADABLE, first_line, replacing, save_tensors

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
    with replacing(Path(path)) as temporary:
        write(str(temporary))


def remove_leftovers(save_model: str) -> None:
    """Take away what processes that were killed while they saved have left beside the checkpoints of a run.

    A step of which only one file was in place is rolled back.

    Args:
        save_model: the option of ``onmt_train``, which the names of its checkpoints begin with.
    """
    start = Path(save_model)
    remains = start.parent.glob(f".{glob.escape(start.name)}_step_*.tmp")
    named = (re.match(r"\.(.+\.(?:pt|safetensors))\.", file.name) for file in remains)
    # A set is named after its .pt, which comes first.
    files.remove_leftovers(*sorted({start.with_name(found[1]) for found in named if found}))


def save_checkpoint(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint with its checksum, all at once."""
    write_atomically(path, lambda name: save_tensors(with_checksum(checkpoint), name))


def allow_checkpoint_types() -> None:
    """Let ``torch.load(weights_only=True)`` read the options that OpenNMT keeps in its checkpoints."""
    torch.serialization.add_safe_globals([Namespace])


@contextlib.contextmanager
def reading_checkpoint(path: str) -> Iterator[None]:
    """Turn whatever goes wrong while a checkpoint is read into one line about its file.

    Raises:
        UserError: the file is missing, truncated, or not a checkpoint of OpenNMT-py.
    """
    if not os.path.isfile(path):
        raise UserError(f"checkpoint {path}: no such file; check the path")
    allow_checkpoint_types()
    try:
        yield
    except StorageError as error:
        raise UserError(f"checkpoint {path}: {error}") from error
    except UserError:
        raise
    except UNREADABLE as error:
        raise unreadable(f"checkpoint {path}", error, "OpenNMT-py") from error


@contextlib.contextmanager
def building_from(path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Turn what a checkpoint that does not fit itself makes OpenNMT or torch raise into one line about it.

    Args:
        path: of the checkpoint; where there is none, nothing changes.

    Raises:
        UserError: names the checkpoint, and what did not fit.
    """
    if not path:
        yield
        return
    try:
        yield
    except (torch.OutOfMemoryError, OSError):
        raise
    except (UserError, OptionError) as error:
        if os.fspath(path) in str(error):
            raise
        raise UserError(f"checkpoint {path}: {error}") from error
    except (*UNREADABLE, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"checkpoint {path}: its parts do not fit each other ({type(error).__name__}: "
            f"{first_line(error)}); take another checkpoint"
        ) from error


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read an OpenNMT checkpoint without running code from it, and verify it.

    Raises:
        UserError: the file is missing, truncated, damaged, not a checkpoint of OpenNMT-py, or of another run
            than the weights beside it.
    """
    name = os.fspath(path)
    with reading_checkpoint(name):
        checkpoint = torch.load(name, map_location="cpu", weights_only=True)
        check_checkpoint(name, checkpoint)
        return with_plain_tensors(name, verified(checkpoint, f"checkpoint {name}"))


def peek(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a checkpoint as it is stored, without reading or verifying its tensors.

    Raises:
        UserError: as `read_checkpoint`, but for changed tensors.
    """
    name = os.fspath(path)
    with reading_checkpoint(name):
        checkpoint = mapped(name)
        check_checkpoint(name, checkpoint)
        return checkpoint  # type: ignore[no-any-return]


def verify_checkpoint(path: str) -> None:
    """Check a checkpoint that another function is going to read.

    Raises:
        UserError: as `read_checkpoint`.
    """
    checkpoint = peek(path)
    with reading_checkpoint(path):
        verified(checkpoint, f"checkpoint {path}")


def with_plain_tensors(path: str, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint whose model's tensors are plain ones; ``packing`` says how they were stored, where
    they were not.

    Args:
        path: of the checkpoint, for messages.
        checkpoint: as it was read.

    Raises:
        UserError: tensors hold numbers that are not finite.
        shared_embeddings.checkpoints.storage.StorageError: they are stored in an unknown format.
    """
    checkpoint = {name: value for name, value in checkpoint.items() if name != KEY}
    if "model" not in checkpoint:
        return checkpoint
    stored = joined_generator(checkpoint["model"], checkpoint.get("generator"))
    plain = unpack(stored)
    check_finite(plain, f"checkpoint {path}")
    if HEADER not in stored:
        return checkpoint
    body, head = split_generator(plain)
    return {**checkpoint, "model": body, "generator": head, "packing": packing_of(stored)}


def split_generator(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a model without its generator's, and the generator's under their own names."""
    body = {name: tensor for name, tensor in state.items() if not name.startswith(_GENERATOR)}
    return body, {name.removeprefix(_GENERATOR): state[name] for name in state if name not in body}


def joined_generator(body: dict[str, Tensor], head: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """Return all tensors of a model from the two parts of `split_generator`."""
    return {**body, **{f"{_GENERATOR}{name}": tensor for name, tensor in (head or {}).items()}}
