"""Writing checkpoint files atomically, and reading them without running code."""

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

# Prefix of the tensors of the output layer, which checkpoints store separately.
_GENERATOR = "generator."


def check_output(option: str, path: str | os.PathLike[str]) -> None:
    """Check that an output file can be written, and create its folder.

    Args:
        option: name of the option, for messages.
        path: output file.

    Raises:
        UserError: it is a folder, or its folder cannot be created or written to.
    """
    folder = Path(path).parent
    if Path(path).is_dir():
        raise UserError(f"{option}: {path} is a folder; choose a file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{option}: the folder {folder} cannot be created ({error.strerror}); choose another one"
        ) from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"{option}: the folder {folder} cannot be written to; choose another one")


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
    """Write a checkpoint with its checksum atomically."""
    with replacing(Path(path)) as temporary:
        save_tensors(with_checksum(checkpoint), temporary)


def allow_checkpoint_types() -> None:
    """Allow ``torch.load(weights_only=True)`` to read the options in checkpoints."""
    torch.serialization.add_safe_globals([Namespace])


@contextlib.contextmanager
def reading_checkpoint(path: str) -> Iterator[None]:
    """Convert errors while reading a checkpoint to `UserError`.

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
    """Convert errors due to an inconsistent checkpoint to `UserError`.

    Args:
        path: the checkpoint, if any.

    Raises:
        UserError: names the checkpoint and the mismatch.
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
            f"checkpoint {path}: its parts are inconsistent ({type(error).__name__}: "
            f"{first_line(error)}); use another checkpoint"
        ) from error


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and verify a checkpoint without running code from it.

    Raises:
        UserError: the file is missing, truncated, damaged or unsupported, or does not match its separate
            weights.
    """
    name = os.fspath(path)
    with reading_checkpoint(name):
        checkpoint = torch.load(name, map_location="cpu", weights_only=True)
        check_checkpoint(name, checkpoint)
        return with_opened_tensors(name, verified(checkpoint, f"checkpoint {name}"), unpack)


def peek(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint without loading or verifying its tensors.

    Raises:
        UserError: see `read_checkpoint`.
    """
    name = os.fspath(path)
    with reading_checkpoint(name):
        checkpoint = mapped(name)
        check_checkpoint(name, checkpoint)
        return checkpoint  # type: ignore[no-any-return]


def verify_checkpoint(path: str) -> None:
    """Verify a checkpoint.

    Raises:
        UserError: as `read_checkpoint`.
    """
    checkpoint = peek(path)
    with reading_checkpoint(path):
        verified(checkpoint, f"checkpoint {path}")


def with_opened_tensors(
    path: str, checkpoint: dict[str, Any], opened: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> dict[str, Any]:
    """Unpack the weights of a checkpoint, or keep them packed; ``packing`` is their storage format.

    Args:
        path: the checkpoint, for messages.
        checkpoint: its content.
        opened: what becomes of packed weights, see `shared_embeddings.checkpoints.storage`.

    Raises:
        UserError: tensors are not finite.
        shared_embeddings.checkpoints.storage.StorageError: the storage format is unknown.
    """
    checkpoint = {name: value for name, value in checkpoint.items() if name != KEY}
    if "model" not in checkpoint:
        return checkpoint
    stored = joined_generator(checkpoint["model"], checkpoint.get("generator"))
    state = opened(stored)
    check_finite(state, f"checkpoint {path}")
    if HEADER not in stored:
        return checkpoint
    body, head = split_generator(state)
    return {**checkpoint, "model": body, "generator": head, "packing": packing_of(stored)}


def split_generator(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split the tensors of a model into those of the body and those of the generator, without its prefix."""
    body = {name: tensor for name, tensor in state.items() if not name.startswith(_GENERATOR)}
    return body, {name.removeprefix(_GENERATOR): state[name] for name in state if name not in body}


def joined_generator(body: dict[str, Tensor], head: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """Join the two parts of `split_generator`."""
    return {**body, **{f"{_GENERATOR}{name}": tensor for name, tensor in (head or {}).items()}}
