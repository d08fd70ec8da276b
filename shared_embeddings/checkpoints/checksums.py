"""Checksums of tensors and plain values: written with every checkpoint, verified on loading.

They detect corrupted bytes and mixed files of different runs. They do not protect against attackers, who can
compute them, too.
"""

from __future__ import annotations

import functools
import hashlib
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared_embeddings.utils.errors import UserError

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
    values; not the order of mappings, the memory layout, or the content of other objects.

    Args:
        content: mappings, lists, tuples, sets and namespaces of tensors and plain values.
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
    """Verify and remove the checksum of a checkpoint; the inverse of `with_checksum`.

    Args:
        content: the unmodified content of the file, possibly without a checksum.
        name: the name of the file, for messages.

    Raises:
        UserError: the content does not match its checksum.
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
        path: the file.
        metadata: further metadata.

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
    """Read a safetensors file, called `name` in messages, and verify its checksum, if any.

    Raises:
        UserError: it is truncated, or its tensors do not match its checksum.
    """
    try:
        tensors = load_file(path)
        checksum = recorded_checksum(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{name}: cannot be read ({error}); it is truncated or damaged") from error
    return tensors if checksum is None else verified({**tensors, KEY: checksum}, name)


def recorded_checksum(path: str | os.PathLike[str]) -> str | None:
    """The checksum in the header of a safetensors file, or None.

    Raises:
        safetensors.SafetensorError, OSError: the file cannot be read.
    """
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
