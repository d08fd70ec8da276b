"""Atomic writing of files and folders, checks of paths, checksums and locks."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import itertools
import os
import pickle
import re
import secrets
import shutil
import stat
import struct
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.interrupts import signals_delayed

AnyPath = str | os.PathLike[str]
# Errors of torch.load(weights_only=True), and of indexing its result, for files that are truncated or not
# checkpoints.
UNREADABLE = (
    zipfile.BadZipFile,
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
    """Yield a temporary path, renamed to `path` on success and deleted on errors; see `staged`."""
    with staged([path]) as (place,):
        yield place


@contextmanager
def staged(outputs: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield paths in a temporary folder at which a set of files or folders keep their own names.

    On success the content is flushed to disk and each output is renamed to its place, so that a crash leaves
    the old output or the new one, never a partial one. The first output, which should be the one without
    which the others are not used, is renamed last: a process that is killed between two renames leaves it
    old. Errors leave all old outputs. Outputs in a new folder appear with it, in one rename. Devices and
    pipes are written to. A symbolic link is replaced, not its target; see `followed`.

    Args:
        outputs: files or folders, the main one first.

    Raises:
        OSError: a file cannot be written; the old outputs are unchanged.
    """
    stages: dict[Path, Path] = {}
    try:
        made = {output: _Output.of(output, stages) for output in sorted(outputs, key=is_stream)}
        parts = [made[output] for output in outputs]
        with naming(
            {part.place: path for part, path in zip(parts, outputs)}
            | {part.stage: part.unit.parent for part in parts}
        ):
            yield [part.place for part in parts]
            for file in (file for part in parts for file in (part.place, *part.place.rglob("*"))):
                if file.is_file():
                    with file.open("rb") as opened:
                        os.fsync(opened.fileno())
            with signals_delayed():
                _publish(parts)
    finally:
        for stage in stages.values():
            remove(stage)


@contextmanager
def naming(outputs: Mapping[Path, Path]) -> Iterator[None]:
    """Make write errors name the output instead of its temporary file, or of no file, as on a full disk.

    Args:
        outputs: temporary path -> output, for what is inside as well; errors without a file name get the
            first output.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            named = Path(os.fsdecode(error.filename))
            for temporary, output in outputs.items():
                if named.is_relative_to(temporary):
                    error.filename = os.fspath(output / named.relative_to(temporary))
                    break
        elif error.errno is not None:  # without errno, a file name would hide the message
            error.filename = os.fspath(next(iter(outputs.values())))
        raise


@contextmanager
def workplace(output: Path | None) -> Iterator[Path]:
    """Yield a temporary folder next to an output, so that models can be moved there; deleted at the end."""
    if output is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    place = _make_stage(_unit(_located(output)))
    try:
        yield place
    finally:
        remove(place)


class _Output(NamedTuple):
    """An output that is being written."""

    target: Path  # where it belongs, in a folder without links
    unit: Path  # what is renamed: the output, or the topmost of its folders that does not exist yet
    stage: Path  # temporary folder next to the unit
    place: Path  # the path of the output in that folder

    @classmethod
    def of(cls, path: Path, stages: dict[Path, Path]) -> _Output:
        """Choose the temporary path of an output; `stages` has the temporary folder of each folder so far."""
        if is_stream(path):  # its own folder may not be writable, or small
            folder = Path(os.path.realpath(path.parent))
            if folder not in stages:
                stages[folder] = Path(tempfile.mkdtemp())
            return cls(path, path, stages[folder], stages[folder] / path.name)
        target = _located(path)
        unit = _unit(target)
        if unit.parent not in stages:
            stages[unit.parent] = _make_stage(unit)
        stage = stages[unit.parent]
        place = stage / target.relative_to(unit.parent)
        with naming({place: path, stage: unit.parent}):
            place.parent.mkdir(parents=True, exist_ok=True)
        return cls(target, unit, stage, place)


def _located(path: Path) -> Path:
    """An absolute path whose folder has no links; the path itself may be one."""
    if path.is_symlink():
        return Path(os.path.realpath(path.parent)) / path.name
    return Path(os.path.realpath(path))


def followed(path: Path) -> Path:
    """The target of a path that the user named, if it is a symbolic link; otherwise the path itself.

    What is written inside a folder, under names that the user did not choose, must not be followed: who made
    the folder could have a link in it to any file.
    """
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _unit(target: Path) -> Path:
    """The target, or the topmost of its folders that does not exist yet."""
    while not os.path.lexists(target.parent):
        target = target.parent
    return target


# In the names of temporary folders: containers often give each process the same number.
_OWN = secrets.token_hex(4)
_STAGES = itertools.count()


def _make_stage(unit: Path) -> Path:
    """Create the temporary folder of an output, with the number of this process in its name."""
    stage = unit.with_name(f".{unit.name}.{os.getpid()}.{_OWN}{next(_STAGES)}.tmp")
    with naming({stage: unit}):
        stage.mkdir()
    return stage


def is_stream(path: AnyPath) -> bool:
    """Whether a path is a device, a pipe or a socket, which is written to rather than replaced."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _publish(parts: Sequence[_Output]) -> None:
    """Write to streams, which may fail, then move finished outputs to their final paths."""
    moves: dict[Path, Path] = {}
    for part in reversed(parts):
        if is_stream(part.target):
            with part.place.open("rb") as content, open(part.target, "wb") as stream:
                shutil.copyfileobj(content, stream)
            continue
        source, target = part.stage / part.unit.name, part.unit
        if part.target != part.unit and part.unit.exists():  # its folder has appeared meanwhile
            part.target.parent.mkdir(parents=True, exist_ok=True)
            source, target = part.place, part.target
        moves.pop(target, None)  # a folder is moved with its main output
        moves[target] = source
    try:
        _rename(moves)
    finally:
        for target in moves:
            remove(_aside(target))


def _rename(moves: Mapping[Path, Path]) -> None:
    """Rename new outputs (target -> source) in order; on errors, old ones are back in their places."""
    begun: list[tuple[Path, Path]] = []
    try:
        for target, source in moves.items():
            begun.append((target, source))
            remove(_aside(target))
            if target.is_dir() and not target.is_symlink():
                target.rename(_aside(target))
            elif os.path.lexists(target):
                if not target.is_symlink():
                    shutil.copymode(target, source)
                if len(begun) < len(moves):
                    try:
                        os.link(target, _aside(target), follow_symlinks=False)
                    except OSError:  # a file system without hard links
                        shutil.copy2(target, _aside(target), follow_symlinks=False)
            source.replace(target)
    except OSError:
        for target, source in reversed(begun):
            if not os.path.lexists(source):  # the new one is in place
                remove(target)
            if os.path.lexists(_aside(target)):
                _aside(target).replace(target)
        raise


def _aside(target: Path) -> Path:
    """The name of an old output until the new set is complete."""
    return target.with_name(f".{target.name}.{os.getpid()}.old.tmp")


def remove(path: Path) -> None:
    """Delete a file, a link or a folder tree; a missing path is ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold a file lock and yield its descriptor; a child that inherits it keeps the lock if this is killed.

    At the end the file is removed, and its folder, too, if it is empty and was created here.

    Raises:
        BlockingIOError: another process holds the lock.
        UserError: the file is a symbolic link.
    """
    new = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open_lock(path) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_current = os.path.samestat(os.fstat(lock), os.lstat(path))
            except (BlockingIOError, FileNotFoundError):
                is_current = False  # held, or removed by a process that has just ended
            if not is_current:
                raise BlockingIOError(
                    f"{path.parent}: another process is running here; wait for it or stop it"
                )
            try:
                yield lock
            finally:
                path.unlink(missing_ok=True)
    finally:
        with suppress(OSError):  # not empty
            for folder in new:
                folder.rmdir()


@contextmanager
def open_lock(path: Path) -> Iterator[int]:
    """Open or create the file of a lock, which is no link, without changing it; yield its descriptor."""
    refuse_link(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def refuse_link(path: Path) -> None:
    """Raise `UserError` if a path that the user did not name is a symbolic link, which may lead anywhere."""
    if path.is_symlink():
        raise UserError(f"{path}: is a symbolic link to {os.readlink(path)}; remove the link")


def remove_leftovers(*paths: Path) -> None:
    """Delete temporary files of processes that were killed while writing `paths`.

    A folder that such a process had moved aside without putting the new one in its place is moved back. What
    a running process writes is left alone. Only names derived from `paths`, in their own folders, are
    touched; no link is followed.
    """
    located = [_located(path) for path in paths]
    for target in dict.fromkeys([*located, *map(_unit, located)]):
        own_stages = f".{target.name}.{os.getpid()}.{_OWN}"
        pattern = re.compile(rf"\.{re.escape(target.name)}\.(\d+)(\.\w+)?\.tmp")
        for file in list(target.parent.glob(f".{glob.escape(target.name)}.*.tmp")):
            match = pattern.fullmatch(file.name)
            if match is None or _is_running(int(match[1])) or file.name.startswith(own_stages):
                continue
            is_old_folder = match[2] == ".old" and file.is_dir() and not file.is_symlink()
            if is_old_folder and not os.path.lexists(target):
                file.rename(target)
            else:
                remove(file)


def _is_running(process: int) -> bool:
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def write_text(path: Path, text: str) -> None:
    """Write `text` atomically as UTF-8 with unchanged line ends."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines atomically as UTF-8, each with a line end added."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"{line}\n" for line in lines)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_archive(path: AnyPath) -> None:
    """Check that a file of ``torch.save`` or ``np.savez`` is as large as its entries claim to be together.

    They are never compressed there: a small file that claims more could fill the memory.

    Raises:
        ValueError: its entries are larger than the file.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            claimed, size = sum(entry.file_size for entry in archive.infolist()), os.path.getsize(path)
        if claimed > size:
            raise ValueError(f"its entries claim {claimed:,} bytes, but the file has {size:,}")


def save_tensors(content: object, path: AnyPath) -> None:
    """Write plain values and tensors with ``torch.save``; failures to write are an `OSError`."""
    import torch  # slow to import

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
