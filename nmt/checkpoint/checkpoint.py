"""Reading, writing and averaging checkpoints."""

from __future__ import annotations

import glob
import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nmt.checkpoint.files import (
    WEIGHTS,
    joined_generator,
    peek,
    read_checkpoint,
    safetensors_of,
    save_checkpoint,
    split_generator,
)
from nmt.data.transforms import subword_files_of
from nmt.model.embeddings import load_unique_state, shared_embeddings_of, unique_state
from shared_embeddings.checkpoints.checksums import load_safetensors, save_safetensors, with_checksum
from shared_embeddings.checkpoints.tensors import check_finite
from shared_embeddings.compress.distillation import OPTION
from shared_embeddings.quant.storage import HEADER, Packing, StorageError, packed_as, packing_of, unpack
from shared_embeddings.registry import options
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import save_tensors, staged


def split_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the state of a model as the two parts of a checkpoint: model and generator.

    Models with shared embeddings have each tied tensor once.
    """
    state = unique_state(model) if shared_embeddings_of(model) else model.state_dict()
    return split_generator(state)


def load_weights(model: nn.Module, body: dict[str, Tensor], head: dict[str, Tensor] | None) -> None:
    """Load the two parts of a checkpoint into a model with shared embeddings.

    Raises:
        UserError: the parts do not fit the model.
    """
    load_unique_state(model, joined_generator(body, head))


def read_safetensors(
    path: str, opened: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint ``NAME.pt`` saved with ``save_format: safetensors``.

    Args:
        path: the checkpoint.
        opened: what becomes of packed weights, see `shared_embeddings.quant.storage`.

    Raises:
        UserError: a file is missing or damaged.
    """
    tensors: dict[str, Tensor] = {}
    for file in safetensors_of(path):
        tensors.update(load_safetensors(file, f"checkpoint {file}"))
    try:
        state = opened(tensors)
    except StorageError as error:
        raise UserError(f"checkpoint {file}: {error}") from error
    check_finite(state, f"checkpoint {file}")
    return state


def packing_of_checkpoint(path: str, checkpoint: dict[str, Any]) -> Packing | None:
    """Return the storage format of the weights of a checkpoint, None for plain tensors.

    Args:
        path: ``NAME.pt``; the weights may be in a file next to it.
        checkpoint: its content.
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
    """Return a checkpoint and the two parts of its weights, in any format.

    Raises:
        UserError: a file is missing or damaged.
    """
    checkpoint = read_checkpoint(path)
    if "model" in checkpoint:
        return checkpoint, checkpoint["model"], checkpoint.get("generator") or {}
    return checkpoint, *split_generator(read_safetensors(path, unpack))


def intact_steps(save_model: str | os.PathLike[str]) -> list[int]:
    """Return the steps with intact checkpoints in ascending order.

    Checks the structure of the ``.pt`` file and, with ``save_format: safetensors``, the checksum that links
    it to the weights. Tensors are verified when a checkpoint is loaded.

    Args:
        save_model: the option of ``onmt_train``: checkpoints are ``{save_model}_step_N.pt``.
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


def write_step(
    model: nn.Module, saved: dict[str, Any], base: str, save_format: str
) -> tuple[str, str | None]:
    """Write the checkpoint of one step; returns its file, and the separate file of its weights, if any.

    Args:
        model: the model.
        saved: the other parts of the checkpoint (options, vocabulary, optimizer, …).
        base: path without suffix.
        save_format: ``pytorch`` or ``safetensors``.
    """
    body, head = split_state(model)
    if save_format == "pytorch":
        save_checkpoint({"model": body, "generator": head, **saved}, f"{base}.pt")
        return f"{base}.pt", None
    return write_with_safetensors(joined_generator(body, head), saved, base)


def write_with_safetensors(weights: dict[str, Tensor], saved: dict[str, Any], base: str) -> tuple[str, str]:
    """Write a checkpoint and the safetensors of its weights; returns both files.

    The checkpoint has the checksum of its weights and is renamed last: if the process is killed in between,
    an older checkpoint does not fit the new weights and is rejected.

    Args:
        weights: weights of the model, including those of its generator under ``generator.``.
        saved: the other parts of the checkpoint.
        base: path without suffix.

    Raises:
        OSError: a file cannot be written; none is created.
    """
    target = Path(base)
    pair = [target.with_name(f"{target.name}.pt"), target.with_name(f"{target.name}.safetensors")]
    with staged(pair) as (checkpoint, tensors):
        checksum = save_safetensors(_without_aliases(weights), tensors)
        save_tensors(with_checksum({**saved, WEIGHTS: checksum}), checkpoint)
        shutil.copymode(checkpoint, tensors)  # safetensors restricts permissions to the owner
    return str(pair[0]), str(pair[1])


def _without_aliases(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors, each storage once, as the safetensors format requires."""
    seen: set[int] = set()
    distinct = {}
    for name, tensor in weights.items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            distinct[name] = tensor.contiguous()
    return distinct


def average_checkpoints(paths: list[str], fp32: bool = False) -> dict[str, Any]:
    """Average the floating-point tensors of checkpoints of one model.

    Integer tensors, such as the filter ids of ALONE, must be equal. Embeddings are stored in the default
    storage of their method, such as fp16 for `quantized`.

    Args:
        paths: the checkpoints.
        fp32: store all means in float32.

    Raises:
        UserError: the checkpoints have different tensors or vocabularies.
    """
    result: dict[str, Any] = {}
    sums: list[dict[str, Tensor]] = []
    for path in paths:
        checkpoint, *parts = read_weights(path)
        if not result:
            opt = without_teacher(checkpoint["opt"])
            result = {"vocab": checkpoint["vocab"], "opt": opt, "optim": None, **subword_files_of(checkpoint)}
            sums = [{name: _as_sum(tensor) for name, tensor in part.items()} for part in parts]
            kinds = [{name: tensor.dtype for name, tensor in part.items()} for part in parts]
            continue
        if checkpoint["vocab"] != result["vocab"]:
            raise UserError(
                f"{path}: its vocabulary differs from {paths[0]}; average checkpoints of one model"
            )
        for total, part in zip(sums, parts, strict=True):
            _add_part(total, part, path, paths[0])
    for key, total, dtypes in zip(("model", "generator"), sums, kinds, strict=True):
        result[key] = {name: _mean(total[name], len(paths), fp32, dtypes[name]) for name in total}
    packing = None if fp32 else _default_packing(result["opt"])
    state = packed_as(joined_generator(result["model"], result["generator"]), packing)
    result["model"], result["generator"] = split_generator(state)
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
    for option, tensors in _TENSORS_OF.items():
        settings = getattr(opt, option, None)
        store = options(settings["method"]).default_store if settings else "fp32"
        if store != "fp32":
            names += tensors
            stores.append(store)
    return Packing(names, stores[0]) if stores else None


def _as_sum(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def _add_part(total: dict[str, Tensor], part: dict[str, Tensor], path: str, first: str) -> None:
    if total.keys() != part.keys():
        odd = sorted(total.keys() ^ part.keys())[0]
        raise UserError(
            f"{path}: differs from {first} (only one of them has {odd}); average checkpoints of one model"
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
    if not total.is_floating_point():
        return total
    return (total / number).to(torch.float32 if fp32 else dtype)


def strip_checkpoint(path: str) -> dict[str, Any]:
    """Return a checkpoint with only what translation needs; its weights stay packed."""
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
    """Return the options of a model without its teacher."""
    return Namespace(**{**vars(options), OPTION: None}) if hasattr(options, OPTION) else options
