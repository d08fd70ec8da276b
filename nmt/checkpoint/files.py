"""Writing checkpoint files atomically, and reading and validating them without running code."""

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

from shared_embeddings.checkpoints.checksums import (
    KEY,
    is_verified,
    recorded_checksum,
    verified,
    with_checksum,
)
from shared_embeddings.checkpoints.tensors import (
    PartType,
    building,
    check_finite,
    check_parts,
    is_optimizer,
    is_state,
    is_words,
    loaded,
    mapped,
    unreadable,
)
from shared_embeddings.quant.storage import HEADER, StorageError, packing_of, unpack
from shared_embeddings.utils import files
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import UNREADABLE, can_be_created, first_line, replacing, save_tensors
from shared_embeddings.utils.options import OptionError

# Entry of a checkpoint with the checksum of the separate weights.
WEIGHTS = "weights_checksum"
# Entry with the subword files: bytes (n,) by option.
SUBWORDS = "subwords"


def _is_vocabulary(value: Any) -> bool:
    if not isinstance(value, dict) or not all(is_words(value.get(side)) for side in ("src", "tgt")):
        return False
    features = value.get("src_feats", [])
    return (
        isinstance(value.get("data_task"), str)
        and isinstance(value.get("decoder_start_token", ""), str)
        and isinstance(features, list)
        and all(map(is_words, features))
    )


def _is_optim(value: Any) -> bool:
    """Return whether a value is None, or has the form of the state of OpenNMT's optimizer."""
    if value is None:
        return True
    if not isinstance(value, dict):
        return False
    steps = (value.get("training_step"), value.get("decay_step", 1))
    inner = value.get("optimizer", [])
    return all(type(step) is int and step >= 0 for step in steps) and (
        all(map(is_optimizer, inner)) if isinstance(inner, list) else is_optimizer(inner)
    )


def _is_resume(value: Any) -> bool:
    """Whether a value is None or has the form of `nmt.train.training.gather_resume_state`."""
    if value is None:
        return True
    wanted = {"data", "random", "numpy", "torch", "early_stopping"}
    return isinstance(value, list) and all(
        isinstance(own, dict)
        and wanted <= own.keys()
        and isinstance(own["data"], dict)
        and {"workers", "last_worker"} <= own["data"].keys()
        and _is_stopping(own["early_stopping"])
        for own in value
    )


def _is_stopping(value: Any) -> bool:
    """Return whether a value is None, or has the form of the state of early stopping."""
    if value is None:
        return True
    numbers = ("stalled", "current", "status", "best_step")
    return (
        isinstance(value, dict)
        and all(type(value.get(name)) is int for name in numbers)
        and isinstance(value.get("best"), dict)
        and all(type(score) is float for score in value["best"].values())
    )


def _is_run(value: Any) -> bool:
    """Return whether a value is None, or has the form of a record of `nmt.train.runs.begin`."""
    settings = value.get("settings") if isinstance(value, dict) else None
    return value is None or (isinstance(settings, dict) and "train_from" in settings)


PARTS: dict[str, PartType] = {
    "opt": ("the options of a model", lambda value: isinstance(value, Namespace)),
    "vocab": ("the words of both sides", _is_vocabulary),
    "model": ("dense tensors by their names", is_state),
    "generator": ("dense tensors by their names", lambda value: value is None or is_state(value)),
    "optim": ("the state of an optimizer, or None", _is_optim),
    "resume": ("the state of every process, or None", _is_resume),
    "run": ("the settings of a run, or None", _is_run),
    SUBWORDS: ("bytes by the names of options", is_state),
}


def check_checkpoint(path: str, checkpoint: Any) -> None:
    """Check the structure of a checkpoint, and the checksum of separate weights.

    Args:
        path: ``NAME.pt``.
        checkpoint: content of the file.
    """
    if not isinstance(checkpoint, dict):
        raise UserError(
            f"checkpoint {path}: contains a {type(checkpoint).__name__}, not a model; use one written by "
            "onmt_train"
        )
    missing = [part for part in ("opt", "vocab") if part not in checkpoint]
    if missing:
        raise UserError(
            f"checkpoint {path}: it has no {' and no '.join(missing)}; use one written by onmt_train"
        )
    check_parts(checkpoint, PARTS, f"checkpoint {path}")
    if "model" not in checkpoint:
        _check_set(path, checkpoint.get(WEIGHTS))


def _check_set(path: str, wanted: object) -> None:
    """Raise `UserError` unless separate weights have the checksum in the checkpoint; reads headers only."""
    from safetensors import SafetensorError

    for file in safetensors_of(path):
        try:
            found = recorded_checksum(file)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"checkpoint {file}: cannot be read ({error}); it is truncated or damaged"
            ) from error
        if found != wanted and is_verified():
            raise UserError(
                f"checkpoint {path}: {file} has the weights of another checkpoint; use an earlier step, or "
                "both files of the same step"
            )


def safetensors_of(path: str) -> list[str]:
    """Return the safetensors files of a checkpoint ``NAME.pt``.

    They are ``NAME.safetensors``, or the shards ``NAME.00.safetensors``, ... of a converted model.

    Raises:
        UserError: there are none.
    """
    base = path.removesuffix(".pt")
    if os.path.isfile(f"{base}.safetensors"):
        return [f"{base}.safetensors"]
    beside = glob.glob(f"{glob.escape(base)}.*.safetensors")
    # Only numbers: NAME.small.safetensors belongs to another checkpoint, NAME.small.pt.
    found = sorted(name for name in beside if name.split(".")[-2].isdecimal())
    if not found:
        raise UserError(f"checkpoint {path}: its weights are missing; put {base}.safetensors next to it")
    return found


# Prefix of the tensors of the output layer, which checkpoints store separately.
_GENERATOR = "generator."


def check_output(option: str, path: str | os.PathLike[str]) -> None:
    """Check that an output file can be written; creates nothing.

    Args:
        option: name of the option, for messages.
        path: output file.
    """
    if Path(path).is_dir():
        raise UserError(f"{option}: {path} is a folder; choose a file")
    if not can_be_created(path):
        raise UserError(
            f"{option}: the folder {Path(path).parent} cannot be created or written to; choose another one"
        )


def remove_leftovers(save_model: str) -> None:
    """Remove temporary files of processes that were killed while saving checkpoints of a run.

    Args:
        save_model: the option of ``onmt_train``: prefix of the checkpoints.
    """
    start = Path(save_model)
    remains = start.parent.glob(f".{glob.escape(start.name)}_step_*.tmp")
    named = (re.match(r"\.(.+\.(?:pt|safetensors))\.", file.name) for file in remains)
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
def checkpoint_errors(path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Convert errors due to an inconsistent checkpoint to `UserError`, also of a model too large for it.

    Args:
        path: the checkpoint, if any.

    Raises:
        UserError: names the checkpoint and the mismatch.
    """
    if not path:
        yield
        return
    try:
        with building(*_stored(path)):
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


def _stored(path: str | os.PathLike[str]) -> tuple[int, int]:
    name = os.fspath(path)
    checkpoint = peek(name)
    if "model" in checkpoint:
        return len(checkpoint["model"]) + len(checkpoint.get("generator") or ()), os.path.getsize(name)
    from safetensors import safe_open

    files, tensors = safetensors_of(name), 0
    for file in files:
        with safe_open(file, "pt") as opened:
            tensors += len(opened.keys())
    return tensors, sum(map(os.path.getsize, files))


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and verify a checkpoint without running code from it.

    Raises:
        UserError: the file is missing, truncated, damaged or unsupported, or does not match its separate
            weights.
    """
    name = os.fspath(path)
    with reading_checkpoint(name):
        checkpoint = loaded(name)
        check_checkpoint(name, checkpoint)
        return with_unpacked_tensors(name, verified(checkpoint, f"checkpoint {name}"), unpack)


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


def with_unpacked_tensors(
    path: str, checkpoint: dict[str, Any], opened: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> dict[str, Any]:
    """Unpack the weights of a checkpoint, or keep them packed; ``packing`` is their storage format.

    Args:
        path: the checkpoint, for messages.
        checkpoint: its content.
        opened: what becomes of packed weights, see `shared_embeddings.quant.storage`.

    Raises:
        UserError: tensors are not finite.
        shared_embeddings.quant.storage.StorageError: the storage format is unknown.
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
