"""The parts of a checkpoint of OpenNMT-py, their types, and which weights belong beside it."""

from __future__ import annotations

import glob
import os
from argparse import Namespace
from typing import Any

from shared_embeddings.checkpoints.checksums import is_verified, recorded_checksum
from shared_embeddings.checkpoints.tensors import PartType, check_parts, is_optimizer, is_state, is_words
from shared_embeddings.errors import UserError

# The entry of a checkpoint with the checksum of the weights beside it.
WEIGHTS = "weights_checksum"
# That with the files of subwords, each as bytes (n,) under the name of its option.
SUBWORDS = "subwords"


def _is_vocabulary(value: Any) -> bool:
    """Return whether a value has the form of the vocabularies of both sides."""
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
    """Check the structure of a checkpoint, and that the weights beside it are its own.

    Args:
        path: ``NAME.pt``.
        checkpoint: what was read from there.

    Raises:
        UserError: a part is missing or malformed, or the weights are those of another checkpoint.
    """
    if not isinstance(checkpoint, dict):
        raise UserError(
            f"checkpoint {path}: holds a {type(checkpoint).__name__} and not the parts of a model; use one "
            "that onmt_train wrote"
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
    """Raise `UserError` unless the weights beside a checkpoint have the checksum that it names.

    Only the headers of the files are read.
    """
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
                f"checkpoint {path}: {file} holds the weights of another checkpoint, as after a run that was "
                "stopped while it saved; take an earlier step, or put the two files of one step together"
            )


def safetensors_of(path: str) -> list[str]:
    """Return the safetensors files that belong to a checkpoint ``NAME.pt``: ``NAME.safetensors``, or else the
    shards ``NAME.00.safetensors``, ``NAME.01.safetensors``, … of a converted model.

    Raises:
        UserError: there is none.
    """
    base = path.removesuffix(".pt")
    if os.path.isfile(f"{base}.safetensors"):
        return [f"{base}.safetensors"]
    beside = glob.glob(f"{glob.escape(base)}.*.safetensors")
    # Only numbers: NAME.small.safetensors belongs to another checkpoint, NAME.small.pt.
    found = sorted(name for name in beside if name.split(".")[-2].isdecimal())
    if not found:
        raise UserError(f"checkpoint {path}: its weights are missing; put {base}.safetensors beside it")
    return found
