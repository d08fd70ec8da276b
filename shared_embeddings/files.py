"""Files that are either complete or absent, their checksums, and locks."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import pickle
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

# What torch.load(weights_only=True) and a look into its result raise for a file that is cut short or no
# checkpoint.
UNREADABLE = (
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    struct.error,
    AssertionError,
    LookupError,
    TypeError,
    ValueError,
    OSError,
)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, shortened, for a message of one line; else the error's name."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]


def refusal(error: OSError) -> str:
    """What the operating system refused, with the file where it is known, and what to look at."""
    if not error.strerror:
        return str(error)
    place = "" if error.filename is None else f"{error.filename}: "
    return f"{place}{error.strerror}; check the path, its permissions and the room on the disk"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`; rename it to `path` on success, delete it on any error.

    The content is on the disk before the rename, so that a crash leaves the old file or the new
    one, never half of one. The folder is made if need be.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold a lock and give its file descriptor; a child that inherits it keeps the lock if we are killed.

    Raises:
        BlockingIOError: another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"{path.parent}: another process is at work here; wait for it or end it"
            ) from None
        yield file.fileno()


def clear_remains(path: Path) -> None:
    """Take away what processes that were killed while they wrote `path` by `replacing` have left."""
    for remains in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        remains.unlink(missing_ok=True)


def can_be_made(path: str | os.PathLike[str]) -> bool:
    """Whether there is a folder for `path`, or one can be made, in which files can be written."""
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return os.path.isdir(folder) and os.access(folder, os.W_OK)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 with unchanged line ends, completely or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def save_tensors(content: object, path: str | os.PathLike[str]) -> None:
    """Write plain values and tensors with ``torch.save``.

    Raises:
        OSError: they cannot be written, as on a full disk.
    """
    with open(path, "wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            # torch closes its archive after a failed write, and says only that this failed, too.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def bytes_on_disk(path: Path) -> int:
    """The bytes of a file, or of all files in a folder."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size
