"""Parts common to the checkpoints of all hosts: identifying a file, reading it, and checking it."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from shared_embeddings.checkpoints.checksums import is_verified
from shared_embeddings.quant.packed_tensor import PackedTensor
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import check_archive, first_line

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# The type of a part of a checkpoint: its description for messages, and a test.
PartType = tuple[str, Callable[[Any], bool]]

# Elementwise optimizer states.
_PER_NUMBER = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg")
# The first bytes of ``torch.save``'s format before torch 1.6, which is not a zip archive.
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
# Tensors are checked in parts of this many values.
_VALUES_AT_ONCE = 2**22
# The maximum number of bytes of a pickle that `contains_strings` searches, and the size of its blocks.
_SEARCHED_BYTES, _BLOCK = 2**26, 2**20
_NOT_AN_ARCHIVE = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, ValueError, EOFError)


def contains_strings(path: Path, *texts: str) -> bool:
    """Whether a file of ``torch.save`` contains all given strings, such as the keys of a checkpoint.

    Searches its pickle up to a fixed size, without unpickling or reading tensors.
    """
    if not path.is_file():
        return False
    missing = {b"X" + len(text).to_bytes(4, "little") + text.encode() for text in texts}
    longest = max(map(len, missing))
    with contextlib.suppress(OSError, *_NOT_AN_ARCHIVE), contextlib.ExitStack() as opened:
        file: IO[bytes] = opened.enter_context(path.open("rb"))
        if zipfile.is_zipfile(path):
            archive = opened.enter_context(zipfile.ZipFile(path))
            pickles = [name for name in archive.namelist() if name.endswith("data.pkl")]
            if not pickles:
                return False
            file = opened.enter_context(archive.open(pickles[0]))
        elif file.read(len(_LEGACY_MAGIC)) != _LEGACY_MAGIC:
            return False
        last = b""
        for _ in range(_SEARCHED_BYTES // _BLOCK):
            block = file.read(_BLOCK)
            missing = {text for text in missing if text not in last + block}
            if not missing or not block:
                return not missing
            last = block[-longest:]
    return False


def mapped(path: str | os.PathLike[str]) -> Any:
    """The content of a file of ``torch.save`` with memory-mapped tensors, read on first use.

    Raises:
        shared_embeddings.utils.files.UNREADABLE: it is missing or truncated, or contains other objects.
    """
    # The format before torch 1.6 cannot be mapped.
    can_be_mapped = zipfile.is_zipfile(path)
    check_archive(path)
    return torch.load(os.fspath(path), map_location="cpu", weights_only=True, mmap=can_be_mapped)


def loaded(path: str | os.PathLike[str]) -> Any:
    """The content of a file of ``torch.save`` with tensors in memory.

    Raises:
        shared_embeddings.utils.files.UNREADABLE: see `mapped`.
    """
    check_archive(path)
    return torch.load(os.fspath(path), map_location="cpu", weights_only=True)


def unreadable(name: str, error: BaseException, program: str) -> UserError:
    """The error for a file `name` of a `program` that ``torch.load`` cannot read."""
    # torch's message for a pickle that may contain code recommends running it.
    has_code = isinstance(error, pickle.UnpicklingError)
    reason = "damaged, or it could run code" if has_code else first_line(error)
    return UserError(
        f"{name}: cannot be read ({reason}); it is truncated, or not a checkpoint of {program}; use another "
        "one"
    )


def check_parts(content: Mapping[str, Any], kinds: Mapping[str, PartType], name: str) -> None:
    """Check the types of the parts, by key, of a checkpoint called `name`; missing parts pass.

    Raises:
        UserError: a part has another type.
    """
    for part, (wanted, is_right) in kinds.items():
        if part in content and not is_right(content[part]):
            raise UserError(
                f"{name}: its '{part}' is {described(content[part])}, expected {wanted}; use another "
                "checkpoint"
            )


def described(value: object) -> str:
    """A short description of a value of an unexpected type or shape."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "a mapping with other content"
    return f"a {type(value).__name__}"


def is_state(value: object) -> bool:
    """Whether a value is a state: a mapping of names to dense tensors."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and is_dense(tensor) for name, tensor in value.items()
    )


def is_dense(value: object) -> bool:
    """Whether a value is a plain tensor with data: not sparse, nested, expanded, on the meta device, or of
    another kind of numbers than a model has.
    """
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    if value.is_meta or value.is_nested or value.is_quantized or value.is_complex():
        return False
    return value.nbytes <= value.untyped_storage().nbytes()  # no value stands for several


def is_words(value: object) -> bool:
    """Whether a value is a list of words."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(word, str) for word in value)


def is_optimizer(value: object) -> bool:
    """Whether a value has the structure of a torch optimizer's state, with dense tensors."""
    if not isinstance(value, Mapping):
        return False
    groups, state = value.get("param_groups"), value.get("state")
    return (
        isinstance(groups, list)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)
        and isinstance(state, Mapping)
        and all(isinstance(own, Mapping) for own in state.values())
        and all(is_dense(one) for own in state.values() for one in own.values() if isinstance(one, Tensor))
    )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError if a shape in an optimizer's loaded state, which torch does not check, is wrong."""
    for parameter, own in optimizer.state.items():
        for name in _PER_NUMBER:
            found = own.get(name)
            if isinstance(found, Tensor) and found.shape != parameter.shape:
                raise UserError(
                    f"{name} of the optimizer is {tuple(found.shape)}, but the parameter is "
                    f"{tuple(parameter.shape)}"
                )


def check_finite(state: Mapping[str, Tensor], name: str) -> None:
    """Raise UserError if a tensor in the state of a model in the file `name` has NaN or infinity."""
    if not is_verified():
        return
    for key, tensor in state.items():
        if tensor.dtype in _FLOATS and not _is_finite(tensor):
            raise UserError(
                f"{name}: its tensor {key} contains NaN or infinity, perhaps because training diverged; use "
                "an earlier checkpoint"
            )


@contextlib.contextmanager
def building(tensors: int, size: int) -> Iterator[None]:
    """Limit the model that is built meanwhile in this thread to some times what its file holds.

    The settings in a file may claim any number of layers, and any widths. Building a model takes a few more
    parameters than its file has tensors: tied ones, and those that are replaced, such as the tables of a
    model with compressed ones.

    Args:
        tensors, size: how many tensors and bytes the file has.

    Raises:
        UserError: the model has more parameters, or more values in its parameters and buffers.
    """
    thread, parameters, values = threading.get_ident(), 0, 0

    def count(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal parameters, values
        if tensor is None or threading.get_ident() != thread:
            return
        parameters, values = parameters + 1, values + tensor.numel()
        if parameters > 4 * tensors + 1000 or values > 8 * size + 2**29:
            raise UserError(
                f"its settings claim more layers or larger ones than the file has ({tensors:,} tensors, "
                f"{size:,} bytes); use another one"
            )

    hooks = [
        register_module_parameter_registration_hook(count),
        register_module_buffer_registration_hook(count),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _is_finite(tensor: Tensor) -> bool:
    """Whether all values of a tensor are finite."""
    if isinstance(tensor, PackedTensor):
        return all(map(_is_finite, tensor.blocks()))
    # The sum is a fast check, but may overflow; of a whole table in 16 bits, torch would make a copy.
    return all(
        bool(part.sum(dtype=torch.float32).isfinite()) or bool(part.isfinite().all())
        for part in tensor.reshape(-1).split(_VALUES_AT_ONCE)
    )
