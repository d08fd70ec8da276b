"""Checkpoints: written atomically, read and validated without running code, averaged and released."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nmt.embeddings import shared_embeddings_of, unique_state
from shared_embeddings import checkpoints
from shared_embeddings.compress.distillation import OPTION
from shared_embeddings.quant.storage import HEADER, Packing, StorageError, packed_as, packing_of, unpack
from shared_embeddings.registry import get_method_config
from shared_embeddings.utils import files
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import OptionError
from shared_embeddings.utils.path_options import can_be_created

# Entry of a checkpoint with the checksum of the separate weights.
WEIGHTS = "weights_checksum"
# Entry with the subword files: bytes (n,) by option.
SUBWORDS = "subwords"


def _is_vocabulary(value: Any) -> bool:
    if not isinstance(value, dict) or not all(
        checkpoints.is_words(value.get(side)) for side in ("src", "tgt")
    ):
        return False
    features = value.get("src_feats", [])
    return (
        isinstance(value.get("data_task"), str)
        and isinstance(value.get("decoder_start_token", ""), str)
        and isinstance(features, list)
        and all(map(checkpoints.is_words, features))
    )


def _is_optim(value: Any) -> bool:
    """Return whether a value has the form of the state of OpenNMT's optimizer."""
    if not isinstance(value, dict):
        return False
    steps = (value.get("training_step"), value.get("decay_step", 1))
    inner = value.get("optimizer", [])
    return all(type(step) is int and step >= 0 for step in steps) and all(
        map(checkpoints.is_optimizer, inner if isinstance(inner, list) else [inner])
    )


def _is_resume(value: Any) -> bool:
    """Return whether a value has the form of `nmt.train.training.gather_resume_state`."""
    wanted = {"data", "random", "numpy", "torch", "early_stopping"}
    return isinstance(value, list) and all(
        isinstance(own, dict)
        and wanted <= own.keys()
        and isinstance(own["data"], dict)
        and {"workers", "last_worker"} <= own["data"].keys()
        and (own["early_stopping"] is None or _is_stopping(own["early_stopping"]))
        for own in value
    )


def _is_stopping(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(type(value.get(name)) is int for name in ("stalled", "current", "status", "best_step"))
        and isinstance(value.get("best"), dict)
        and all(type(score) is float for score in value["best"].values())
    )


def _is_run(value: Any) -> bool:
    """Return whether a value has the form of a record of `nmt.train.runs.begin`."""
    settings = value.get("settings") if isinstance(value, dict) else None
    return isinstance(settings, dict) and "train_from" in settings


PARTS: dict[str, checkpoints.PartType] = {
    "opt": ("the options of a model", lambda value: isinstance(value, Namespace)),
    "vocab": ("the words of both sides", _is_vocabulary),
    "model": ("dense tensors by their names", checkpoints.is_state),
    "generator": ("dense tensors by their names", lambda value: value is None or checkpoints.is_state(value)),
    "optim": ("the state of an optimizer, or None", lambda value: value is None or _is_optim(value)),
    "resume": ("the state of every process, or None", lambda value: value is None or _is_resume(value)),
    "run": ("the settings of a run, or None", lambda value: value is None or _is_run(value)),
    # What `average_decay` replaces by averages in "model".
    "trained": (
        "dense tensors by their names, or None",
        lambda value: value is None or checkpoints.is_state(value),
    ),
    SUBWORDS: ("bytes by the names of options", checkpoints.is_state),
}


def check_checkpoint(path: str, checkpoint: Any) -> None:
    """Check the structure of a checkpoint ``NAME.pt``, and the checksum of separate weights."""
    if not isinstance(checkpoint, dict) or not {"opt", "vocab"} <= checkpoint.keys():
        lacking = (
            ("opt", "vocab") if not isinstance(checkpoint, dict) else {"opt", "vocab"} - checkpoint.keys()
        )
        raise UserError(
            f"checkpoint {path}: has no {' and no '.join(sorted(lacking))}; use one written by onmt_train"
        )
    checkpoints.check_parts(checkpoint, PARTS, f"checkpoint {path}")
    for file in [] if "model" in checkpoint else safetensors_of(path):
        try:
            found = checkpoints.recorded_checksum(file)  # reads the header only
        except (SafetensorError, OSError) as error:
            raise UserError(f"checkpoint {file}: is truncated or damaged ({error})") from error
        if found != checkpoint.get(WEIGHTS) and checkpoints.is_verified():
            raise UserError(
                f"checkpoint {path}: {file} has the weights of another checkpoint; use an earlier step, or "
                "both files of the same step"
            )


def safetensors_of(path: str) -> list[str]:
    """Return the safetensors files of a checkpoint ``NAME.pt``.

    They are ``NAME.safetensors``, or the shards ``NAME.00.safetensors``, ... of a converted model.
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
    """Check that the output file of an option can be written; creates nothing."""
    if Path(path).is_dir():
        raise UserError(f"{option}: {path} is a folder; choose a file")
    if not can_be_created(path):
        raise UserError(
            f"{option}: the folder {Path(path).parent} cannot be created or written to; choose another"
        )


def remove_leftovers(save_model: str) -> None:
    """Remove temporary files of processes that were killed while saving checkpoints of a run."""
    start = Path(save_model)
    remains = start.parent.glob(f".{glob.escape(start.name)}_step_*.tmp")
    named = (re.match(r"\.(.+\.(?:pt|safetensors))\.", file.name) for file in remains)
    files.remove_leftovers(*sorted({start.with_name(found[1]) for found in named if found}))


def save_checkpoint(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint with its checksum atomically."""
    with files.replacing(Path(path)) as temporary:
        files.save_tensors(checkpoints.with_checksum(checkpoint), temporary)


def allow_checkpoint_types() -> None:
    """Allow ``torch.load(weights_only=True)`` to read the options in checkpoints."""
    torch.serialization.add_safe_globals([Namespace])


@contextlib.contextmanager
def reading_checkpoint(path: str) -> Iterator[None]:
    """Convert errors while reading a checkpoint to `UserError`."""
    if not os.path.isfile(path):
        raise UserError(f"checkpoint {path}: no such file; check the path")
    allow_checkpoint_types()
    try:
        yield
    except StorageError as error:
        raise UserError(f"checkpoint {path}: {error}") from error
    except UserError:
        raise
    except files.UNREADABLE as error:
        raise checkpoints.unreadable(f"checkpoint {path}", error, "OpenNMT-py") from error


@contextlib.contextmanager
def checkpoint_errors(path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Convert errors due to an inconsistent checkpoint to `UserError`, also of a model too large for it."""
    if not path:
        yield
        return
    name = os.fspath(path)
    checkpoint = peek(name)
    if "model" in checkpoint:
        paths = [name]
        count = len(checkpoint["model"]) + len(checkpoint.get("generator") or ())
    else:
        paths, count = safetensors_of(name), 0
        for file in paths:
            with safe_open(file, "pt") as opened:
                count += len(opened.keys())
    try:
        with checkpoints.building(count, sum(map(os.path.getsize, paths))):
            yield
    except (torch.OutOfMemoryError, OSError):
        raise
    except (UserError, OptionError) as error:
        if os.fspath(path) in str(error):
            raise
        raise UserError(f"checkpoint {path}: {error}") from error
    except (*files.UNREADABLE, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"checkpoint {path}: its parts are inconsistent ({type(error).__name__}: "
            f"{files.first_line(error)}); use another checkpoint"
        ) from error


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and verify a checkpoint without running code from it."""
    name = os.fspath(path)
    with reading_checkpoint(name):
        checkpoint = checkpoints.loaded(name)
        check_checkpoint(name, checkpoint)
        return with_unpacked_tensors(name, checkpoints.verified(checkpoint, f"checkpoint {name}"), unpack)


def peek(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint without loading or verifying its tensors."""
    name = os.fspath(path)
    with reading_checkpoint(name):
        checkpoint = checkpoints.mapped(name)
        check_checkpoint(name, checkpoint)
        return checkpoint  # type: ignore[no-any-return]


def check_ensemble(paths: Sequence[str]) -> None:
    """Check that the predictions of several models can be averaged: translators with the same words."""
    found = [peek(path) for path in paths]
    first = found[0]
    for path, other in zip(paths, found, strict=True):
        if getattr(other["opt"], "model_task", "seq2seq") == "lm":
            raise UserError(
                f"models: {path} is a language model, which cannot be in an ensemble; use it alone"
            )
        differing = [side for side in ("src", "tgt") if first["vocab"].get(side) != other["vocab"].get(side)]
        if differing:
            raise UserError(
                f"models: {path} has another {differing[0]} vocabulary than {paths[0]}; an ensemble needs "
                "models with the same vocabularies"
            )
        if getattr(first["opt"], "copy_attn", False) != getattr(other["opt"], "copy_attn", False):
            raise UserError(
                f"models: only one of {paths[0]} and {path} has copy_attn: true; an ensemble needs models "
                "that agree in it"
            )


def verify_checkpoint(path: str) -> None:
    """Compare a checkpoint with its checksum."""
    checkpoint = peek(path)
    with reading_checkpoint(path):
        checkpoints.verified(checkpoint, f"checkpoint {path}")


def with_unpacked_tensors(
    path: str, checkpoint: dict[str, Any], opened: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> dict[str, Any]:
    """Unpack the weights of a checkpoint, or keep them packed; ``packing`` is their storage format.

    `opened` is what becomes of packed weights, `unpack` or `hold` of `shared_embeddings.quant.storage`.
    """
    checkpoint = {name: value for name, value in checkpoint.items() if name != checkpoints.KEY}
    if "model" not in checkpoint:
        return checkpoint
    stored = joined_generator(checkpoint["model"], checkpoint.get("generator"))
    state = opened(stored)
    checkpoints.check_finite(state, f"checkpoint {path}")
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


def subword_files_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the subword files to copy from a checkpoint to one derived from it."""
    return {SUBWORDS: checkpoint[SUBWORDS]} if SUBWORDS in checkpoint else {}


def read_safetensors(
    path: str, opened: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint ``NAME.pt`` saved with ``save_format: safetensors``; see above."""
    stored: dict[str, Tensor] = {}
    for file in safetensors_of(path):
        stored.update(checkpoints.load_safetensors(file, f"checkpoint {file}"))
    try:
        state = opened(stored)
    except StorageError as error:
        raise UserError(f"checkpoint {file}: {error}") from error
    checkpoints.check_finite(state, f"checkpoint {file}")
    return state


def packing_of_checkpoint(path: str, checkpoint: dict[str, Any]) -> Packing | None:
    """Return the storage format of the weights of a checkpoint ``NAME.pt``, None for plain tensors."""
    if "model" in checkpoint:
        return checkpoint.get("packing")
    header = {}
    for file in safetensors_of(path):
        with safe_open(file, "pt") as opened:
            if HEADER in opened.keys():
                header[HEADER] = opened.get_tensor(HEADER)
    return packing_of(header)


def read_weights(path: str) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Return a checkpoint and the two parts of its weights, in any format."""
    checkpoint = read_checkpoint(path)
    if "model" in checkpoint:
        return checkpoint, checkpoint["model"], checkpoint.get("generator") or {}
    return checkpoint, *split_generator(read_safetensors(path, unpack))


def intact_steps(save_model: str | os.PathLike[str]) -> list[int]:
    """Return the steps with intact checkpoints in ascending order.

    Checks the structure of the ``.pt`` file and, with ``save_format: safetensors``, the checksum that links
    it to the weights. Tensors are verified when a checkpoint is loaded.
    """
    start = Path(save_model)
    found = {}
    for path in start.parent.glob(f"{glob.escape(start.name)}_step_*.pt"):
        step = path.name.removeprefix(f"{start.name}_step_").removesuffix(".pt")
        if step.isdecimal():
            found[int(step)] = path
    return [step for step in sorted(found) if is_intact(found[step])]


def is_intact(path: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint ``NAME.pt`` is intact, see `intact_steps`."""
    try:
        peek(path)
    except UserError:
        return False
    return True


def check_finite(model: nn.Module, step: int, loss: float = 0.0) -> None:
    """Check that a model, which is equal on all ranks, can still be trained after a step with a mean loss."""
    if not math.isfinite(loss):
        what = f"the loss is {loss}"
    elif any(not bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
        what = "a parameter is not finite"
    else:
        return
    raise UserError(
        f"{what} at step {step}; earlier checkpoints are unchanged; lower learning_rate or max_grad_norm and "
        "train with another save_model, optionally with train_from"
    )


def write_step(
    model: nn.Module, saved: dict[str, Any], base: str, save_format: str
) -> tuple[str, str | None]:
    """Write the checkpoint of one step; returns its file, and the separate file of its weights, if any.

    `saved` has the other parts of the checkpoint (options, vocabulary, …); `base` is a path without suffix.
    """
    # Models with shared embeddings have each tied tensor once.
    state = unique_state(model) if shared_embeddings_of(model) else model.state_dict()
    if save_format == "safetensors":
        return write_with_safetensors(state, saved, base)
    body, head = split_generator(state)
    save_checkpoint({"model": body, "generator": head, **saved}, f"{base}.pt")
    return f"{base}.pt", None


def write_with_safetensors(weights: dict[str, Tensor], saved: dict[str, Any], base: str) -> tuple[str, str]:
    """Write a checkpoint and the safetensors of its weights, all or nothing; returns both files.

    The checkpoint has the checksum of its weights and is renamed last: if the process is killed in between,
    an older checkpoint does not fit the new weights and is rejected. The weights include those of the
    generator under ``generator.``.
    """
    seen: set[int] = set()
    distinct = {}  # each storage once, as the safetensors format requires
    for name, tensor in weights.items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            distinct[name] = tensor.contiguous()
    pair = f"{base}.pt", f"{base}.safetensors"
    with files.staged([Path(file) for file in pair]) as (checkpoint, separate):
        checksum = checkpoints.save_safetensors(distinct, separate)
        files.save_tensors(checkpoints.with_checksum({**saved, WEIGHTS: checksum}), checkpoint)
        shutil.copymode(checkpoint, separate)  # safetensors restricts permissions to the owner
    return pair


def average_checkpoints(paths: list[str], fp32: bool = False) -> dict[str, Any]:
    """Average the floating-point tensors of checkpoints of one model.

    Integer tensors, such as the filter ids of ALONE, must be equal. Embeddings are stored in the default
    storage of their method, such as fp16 for `quantized`, or with `fp32` in float32.
    """
    result: dict[str, Any] = {}
    for path in paths:
        checkpoint, body, head = read_weights(path)
        state = joined_generator(body, head)
        if not result:
            opt = without_teacher(checkpoint["opt"])
            result = {"vocab": checkpoint["vocab"], "opt": opt, "optim": None, **subword_files_of(checkpoint)}
            kinds = {name: torch.float32 if fp32 else tensor.dtype for name, tensor in state.items()}
            sums = {name: t.double() if t.is_floating_point() else t for name, t in state.items()}
            continue
        if checkpoint["vocab"] != result["vocab"]:
            raise UserError(
                f"{path}: its vocabulary differs from {paths[0]}; average checkpoints of one model"
            )
        _add(sums, state, path, paths[0])
    means = {
        name: (t / len(paths)).to(kinds[name]) if t.is_floating_point() else t for name, t in sums.items()
    }
    packing = None if fp32 else _default_packing(result["opt"])
    result["model"], result["generator"] = split_generator(packed_as(means, packing))
    return result


# The tensors of each embedding in a checkpoint, by the option that sets it.
_LOOKUPS = [f"{stack}.embeddings.make_embedding.emb_luts" for stack in ("encoder", "decoder")]
_TENSORS_OF = {
    "embedding": _LOOKUPS,
    "src_embedding": _LOOKUPS[:1],
    "tgt_embedding": _LOOKUPS[1:],
    "output_embedding": ["generator"],
}


def _default_packing(opt: Namespace) -> Packing | None:
    """Return how the embeddings of a model are stored by default; None if all are stored in fp32."""
    names, stores = [], []
    for option, own in _TENSORS_OF.items():
        settings = getattr(opt, option, None)
        store = get_method_config(settings["method"]).default_store if settings else "fp32"
        if store != "fp32":
            names += own
            stores.append(store)
    return Packing(names, stores[0]) if stores else None


def _add(total: dict[str, Tensor], state: dict[str, Tensor], path: str, first: str) -> None:
    odd = sorted(total.keys() ^ state.keys())
    if odd:
        raise UserError(
            f"{path}: differs from {first} (only one of them has {odd[0]}); average checkpoints of one model"
        )
    for name, tensor in state.items():
        if total[name].shape != tensor.shape:
            raise UserError(
                f"{path}: {name} is {tuple(tensor.shape)}, in {first} {tuple(total[name].shape)}; "
                "average checkpoints of one model"
            )
        if tensor.is_floating_point():
            total[name] += tensor
        elif not torch.equal(total[name], tensor):
            raise UserError(f"{path}: {name} differs from {first}; average checkpoints of one training run")


def strip_checkpoint(path: str) -> dict[str, Any]:
    """Return a checkpoint with only what translation needs; its weights stay packed."""
    checkpoint, body, head = read_weights(path)
    packing = packing_of_checkpoint(path, checkpoint)
    body, head = split_generator(packed_as(joined_generator(body, head), packing))
    kept = {
        name: value
        for name, value in checkpoint.items()
        if name not in ("optim", "resume", "run", "trained", "model", "generator", "packing", WEIGHTS)
    }
    opt = without_teacher(checkpoint["opt"])
    return {"model": body, "generator": head, **kept, "opt": opt, "optim": None}


def without_teacher(options: Namespace) -> Namespace:
    """Return the options of a model without its teacher."""
    return Namespace(**{**vars(options), OPTION: None}) if hasattr(options, OPTION) else options
