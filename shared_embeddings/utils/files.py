"""Outputs that appear whole or not at all, locks, checksums."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

AnyPath = str | os.PathLike[str]


@contextmanager
def replacing(path: AnyPath) -> Iterator[Path]:
    """Yield a temporary path, which replaces `path` at the end: a file or a folder is the old or the new one.

    The temporary path has the same name in a temporary folder beside `path`, which errors delete. A symbolic
    link is replaced, not its target; devices and pipes are written to. An old folder is moved aside first.

    Raises:
        OSError: it cannot be written. The error names `path`, which is unchanged.
    """
    target = Path(path)
    if target.exists() and not target.is_file() and not target.is_dir():
        yield target
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        stage = Path(tempfile.mkdtemp(prefix=f".{target.name[:40]}.", suffix=".tmp", dir=target.parent))
    except OSError as error:
        error.filename = os.fspath(target)
        raise
    temporary, old = stage / target.name, stage / f"{target.name}.old"
    try:
        yield temporary
        try:
            if os.path.lexists(target) and temporary.is_dir():
                target.rename(old)
            temporary.replace(target)
        except BaseException:
            if os.path.lexists(old) and not os.path.lexists(target):
                old.rename(target)
            raise
    except (OSError, RuntimeError) as error:
        # Of a failed write, torch reports a RuntimeError, NumPy and safetensors no number; many name no file.
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(cause, OSError):
            raise
        if cause.errno is None:
            cause = OSError(errno.EIO, str(cause))
        if cause.filename is None or str(stage) in os.fsdecode(cause.filename):
            cause.filename = os.fspath(target)
        raise cause from None
    finally:
        remove(stage)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder tree; a missing path is ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_text(path: AnyPath, text: str) -> None:
    """Write `text` atomically as UTF-8 with unchanged line ends."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def write_lines(path: AnyPath, lines: Iterable[str]) -> None:
    """Write lines atomically as UTF-8, each with a line end added."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"{line}\n" for line in lines)


def write_json(path: Path, content: object) -> None:
    """Write settings in a folder that is not yet in its place, as transformers does."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock, which the system releases when the process ends; the file stays.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    from filelock import FileLock, Timeout  # with a logger and asyncio, which not every command needs

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise BlockingIOError(
            f"{path.parent}: another process is running here; wait for it or stop it"
        ) from None
    try:
        yield
    finally:
        lock.release()


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def bytes_on_disk(path: Path) -> int:
    """Return the size in bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
