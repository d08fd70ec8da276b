"""Atomic writing of files and folders, checks of paths, checksums and locks."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import pickle
import re
import shutil
import stat
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from shared_embeddings.errors import UserError
from shared_embeddings.utils.interrupts import signals_delayed

AnyPath = str | os.PathLike[str]
# Errors of torch.load(weights_only=True), and of indexing its result, for files that are truncated or not
# checkpoints.
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
    """The first line of an error message, truncated; the error's class name if it is empty."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]


def os_error_line(error: OSError) -> str:
    """The message of an `OSError`, with the file if known, and what to check."""
    if not error.strerror:
        return str(error)
    place = "" if error.filename is None else f"{error.filename}: "
    return f"{place}{error.strerror}; check the path, its permissions and the free disk space"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path, renamed to `path` on success and deleted on errors; see `replacing_all`."""
    with replacing_all([path]) as (temporary,):
        yield temporary


@contextmanager
def replacing_all(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield temporary paths for a set of files or folders; all of them are renamed to `paths`, or none.

    Content is flushed to disk before it is renamed, so that a crash leaves the old file or the new one, never
    a partial one. If a process is killed while it renames several, `remove_leftovers` restores the old ones
    from a journal next to the first one. Symbolic links stay and their targets are replaced. Devices and
    pipes are written to. Missing parent folders are created.

    Args:
        paths: the outputs; the journal is named after the first.

    Raises:
        OSError: a file cannot be written; the old files are unchanged.
    """
    places = [_Place.of(path) for path in paths]
    try:
        with naming({place.temporary: path for place, path in zip(places, paths)}):
            yield [place.temporary for place in places]
            for place in places:
                _flush(place.temporary)
            with signals_delayed():
                _move(places)
    finally:
        for place in places:
            remove(place.temporary)


@contextmanager
def naming(outputs: Mapping[Path, Path]) -> Iterator[None]:
    """Make write errors name the output instead of its temporary file, or of no file, as on a full disk.

    Args:
        outputs: temporary path -> output; errors without a file name get the first output.
    """
    try:
        yield
    except OSError as error:
        names = {str(temporary): os.fspath(output) for temporary, output in outputs.items()}
        if error.filename is not None:
            error.filename = names.get(str(error.filename), error.filename)
        elif error.errno is not None:  # without errno, a file name would hide the message
            error.filename = next(iter(names.values()))
        raise


@contextmanager
def staged(outputs: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield paths in a temporary folder at which a set of files or folders keep their own names.

    Files of one folder share a folder there, too. All of them appear, or none, as with `replacing_all`.

    Args:
        outputs: the outputs; the journal is named after the first.

    Raises:
        OSError: a file cannot be written; the old files are unchanged.
    """
    with replacing_all(outputs) as temporaries:
        folder = temporaries[0].with_name(f"{temporaries[0].name}.staging.tmp")
        parents = list(dict.fromkeys(output.parent for output in outputs))
        places = [folder / str(parents.index(output.parent)) / output.name for output in outputs]
        try:
            with naming(dict(zip(places, outputs))):
                for place in places:
                    place.parent.mkdir(parents=True, exist_ok=True)
                yield places
                for place, temporary in zip(places, temporaries):
                    shutil.move(place, temporary)
        finally:
            remove(folder)


@contextmanager
def workplace(output: Path | None) -> Iterator[Path]:
    """Yield a temporary folder next to an output, so that models can be moved there; deleted at the end."""
    if output is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    place = output.with_name(f".{output.name}.{os.getpid()}.tmp.trials.tmp")
    place.mkdir(parents=True)
    try:
        yield place
    finally:
        remove(place)


class _Place(NamedTuple):
    """The temporary path and the final path of an output."""

    temporary: Path
    target: Path
    is_stream: bool

    @classmethod
    def of(cls, path: Path) -> _Place:
        """Choose the temporary path of an output; creates its parent folder."""
        if is_stream(path):
            return cls(Path(tempfile.gettempdir(), f".{path.name}.{os.getpid()}.tmp"), path, True)
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        return cls(target.with_name(f".{target.name}.{os.getpid()}.tmp"), target, False)

    @property
    def previous(self) -> Path:
        """The backup of the old content until the whole set is renamed."""
        return self.temporary.with_name(f"{self.temporary.name}.previous.tmp")


def is_stream(path: AnyPath) -> bool:
    """Whether a path is a device, a pipe or a socket, which is written to rather than replaced."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _flush(path: Path) -> None:
    """Flush a file, or all files of a folder, to disk."""
    for file in [path] if path.is_file() else [part for part in path.rglob("*") if part.is_file()]:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def _move(places: Sequence[_Place]) -> None:
    """Move finished outputs to their final paths; streams first, since writing to them may fail."""
    for place in places:
        if place.is_stream:
            with place.temporary.open("rb") as source, open(place.target, "wb") as target:
                shutil.copyfileobj(source, target)
    moves = [place for place in places if not place.is_stream]
    if len(moves) == 1 and not moves[0].target.is_dir():  # atomic without a journal
        _keep_mode(moves[0])
        moves[0].temporary.replace(moves[0].target)
    elif moves:
        _move_set(moves)


def _move_set(moves: Sequence[_Place]) -> None:
    """Move several outputs, or a folder, with a journal for rolling back after a crash."""
    journal = _journal(moves[0].target)
    _write_journal(journal, moves)
    try:
        for place in moves:
            if place.target.is_dir():
                place.target.rename(place.previous)
            elif place.target.exists():
                _keep_mode(place)
                _keep(place)
            place.temporary.replace(place.target)
    except OSError:
        _roll_back(journal)
        raise
    journal.unlink()
    for place in moves:
        remove(place.previous)


def _keep_mode(place: _Place) -> None:
    """Copy the permissions of the replaced file to the new one."""
    if place.target.exists():
        shutil.copymode(place.target, place.temporary)


def _keep(place: _Place) -> None:
    """Back up an old file with a hard link, or a copy on file systems without hard links."""
    try:
        os.link(place.target, place.previous)
    except OSError:
        shutil.copy2(place.target, place.previous)


def _journal(first: Path) -> Path:
    """The path of the journal of a set."""
    return first.with_name(f".{first.name}.set.tmp")


def _write_journal(journal: Path, places: Sequence[_Place]) -> None:
    """Record the moves that are about to happen."""
    rows = [[str(place.target), str(place.previous), place.temporary.stat().st_ino] for place in places]
    draft = journal.with_name(f"{journal.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(rows), encoding="utf-8")
    _flush(draft)
    draft.replace(journal)


def _roll_back(journal: Path) -> None:
    """Undo the moves of an incomplete set: delete new files and restore old ones."""
    for target, previous, inode in json.loads(journal.read_text(encoding="utf-8")):
        new, old = Path(target), Path(previous)
        if new.exists() and new.stat().st_ino == inode:
            remove(new)
        if old.exists() and not new.exists():
            old.replace(new)
    journal.unlink()


def remove(path: Path) -> None:
    """Delete a file, a link or a folder tree; a missing path is ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold a file lock and yield its descriptor; a child that inherits it keeps the lock if this is killed.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"{path.parent}: another process is running here; wait for it or stop it"
            ) from None
        yield file.fileno()


def remove_leftovers(*paths: Path) -> None:
    """Delete temporary files of processes that were killed while writing `paths`.

    A partially moved set of `replacing_all` is rolled back. What a running process writes is left alone.

    Args:
        paths: a set in its order, or single files.
    """
    for path in paths:
        target = Path(os.path.realpath(path))
        own = re.compile(rf"\.{re.escape(target.name)}\.(\d+|set)\.tmp(\.\w+\.tmp)?")
        names = [file.name for file in target.parent.glob(f".{glob.escape(target.name)}.*.tmp")]
        found = [(name, match[1]) for name in names if (match := own.fullmatch(name))]
        if any(writer != "set" and _is_running(int(writer)) for _, writer in found):
            found = [(name, writer) for name, writer in found if writer != "set"]
        elif _journal(target).is_file():
            _roll_back(_journal(target))
        for name, writer in found:
            if writer == "set" or not _is_running(int(writer)):
                remove(target.with_name(name))


def _is_running(process: int) -> bool:
    """Whether there is another process with a number on this machine."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def check_no_nul(option: str, path: AnyPath) -> None:
    """Check that a path has no NUL byte, which no file system allows.

    Raises:
        UserError: names the option.
    """
    if "\0" in os.fspath(path):
        raise UserError(f"{option}: the path {os.fspath(path)!r} contains a NUL byte; check the path")


def check_input(option: str, path: AnyPath) -> None:
    """Check that a path is a readable regular file.

    Args:
        option: the option that names the path, for messages.
        path: the file.

    Raises:
        UserError: the file is missing, unreadable, or a folder, a device or a pipe.
    """
    check_no_nul(option, path)
    name = os.fspath(path)
    try:
        mode = os.stat(name).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{option}: no such file: {name}; check the path") from None
    except OSError as error:
        raise UserError(f"{option}: {os_error_line(error)}") from None
    if stat.S_ISDIR(mode):
        raise UserError(f"{option}: {name} is a folder; name a file")
    if not stat.S_ISREG(mode):
        raise UserError(f"{option}: {name} is a device or a pipe; save its content to a file and name that")
    if not os.access(name, os.R_OK):
        raise UserError(f"{option}: {name} cannot be read; check its permissions")


def check_outputs(
    outputs: Mapping[str, AnyPath | None], inputs: Mapping[str, AnyPath | None], force: bool = False
) -> None:
    """Check that no output is an input or another output, nor already exists unless `force` is set.

    Symbolic and hard links are resolved. Streams (`is_stream`) may exist.

    Args:
        outputs: option -> path, or None.
        inputs: option -> path that is read.
        force: allow outputs to replace existing files; inputs are never replaced.

    Raises:
        UserError: names the option and the path.
    """
    taken = {option: path for option, path in inputs.items() if path is not None}
    for option, path in outputs.items():
        if path is None:
            continue
        check_no_nul(option, path)
        if is_stream(path):
            continue
        for other, used in taken.items():
            if _overwrites(path, used):
                raise UserError(f"{option}: {path} would replace the file of {other}; name another one")
        if not force and os.path.exists(path):
            raise UserError(
                f"{option}: {path} already exists; add --force to replace it, or name another one"
            )
        taken[option] = path


def _overwrites(output: AnyPath, used: AnyPath) -> bool:
    """Whether writing `output` would change `used`: they are the same, `used` is inside the folder `output`,
    or `output` is an existing file inside the folder `used`.
    """
    if os.path.exists(output) and os.path.exists(used) and os.path.samefile(output, used):
        return True
    new, old = Path(os.path.realpath(output)), Path(os.path.realpath(used))
    return new == old or new in old.parents or (old in new.parents and new.exists())


def can_be_created(path: AnyPath) -> bool:
    """Whether the parent folder of `path` is writable, or can be created."""
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return os.path.isdir(folder) and os.access(folder, os.W_OK)


def write_text(path: Path, text: str) -> None:
    """Write `text` atomically as UTF-8 with unchanged line ends."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def save_tensors(content: object, path: AnyPath) -> None:
    """Write plain values and tensors with ``torch.save``.

    Raises:
        OSError: writing failed, for example on a full disk.
    """
    with open(path, "wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            # torch reports only that closing its archive failed after the failed write.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def bytes_on_disk(path: Path) -> int:
    """The size in bytes of a file, or of all files in a folder."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size
