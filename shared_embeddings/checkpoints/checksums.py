"""Checksums of tensors and plain values: written with every checkpoint, verified when it is loaded.

They find bytes that changed on the disk or on the way, and files of different runs side by side. They are no
protection against an attacker, who can compute them, too.
"""

from __future__ import annotations

import hashlib
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared_embeddings.errors import UserError

# The entry of a checkpoint, and of the metadata of a safetensors file, with the checksum of all the rest.
KEY = "checksum"
# Set to 0 in the environment, checksums and finite numbers are not checked.
SWITCH = "SHARED_EMBEDDINGS_VERIFY"
REMEDY = f"copy or make it again, or set {SWITCH}=0 to load it as it is"
_PLAIN = (bytes, int, float, complex, bool, type(None), torch.dtype, torch.Size)
_WORKERS = min(4, os.cpu_count() or 1)


def state_digest(content: object) -> str:
    """The SHA-256 of tensors and plain values, in whichever format they are stored.

    It covers the names, data types, shapes and bytes of tensors on any device, and the names and values
    beside them; not the order of mappings, the layout in memory, nor the content of other objects.

    Args:
        content: a state, or a whole checkpoint: mappings, lists, tuples, sets and namespaces of tensors
            and plain values.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_WORKERS) as pool:  # hashlib lets other threads work
        parts = [part if isinstance(part, bytes) else pool.submit(part) for part in _parts(content)]
        for part in parts:
            piece = part if isinstance(part, bytes) else part.result()
            digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.hexdigest()


def _parts(content: object) -> Iterator[bytes | Callable[[], bytes]]:
    """What goes into the digest of `content`, in order; of tensors, how to get it."""
    if isinstance(content, Tensor):
        yield lambda: _tensor_digest(content)
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
    """A plain value as text that is the same before it is stored and after; of others, what they are."""
    if isinstance(value, str):
        return f"str {value}"  # repr() of a text depends on the version of Python
    return f"{type(value).__name__} {value!r}" if type(value) in _PLAIN else type(value).__name__


def _tensor_digest(tensor: Tensor) -> bytes:
    """The SHA-256 of a tensor: its type, shape and bytes. Sparse ones and ones without data have no bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}".encode())
    if tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()


def is_verified() -> bool:
    """Whether files are verified on loading: unless ``SHARED_EMBEDDINGS_VERIFY`` is 0 in the environment."""
    return os.environ.get(SWITCH, "1") != "0"


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint with the checksum of all that it holds."""
    rest = {name: value for name, value in content.items() if name != KEY}
    return {**rest, KEY: state_digest(rest)}


def verified(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The content that `with_checksum` was given, when it matches its checksum or has none.

    Args:
        content: as it was loaded, before anything in it is changed.
        name: of the file, for the message.

    Raises:
        UserError: its content is not what was written.
    """
    rest = {key: value for key, value in content.items() if key != KEY}
    if KEY in content and is_verified() and content[KEY] != state_digest(rest):
        raise UserError(
            f"{name}: does not match its checksum: it is damaged, or was changed by another program; {REMEDY}"
        )
    return rest


def save_safetensors(
    tensors: Mapping[str, Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file with the checksum of its tensors in its metadata; returns the checksum.

    Args:
        tensors: contiguous, none in the memory of another one.
        path: of the file.
        metadata: further ones.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    checksum = state_digest(tensors)
    try:
        save_file(dict(tensors), path, {"format": "pt", **(metadata or {}), KEY: checksum})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    return checksum


def load_safetensors(path: str | os.PathLike[str], name: str) -> dict[str, Tensor]:
    """Read a safetensors file, and verify it where it has a checksum.

    Args:
        path: of the file.
        name: of the file, for messages.

    Raises:
        UserError: it is cut short, or its tensors are not what was written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
        checksum = recorded_checksum(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{name}: cannot be read ({error}); it is cut short or damaged") from error
    return tensors if checksum is None else verified({**tensors, KEY: checksum}, name)


def recorded_checksum(path: str | os.PathLike[str]) -> str | None:
    """The checksum in the metadata of a safetensors file, of which only the header is read; None without.

    Raises:
        safetensors.SafetensorError, OSError: the file cannot be read.
    """
    from safetensors import safe_open

    with safe_open(path, "pt") as opened:
        return (opened.metadata() or {}).get(KEY)


def stamp_safetensors(path: Path) -> None:
    """Put the checksum of its tensors into a safetensors file that another program wrote.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors import safe_open

    with safe_open(path, "pt") as opened:
        metadata = opened.metadata() or {}
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    stamped = path.with_name(f"{path.name}.stamped")
    save_safetensors(tensors, stamped, metadata)
    os.replace(stamped, path)
