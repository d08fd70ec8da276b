"""Files of tensors: read without running code, and their checksums.

A checksum is written with every checkpoint; only `verify` compares it. It detects damaged files, and files of
which another program changed a part; not attackers, who can compute it, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shared_embeddings.quant.packed_tensor import inner_tensors
from shared_embeddings.utils.errors import UserError, first_line
from shared_embeddings.utils.files import AnyPath, replacing
from shared_embeddings.utils.options import quote

# Options of OpenNMT-py in checkpoints; for the whole process, since a context would remove it for others.
torch.serialization.add_safe_globals([Namespace])
# The entry of a checkpoint or of safetensors metadata with the checksum of everything else.
KEY = "checksum"
_PLAIN = (bytes, int, float, complex, bool, type(None), torch.dtype, torch.Size)
# So many layers take little time and memory.
_LAYERS = 1000
# How much of a file's pickle `contains_strings` searches, in bytes.
_SEARCHED_BYTES = 2**26


# Reading.


def load_tensors(path: AnyPath, name: str) -> dict[str, Any]:
    """Return the content of a safetensors file, or of a mapping that ``torch.save`` wrote.

    Tensors are mapped into memory, no code in the file is run, and nothing in it is decompressed.

    Args:
        name: what the file is, for the error, such as "checkpoint model.pt".

    Raises:
        UserError: it cannot be read.
    """
    try:
        if _is_safetensors(path):
            with safe_open(path, "pt") as file:
                return {key: file.get_tensor(key) for key in file.keys()}
        can_be_mapped = zipfile.is_zipfile(path)  # unlike the format before torch 1.6
        if can_be_mapped:
            with zipfile.ZipFile(path) as archive:
                size = sum(entry.file_size for entry in archive.infolist())
            if size > os.path.getsize(path):  # torch compresses nothing
                raise UserError(f"it would be {size:,} bytes in memory")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about some files before it fails
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=can_be_mapped)
        if not isinstance(content, dict):
            raise UserError(f"it is a {type(content).__name__}")
        return content
    except Exception as error:  # torch.load raises many kinds for other files
        # torch's message for a pickle that may contain code recommends running it.
        has_code = isinstance(error, pickle.UnpicklingError)
        reason = "damaged, or it could run code" if has_code else first_line(error)
        raise UserError(
            f"{name}: cannot be read ({reason}); it is truncated, or not a checkpoint; copy it again"
        ) from error


def _is_safetensors(path: AnyPath) -> bool:
    with open(path, "rb") as file:
        return file.read(9)[8:] == b"{"  # the length of the header, and the header in JSON


def contains_strings(path: Path, *texts: str) -> bool:
    """Return whether a file of ``torch.save`` contains strings, such as keys, without unpickling it."""
    if not path.is_file():
        return False
    with contextlib.suppress(OSError, zipfile.BadZipFile), contextlib.ExitStack() as opened:
        file: Any = opened.enter_context(path.open("rb"))
        if zipfile.is_zipfile(path):
            archive = opened.enter_context(zipfile.ZipFile(path))
            names = [name for name in archive.namelist() if name.endswith("data.pkl")]
            if not names:
                return False
            file = opened.enter_context(archive.open(names[0]))
        pickled = file.read(_SEARCHED_BYTES)
        return all(b"X" + len(text).to_bytes(4, "little") + text.encode() in pickled for text in texts)
    return False


def check_sizes(where: str, sizes: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError if sizes are too large for the tensors of a file, before a module of these is built.

    Args:
        where: the prefix of the message, such as "model DIR".
        sizes: numbers of tokens, dimensions and layers, and options of embeddings. Of lists, the sums count.
        tensors: all tensors in the file, which may be packed.
    """
    size = sum(part.nbytes for tensor in tensors.values() for part in inner_tensors(tensor))
    for name, value in sizes.items():
        if isinstance(value, Mapping):
            check_sizes(f"{where}: {name}", value, tensors)
            continue
        numbers = value if isinstance(value, (list, tuple)) else [value]
        total = sum(number for number in numbers if isinstance(number, int))
        # Layers may share tensors; a token or a dimension takes a bit at least.
        limit = max(_LAYERS, len(tensors)) if name.endswith(("layer", "layers")) else 8 * size
        if total > limit and name != "seed":
            raise UserError(
                f"{where}: {name} is {quote(value)}, too large for {len(tensors):,} tensors of {size:,} "
                "bytes; the settings do not match the tensors; copy them again"
            )


# Checksums.


def state_digest(content: object) -> str:
    """Return the SHA-256, in 64 hexadecimal digits, of tensors and plain values in any file format.

    It covers the names, dtypes, shapes and bytes of tensors on any device, and names and values of plain
    values, in mappings, lists, tuples, sets and namespaces; not the order of mappings, the memory layout, or
    the content of other objects.
    """
    digest = hashlib.sha256()
    for part in _parts(content):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _parts(content: object) -> Iterator[bytes]:
    if isinstance(content, Tensor):
        digest = hashlib.sha256(f"{content.dtype} {tuple(content.shape)} {content.layout}".encode())
        if content.layout == torch.strided and not content.is_meta and not content.is_quantized:
            flat = content.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
        yield digest.digest()
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


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with the checksum of its content."""
    rest = {name: value for name, value in content.items() if name != KEY}
    return {**rest, KEY: state_digest(rest)}


def save_safetensors(
    tensors: Mapping[str, Tensor], path: AnyPath, metadata: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file with the checksum of its tensors in its metadata; return the checksum.

    Equal tensors and metadata give equal bytes.

    Args:
        tensors: contiguous tensors that share no memory.

    Raises:
        OSError: it cannot be written.
    """
    checksum = state_digest(tensors)
    with open(path, "wb") as file:
        mode = os.fstat(file.fileno()).st_mode
    try:
        save_file(dict(tensors), path, {"format": "pt", **(metadata or {}), KEY: checksum})
    except SafetensorError as error:  # for example on a full disk
        raise OSError(str(error)) from error
    os.chmod(path, mode)  # safetensors makes files readable by the owner only
    # Its header has the metadata in random order.
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        file.seek(8)
        file.write(json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(size))
    return checksum


def recorded_checksum(path: AnyPath) -> str | None:
    """Return the checksum in the header of a safetensors file, if it has one."""
    with safe_open(path, "pt") as file:
        return (file.metadata() or {}).get(KEY)


def stamp_safetensors(path: Path) -> None:
    """Add a checksum to a safetensors file that another program wrote; OSError if it cannot be written."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    with replacing(path) as temporary:
        save_safetensors(load_tensors(path, path.name), temporary, metadata)


def verify(path: Path) -> list[Path]:
    """Compare a file, or the files in a folder, with the checksums that were written with them.

    Returns:
        The files that match; other files have no checksum.

    Raises:
        UserError: a file cannot be read or does not match, or none has a checksum.
    """
    intact = []
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file == path or file.suffix in (".safetensors", ".pt"):
            content = load_tensors(file, f"file {file}")
            checksum = recorded_checksum(file) if _is_safetensors(file) else content.pop(KEY, None)
            if checksum is not None and checksum != state_digest(content):
                raise UserError(
                    f"{file}: does not match its checksum: it is damaged, or another program changed it; "
                    "copy or create it again"
                )
            intact += [file] if checksum is not None else []
    if not intact:
        raise UserError(f"{path}: has no file with a checksum; name a model that this program wrote")
    return intact
