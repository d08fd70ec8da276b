"""Parts common to the checkpoints of all hosts: checksums, identifying a file, reading it, and checking it.

Checksums of tensors and plain values are written with every checkpoint and verified on loading.

They detect corrupted bytes and mixed files of different runs. They do not protect against attackers, who can
compute them, too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import threading
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from shared_embeddings.quant.packed_tensor import PackedTensor
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import check_archive, first_line

# The entry of a checkpoint or of safetensors metadata with the checksum of everything else.
KEY = "checksum"
# Environment variable; 0 disables the checks for checksums and finite numbers.
SWITCH = "SHARED_EMBEDDINGS_VERIFY"
REMEDY = f"copy or create it again, or set {SWITCH}=0 to load it anyway"
_PLAIN = (bytes, int, float, complex, bool, type(None), torch.dtype, torch.Size)
_WORKERS = min(4, os.cpu_count() or 1)


def state_digest(content: object) -> str:
    """The SHA-256, in 64 hexadecimal digits, of tensors and plain values, independent of the file format.

    It covers the names, dtypes, shapes and bytes of tensors on any device, and names and values of plain
    values, in mappings, lists, tuples, sets and namespaces; not the order of mappings, the memory layout, or
    the content of other objects.
    """
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_WORKERS) as pool:  # hashlib releases the GIL
        parts = [part if isinstance(part, bytes) else pool.submit(part) for part in _parts(content)]
        for part in parts:
            piece = part if isinstance(part, bytes) else part.result()
            digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.hexdigest()


def _parts(content: object) -> Iterator[bytes | Callable[[], bytes]]:
    """The parts of the digest of `content` in order; for tensors, functions that compute them."""
    if isinstance(content, Tensor):
        yield functools.partial(_tensor_digest, content)
    elif isinstance(content, Namespace):
        yield from _parts(vars(content))
    elif isinstance(content, Mapping):
        yield f"mapping of {len(content)}".encode()
        for key in sorted(content, key=_text):
            yield _text(key).encode(errors="surrogatepass")
            yield from _parts(content[key])
    elif isinstance(content, (list, tuple)) and type(content) is not torch.Size:
        yield f"{'tuple' if isinstance(content, tuple) else 'list'} of {len(content)}".encode()
        for item in content:
            yield from _parts(item)
    elif isinstance(content, (set, frozenset)):
        yield from _parts(sorted(map(_text, content)))
    else:
        yield _text(content).encode(errors="surrogatepass")


def _text(value: object) -> str:
    """A text for a plain value that storing does not change; the type for other values."""
    if isinstance(value, str):
        return f"str {value}"  # repr() of a string depends on the version of Python
    return f"{type(value).__name__} {value!r}" if type(value) in _PLAIN else type(value).__name__


def _tensor_digest(tensor: Tensor) -> bytes:
    """The SHA-256 of a tensor's dtype, shape and bytes; without bytes for sparse and meta tensors."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}".encode())
    if tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()


def is_verified() -> bool:
    """Whether files are verified on loading; the variable ``SHARED_EMBEDDINGS_VERIFY=0`` disables it."""
    return os.environ.get(SWITCH, "1") != "0"


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint with the checksum of its content."""
    rest = {name: value for name, value in content.items() if name != KEY}
    return {**rest, KEY: state_digest(rest)}


def verified(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Verify and remove the checksum, if any, of a checkpoint; the inverse of `with_checksum`.

    Raises:
        UserError: the content does not match its checksum; the message names the file.
    """
    rest = {key: value for key, value in content.items() if key != KEY}
    if KEY in content and is_verified() and content[KEY] != state_digest(rest):
        raise UserError(
            f"{name}: does not match its checksum: it is damaged or was modified by another program; {REMEDY}"
        )
    return rest


def save_safetensors(
    tensors: Mapping[str, Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file with the checksum of its tensors in its metadata; return the checksum.

    Args:
        tensors: contiguous tensors that share no memory.

    Raises:
        OSError: it cannot be written.
    """
    checksum = state_digest(tensors)
    try:
        save_file(dict(tensors), path, {"format": "pt", **(metadata or {}), KEY: checksum})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    return checksum


def load_safetensors(path: str | os.PathLike[str], name: str) -> dict[str, Tensor]:
    """Read a safetensors file, `name` in messages, and verify any checksum; UserError if it is damaged."""
    try:
        tensors = load_file(path)
        checksum = recorded_checksum(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{name}: cannot be read ({error}); it is truncated or damaged") from error
    return tensors if checksum is None else verified({**tensors, KEY: checksum}, name)


def recorded_checksum(path: str | os.PathLike[str]) -> str | None:
    """The checksum in the header of a safetensors file, or None; SafetensorError if it cannot be read."""
    with safe_open(path, "pt") as opened:
        return (opened.metadata() or {}).get(KEY)


def stamp_safetensors(path: Path) -> None:
    """Add a checksum to a safetensors file that another program wrote; OSError if it cannot be written."""
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    stamped = path.with_name(f"{path.name}.stamped")
    save_safetensors(tensors, stamped, metadata)
    os.replace(stamped, path)


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
    """The content of a file of ``torch.save``, memory-mapped; raises `UNREADABLE` errors of `utils.files`."""
    # The format before torch 1.6 cannot be mapped.
    can_be_mapped = zipfile.is_zipfile(path)
    check_archive(path)
    return torch.load(os.fspath(path), map_location="cpu", weights_only=True, mmap=can_be_mapped)


def loaded(path: str | os.PathLike[str]) -> Any:
    """The content of a file of ``torch.save`` with tensors in memory; raises the errors of `mapped`."""
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
    """Raise UserError if a part, by key, of a checkpoint `name` has another type; missing parts pass."""
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
    if isinstance(tensor, PackedTensor):
        return all(map(_is_finite, tensor.blocks()))
    # The sum is a fast check, but may overflow; of a whole table in 16 bits, torch would make a copy.
    return all(
        bool(part.sum(dtype=torch.float32).isfinite()) or bool(part.isfinite().all())
        for part in tensor.reshape(-1).split(_VALUES_AT_ONCE)
    )
