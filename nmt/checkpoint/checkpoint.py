"""Checkpoints: written all at once with each tied tensor once, read without running code, averaged,
described.
"""

from __future__ import annotations

import glob
import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nmt.checkpoint.files import (
    joined_generator,
    peek,
    read_checkpoint,
    save_checkpoint,
    split_generator,
)
from nmt.checkpoint.parts import WEIGHTS, safetensors_of
from nmt.data.transforms import kept_files
from nmt.model.embeddings import load_unique_state, shared_embeddings_of, unique_state
from shared_embeddings.checkpoints.checksums import load_safetensors, save_safetensors, with_checksum
from shared_embeddings.checkpoints.storage import HEADER, Packing, StorageError, packed_as, packing_of, unpack
from shared_embeddings.checkpoints.tensors import check_finite
from shared_embeddings.errors import UserError
from shared_embeddings.fitting.distillation import OPTION
from shared_embeddings.utils.files import replacing_all, save_tensors


def split_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the state of a model in the two parts of OpenNMT's checkpoints: the model, and its generator.

    A model with shared embeddings is stored with each tied tensor once; any other as upstream stores it.
    """
    state = unique_state(model) if shared_embeddings_of(model) else model.state_dict()
    return split_generator(state)


def load_weights(model: nn.Module, body: dict[str, Tensor], head: dict[str, Tensor] | None) -> None:
    """Load the two parts of a checkpoint into a model with shared embeddings.

    Raises:
        UserError: the parts do not fit the model.
    """
    load_unique_state(model, joined_generator(body, head))


def read_safetensors(path: str) -> dict[str, Tensor]:
    """Return all tensors that belong to a checkpoint ``NAME.pt`` saved with ``save_format: safetensors``.

    Raises:
        UserError: a file is missing or damaged.
    """
    tensors: dict[str, Tensor] = {}
    for file in safetensors_of(path):
        tensors.update(load_safetensors(file, f"checkpoint {file}"))
    try:
        plain = unpack(tensors)
    except StorageError as error:
        raise UserError(f"checkpoint {file}: {error}") from error
    check_finite(plain, f"checkpoint {file}")
    return plain


def packing_of_checkpoint(path: str, checkpoint: dict[str, Any]) -> Packing | None:
    """Return how the weights of a checkpoint that was read are stored, ``None`` where they are plain.

    Args:
        path: ``NAME.pt``, beside which the weights may lie.
        checkpoint: what was read from there.
    """
    from safetensors import safe_open

    if "model" in checkpoint:
        return checkpoint.get("packing")
    header = {}
    for file in safetensors_of(path):
        with safe_open(file, "pt") as opened:
            if HEADER in opened.keys():
                header[HEADER] = opened.get_tensor(HEADER)
    return packing_of(header)


def read_weights(path: str) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Return a checkpoint and the two parts of its weights, in whichever format they are.

    Raises:
        UserError: a file is missing or damaged.
    """
    checkpoint = read_checkpoint(path)
    if "model" in checkpoint:
        return checkpoint, checkpoint["model"], checkpoint.get("generator") or {}
    return checkpoint, *split_generator(read_safetensors(path))


def whole_steps(save_model: str | os.PathLike[str]) -> list[int]:
    """Return the steps whose checkpoints are complete and whole, in ascending order.

    A step is whole when its ``.pt`` has the parts of a checkpoint and, with ``save_format: safetensors``, the
    weights beside it are its own. Tensors are not read, so this takes milliseconds a step; a byte of a tensor
    that changed is found when the step is loaded.

    Args:
        save_model: the option of ``onmt_train``: checkpoints are ``{save_model}_step_N.pt``.
    """
    start = Path(save_model)
    found = {}
    for path in start.parent.glob(f"{glob.escape(start.name)}_step_*.pt"):
        step = path.name.removeprefix(f"{start.name}_step_").removesuffix(".pt")
        if step.isdecimal():
            found[int(step)] = path
    return [step for step in sorted(found) if is_whole(found[step])]


def is_whole(path: str | os.PathLike[str]) -> bool:
    """Say whether a checkpoint ``NAME.pt`` is complete and whole, see `whole_steps`."""
    try:
        peek(path)
    except UserError:
        return False
    return True


def write_step(
    model: nn.Module, saved: dict[str, Any], base: str, save_format: str
) -> tuple[str, str | None]:
    """Write the checkpoint of one step; returns its file, and the file of its weights where they are apart.

    Args:
        model: its weights are saved.
        saved: everything else that the checkpoint holds (options, vocabulary, optimiser, …).
        base: path without ending.
        save_format: ``pytorch`` or ``safetensors``.
    """
    body, head = split_state(model)
    if save_format == "pytorch":
        save_checkpoint({"model": body, "generator": head, **saved}, f"{base}.pt")
        return f"{base}.pt", None
    return write_apart(joined_generator(body, head), saved, base)


def write_apart(weights: dict[str, Tensor], saved: dict[str, Any], base: str) -> tuple[str, str]:
    """Write a checkpoint and the safetensors of its weights as one set; returns both files.

    Args:
        weights: of the model, those of its generator under ``generator.``.
        saved: everything else that the checkpoint holds.
        base: path without ending.

    Raises:
        OSError: one of them cannot be written; neither is there then.
    """
    target = Path(base)
    pair = [target.with_name(f"{target.name}.pt"), target.with_name(f"{target.name}.safetensors")]
    with replacing_all(pair) as (checkpoint, tensors):
        checksum = save_safetensors(_without_aliases(weights), tensors)
        save_tensors(with_checksum({**saved, WEIGHTS: checksum}), checkpoint)
        shutil.copymode(checkpoint, tensors)  # safetensors writes for the owner alone
    return str(pair[0]), str(pair[1])


def _without_aliases(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors, each storage once, as the safetensors format wants them."""
    seen: set[int] = set()
    distinct = {}
    for name, tensor in weights.items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            distinct[name] = tensor.contiguous()
    return distinct


def average_checkpoints(paths: list[str], fp32: bool = False) -> dict[str, Any]:
    """Return a checkpoint whose floating-point tensors are the means over several checkpoints of one model.

    Integer tensors (such as the filter ids of ALONE) must be equal in all of them.

    Args:
        paths: read one after the other.
        fp32: store the means in single precision.

    Raises:
        UserError: the checkpoints hold different tensors, or are of different vocabularies.
    """
    result: dict[str, Any] = {}
    sums: list[dict[str, Tensor]] = []
    for path in paths:
        checkpoint, *parts = read_weights(path)
        if not result:
            opt = without_teacher(checkpoint["opt"])
            result = {"vocab": checkpoint["vocab"], "opt": opt, "optim": None, **kept_files(checkpoint)}
            sums = [{name: _as_sum(tensor) for name, tensor in part.items()} for part in parts]
            kinds = [{name: tensor.dtype for name, tensor in part.items()} for part in parts]
            continue
        if checkpoint["vocab"] != result["vocab"]:
            raise UserError(f"{path}: has another vocabulary than {paths[0]}; average one model's own")
        for total, part in zip(sums, parts, strict=True):
            _add_part(total, part, path, paths[0])
    for key, total, dtypes in zip(("model", "generator"), sums, kinds, strict=True):
        result[key] = {name: _mean(total[name], len(paths), fp32, dtypes[name]) for name in total}
    return result


def _as_sum(tensor: Tensor) -> Tensor:
    """Return a tensor that can be added to without loss."""
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def _add_part(total: dict[str, Tensor], part: dict[str, Tensor], path: str, first: str) -> None:
    """Add the tensors of one checkpoint to the sums.

    Raises:
        UserError: names or shapes differ, or integers do.
    """
    if total.keys() != part.keys():
        odd = sorted(total.keys() ^ part.keys())[0]
        raise UserError(
            f"{path}: is another model than {first} (only one of them has {odd}); average one model's own"
        )
    for name, tensor in part.items():
        if total[name].shape != tensor.shape:
            raise UserError(
                f"{path}: {name} is {tuple(tensor.shape)}, in {first} {tuple(total[name].shape)}; "
                "average checkpoints of one model"
            )
        if tensor.is_floating_point():
            total[name] += tensor
        elif not torch.equal(total[name], tensor):
            raise UserError(f"{path}: {name} differs from {first}; average checkpoints of one training run")


def _mean(total: Tensor, number: int, fp32: bool, dtype: torch.dtype) -> Tensor:
    """Return the mean of a sum in the wanted precision."""
    if not total.is_floating_point():
        return total
    return (total / number).to(torch.float32 if fp32 else dtype)


def strip_checkpoint(path: str) -> dict[str, Any]:
    """Return a checkpoint with what translation needs only: no optimiser, no position in the data.

    Its weights are packed as they were.
    """
    checkpoint, body, head = read_weights(path)
    packing = packing_of_checkpoint(path, checkpoint)
    body, head = split_generator(packed_as(joined_generator(body, head), packing))
    kept = {
        name: value
        for name, value in checkpoint.items()
        if name not in ("optim", "resume", "run", "model", "generator", "packing", WEIGHTS)
    }
    opt = without_teacher(checkpoint["opt"])
    return {"model": body, "generator": head, **kept, "opt": opt, "optim": None}


def without_teacher(options: Namespace) -> Namespace:
    """Return the options of a model without the teacher that it learned from, which it can do without."""
    return Namespace(**{**vars(options), OPTION: None}) if hasattr(options, OPTION) else options
