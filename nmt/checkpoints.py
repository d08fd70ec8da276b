"""Checkpoints of OpenNMT-py: read without running code, written atomically, averaged and released."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from shared_embeddings import checkpoints
from shared_embeddings.compress.distillation import OPTION
from shared_embeddings.quant.storage import HEADER, Packing, packed_as, packing_of, unpack
from shared_embeddings.registry import get_method_config
from shared_embeddings.utils import files
from shared_embeddings.utils.errors import UserError, first_line

# Entry of a checkpoint with the checksum of the separate weights.
WEIGHTS = "weights_checksum"
# Entry with the subword files: bytes (n,) by option.
SUBWORDS = "subwords"
# Prefix of the tensors of the output layer, which checkpoints store separately.
_GENERATOR = "generator."
# Packed tensors of a checkpoint to what is read: `unpack` or `hold` of `shared_embeddings.quant.storage`.
Opener = Callable[[dict[str, Tensor]], dict[str, Tensor]]


# Reading


@contextlib.contextmanager
def checkpoint_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert the errors of a file that is no checkpoint, or is damaged, to `UserError`."""
    if not os.path.isfile(path):
        raise UserError(f"checkpoint {path}: no such file; check the path")
    try:
        yield
    except UserError as error:
        raise error if os.fspath(path) in str(error) else UserError(f"checkpoint {path}: {error}") from error
    except Exception as error:
        raise UserError(
            f"checkpoint {path}: cannot be read ({type(error).__name__}: {first_line(error)}); it is "
            "damaged, or not a checkpoint of OpenNMT-py; use another one"
        ) from error


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a checkpoint ``NAME.pt``, whose embeddings may be packed; see `open_weights`.

    With ``save_format: safetensors``, the weights are in separate files, see `read_safetensors`.
    """
    with checkpoint_errors(path):
        checkpoint = checkpoints.load_tensors(path, f"checkpoint {path}")
        check_weights(os.fspath(path), checkpoint)
    return {name: value for name, value in checkpoint.items() if name != checkpoints.KEY}


def check_weights(path: str, checkpoint: Mapping[str, Any]) -> None:
    """Check that a checkpoint has a model, or belongs to the separate weights next to it."""
    if not {"opt", "vocab"} <= checkpoint.keys():
        raise UserError(f"checkpoint {path}: has no opt and vocab; use one written by onmt_train")
    for file in [] if "model" in checkpoint else safetensors_of(path):
        if checkpoints.recorded_checksum(file) != checkpoint.get(WEIGHTS):
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
    shards = sorted(name for name in beside if name.split(".")[-2].isdecimal())
    if not shards:
        raise UserError(f"checkpoint {path}: its weights are missing; put {base}.safetensors next to it")
    return shards


def open_weights(checkpoint: dict[str, Any], opener: Opener) -> dict[str, Any]:
    """Return a checkpoint with opened weights; ``packing`` is the storage format of packed ones."""
    stored = join_generator(checkpoint.get("model", {}), checkpoint.get("generator"))
    if HEADER not in stored:
        return checkpoint
    body, head = split_generator(opener(stored))
    return {**checkpoint, "model": body, "generator": head, "packing": packing_of(stored)}


def read_safetensors(path: str, opener: Opener) -> dict[str, Tensor]:
    """Return the weights of a checkpoint ``NAME.pt`` saved with ``save_format: safetensors``."""
    stored: dict[str, Tensor] = {}
    for file in safetensors_of(path):
        stored.update(checkpoints.load_tensors(file, f"checkpoint {file}"))
    with checkpoint_errors(path):
        return opener(stored)


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
    """Return a checkpoint and the two parts of its weights, unpacked, in any format."""
    checkpoint = read_checkpoint(path)
    if "model" not in checkpoint:
        return checkpoint, *split_generator(read_safetensors(path, unpack))
    with checkpoint_errors(path):
        checkpoint = open_weights(checkpoint, unpack)
    return checkpoint, checkpoint["model"], checkpoint.get("generator") or {}


def split_generator(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split the tensors of a model into those of the body and those of the generator, without its prefix."""
    body = {name: tensor for name, tensor in state.items() if not name.startswith(_GENERATOR)}
    return body, {name.removeprefix(_GENERATOR): state[name] for name in state if name not in body}


def join_generator(body: dict[str, Tensor], head: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """Join the two parts of `split_generator`."""
    return {**body, **{f"{_GENERATOR}{name}": tensor for name, tensor in (head or {}).items()}}


# Writing


def diverged(step: int, reason: str) -> UserError:
    """Return the error of a training that has diverged."""
    return UserError(
        f"{reason} at step {step}; earlier checkpoints are unchanged; lower learning_rate or max_grad_norm "
        "and train with another save_model, optionally with train_from"
    )


def save_checkpoint(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint with its checksum atomically."""
    with files.replacing(path) as temporary, temporary.open("wb") as file:
        torch.save(checkpoints.with_checksum(checkpoint), file)


def write_model(
    weights: Mapping[str, Tensor], saved: dict[str, Any], path: str, save_format: str
) -> tuple[str, str | None]:
    """Write a checkpoint; returns `path`, which ends in ``.pt``, and the file of separate weights, if any.

    `saved` has its other parts (options, vocabulary, …). Separate weights come first, and the checkpoint has
    their checksum: if the process is killed in between, an older checkpoint is rejected.
    """
    if save_format != "safetensors":
        body, head = split_generator(weights)
        save_checkpoint({"model": body, "generator": head, **saved}, path)
        return path, None
    base = path.removesuffix(".pt")
    seen: set[int] = set()
    distinct = {}  # each storage once, as the safetensors format requires
    for name, tensor in weights.items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            distinct[name] = tensor.contiguous()
    with files.replacing(Path(f"{base}.safetensors")) as temporary:
        checksum = checkpoints.save_safetensors(distinct, temporary)
    save_checkpoint({**saved, WEIGHTS: checksum}, path)
    return path, f"{base}.safetensors"


def step_files(save_model: str) -> dict[Path, int]:
    """Return the files of the checkpoints of a run with their steps, in ascending order."""
    start = Path(save_model)
    pattern = re.compile(rf"{re.escape(start.name)}_step_(\d+)(\.pt|(\.\d+)?\.safetensors)")
    matches = ((path, pattern.fullmatch(path.name)) for path in start.parent.glob("*"))
    steps = {path: int(match[1]) for path, match in matches if match}
    return dict(sorted(steps.items(), key=lambda file: file[1]))


# Averaging and releasing


def average_checkpoints(paths: list[str], fp32: bool = False) -> dict[str, Any]:
    """Average the floating-point tensors of checkpoints of one model.

    Integer tensors, such as the filter ids of ALONE, must be equal. Embeddings are stored in the default
    storage of their method, such as fp16 for `quantized`, or with `fp32` in float32.
    """
    result: dict[str, Any] = {}
    sums: dict[str, Tensor] = {}
    for path in paths:
        checkpoint, body, head = read_weights(path)
        state = join_generator(body, head)
        if not result:
            result = released(checkpoint)
            dtypes = {name: torch.float32 if fp32 else tensor.dtype for name, tensor in state.items()}
            sums = {name: t.double() if t.is_floating_point() else t for name, t in state.items()}
            continue
        shapes, others = ({name: t.shape for name, t in part.items()} for part in (sums, state))
        if checkpoint["vocab"] != result["vocab"] or shapes != others:
            raise UserError(f"{path}: is of another model than {paths[0]}; average checkpoints of one model")
        for name, tensor in state.items():
            if tensor.is_floating_point():
                sums[name] += tensor
            elif not torch.equal(sums[name], tensor):
                raise UserError(f"{path}: {name} differs from {paths[0]}; average checkpoints of one run")
    means = {
        name: (t / len(paths)).to(dtypes[name]) if t.is_floating_point() else t for name, t in sums.items()
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
    for option, prefixes in _TENSORS_OF.items():
        settings = getattr(opt, option, None)
        store = get_method_config(settings["method"]).default_store if settings else "fp32"
        if store != "fp32":
            names += prefixes
            stores.append(store)
    return Packing(names, stores[0]) if stores else None


def strip_checkpoint(path: str) -> dict[str, Any]:
    """Return a checkpoint with only what translation needs; its weights stay packed."""
    checkpoint, body, head = read_weights(path)
    packing = packing_of_checkpoint(path, checkpoint)
    body, head = split_generator(packed_as(join_generator(body, head), packing))
    return {"model": body, "generator": head, **released(checkpoint)}


def released(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a checkpoint that translation needs, except its weights."""
    opt = Namespace(**vars(checkpoint["opt"]))
    if hasattr(opt, OPTION):  # its teacher is not needed any more
        setattr(opt, OPTION, None)
    subwords = {SUBWORDS: checkpoint[SUBWORDS]} if SUBWORDS in checkpoint else {}
    return {"vocab": checkpoint["vocab"], "opt": opt, "optim": None, **subwords}
