"""Files that are either complete or absent, their checksums, and locks."""

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


def os_error_line(error: OSError) -> str:
    """What the operating system refused, with the file where it is known, and what to look at."""
    if not error.strerror:
        return str(error)
    place = "" if error.filename is None else f"{error.filename}: "
    return f"{place}{error.strerror}; check the path, its permissions and the room on the disk"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name for a file or folder; it becomes `path` on success and is deleted on any error.

    See `replacing_all`.
    """
    with replacing_all([path]) as (temporary,):
        yield temporary


@contextmanager
def replacing_all(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Give temporary names for files or folders that belong together; all of them appear, or none.

    The content is on the disk before it gets its name, so that a crash leaves the old file or the new one,
    never half of one. When a process is killed while it renames several, a journal beside the first one lets
    `remove_leftovers` put the old ones back. Links stay and what they point to is replaced; what is neither
    a file nor a folder, such as a device or a pipe, is written to. Folders are made if need be.

    Args:
        paths: the first one names the set.

    Raises:
        OSError: a file cannot be written; the old ones are unchanged then.
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
    """Let errors of writing name the output, where they name its temporary file or, as on a full disk, none.

    Args:
        outputs: by the names under which they are written first; the first one is named where none is.
    """
    try:
        yield
    except OSError as error:
        names = {str(temporary): os.fspath(output) for temporary, output in outputs.items()}
        if error.filename is not None:
            error.filename = names.get(str(error.filename), error.filename)
        elif error.errno is not None:  # an error of text alone would lose it for a name
            error.filename = next(iter(names.values()))
        raise


@contextmanager
def staged(outputs: Sequence[Path]) -> Iterator[list[Path]]:
    """Give places in a temporary folder, in which files or folders that belong together have their own names.

    Files that lie beside each other do so there, too. All of them appear, or none, as with `replacing_all`.

    Args:
        outputs: the first one names the set.

    Raises:
        OSError: a file cannot be written; the old ones are unchanged then.
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


class _Place(NamedTuple):
    """Where an output is written first, and where it goes."""

    temporary: Path
    target: Path
    is_stream: bool

    @classmethod
    def of(cls, path: Path) -> _Place:
        """The place of an output; the folder is made if need be."""
        if is_stream(path):
            return cls(Path(tempfile.gettempdir(), f".{path.name}.{os.getpid()}.tmp"), path, True)
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        return cls(target.with_name(f".{target.name}.{os.getpid()}.tmp"), target, False)

    @property
    def previous(self) -> Path:
        """Where the old content is kept until the whole set is in place."""
        return self.temporary.with_name(f"{self.temporary.name}.previous.tmp")


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Whether a path is of something that is written to, not replaced: a device, a pipe, a socket."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _flush(path: Path) -> None:
    """Have a file, or all files of a folder, on the disk."""
    for file in [path] if path.is_file() else [part for part in path.rglob("*") if part.is_file()]:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def _move(places: Sequence[_Place]) -> None:
    """Give finished outputs their names: streams first, since a full one fails."""
    for place in places:
        if place.is_stream:
            with place.temporary.open("rb") as source, open(place.target, "wb") as target:
                shutil.copyfileobj(source, target)
    moves = [place for place in places if not place.is_stream]
    if len(moves) == 1 and not moves[0].target.is_dir():  # one file is moved in one step
        _keep_mode(moves[0])
        moves[0].temporary.replace(moves[0].target)
    elif moves:
        _move_set(moves)


def _move_set(moves: Sequence[_Place]) -> None:
    """Move several outputs, or a folder, in such a way that a killed process can be rolled back."""
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
    """Give a file the permissions of the one that it replaces."""
    if place.target.exists():
        shutil.copymode(place.target, place.temporary)


def _keep(place: _Place) -> None:
    """Keep an old file aside; where the file system has no hard links, as a copy."""
    try:
        os.link(place.target, place.previous)
    except OSError:
        shutil.copy2(place.target, place.previous)


def _journal(first: Path) -> Path:
    """The file that lists a set while it is moved into place."""
    return first.with_name(f".{first.name}.set.tmp")


def _write_journal(journal: Path, places: Sequence[_Place]) -> None:
    """List what is about to be moved where."""
    rows = [[str(place.target), str(place.previous), place.temporary.stat().st_ino] for place in places]
    draft = journal.with_name(f"{journal.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(rows), encoding="utf-8")
    _flush(draft)
    draft.replace(journal)


def _roll_back(journal: Path) -> None:
    """Take away what a set that is not whole has put in place, and put back what was there before."""
    for target, previous, inode in json.loads(journal.read_text(encoding="utf-8")):
        new, old = Path(target), Path(previous)
        if new.exists() and new.stat().st_ino == inode:
            remove(new)
        if old.exists() and not new.exists():
            old.replace(new)
    journal.unlink()


def remove(path: Path) -> None:
    """Delete a file, a link or a folder with all that is in it; nothing happens where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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


def remove_leftovers(*paths: Path) -> None:
    """Take away what processes that were killed while they wrote `paths` have left.

    A set of `replacing_all` that was moved in part is rolled back.

    Args:
        paths: of the set, the first one first; or of single files.
    """
    for path in paths:
        target = Path(os.path.realpath(path))
        if _journal(target).is_file():
            _roll_back(_journal(target))
        own = re.compile(rf"\.{re.escape(target.name)}\.(\d+|set)\.tmp(\.\w+\.tmp)?")
        for remains in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
            if own.fullmatch(remains.name):
                remove(remains)


def check_input(option: str, path: str | os.PathLike[str]) -> None:
    """Check that a path is of a regular file that can be read.

    Args:
        option: what names the path, for messages.
        path: of the file.

    Raises:
        UserError: there is no such file, it is a folder, a device or a pipe, or must not be read.
    """
    name = os.fspath(path)
    if "\0" in name:
        raise UserError(f"{option}: the path {name!r} holds a NUL byte; check the path")
    try:
        mode = os.stat(name).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{option}: no such file: {name}; check the path") from None
    except OSError as error:
        raise UserError(f"{option}: {os_error_line(error)}") from None
    if stat.S_ISDIR(mode):
        raise UserError(f"{option}: {name} is a folder; name a file")
    if not stat.S_ISREG(mode):
        raise UserError(f"{option}: {name} is a device or a pipe; write its content to a file and name that")
    if not os.access(name, os.R_OK):
        raise UserError(f"{option}: {name} cannot be read; check its permissions")


def check_outputs(
    outputs: Mapping[str, str | os.PathLike[str] | None],
    inputs: Mapping[str, str | os.PathLike[str] | None],
    force: bool = False,
) -> None:
    """Check that no output is an input or another output, nor, without `force`, is there already.

    Links and hard links are resolved. What is written to as a stream (`is_stream`) may be there.

    Args:
        outputs: path by option; None for one that is not given.
        inputs: likewise.
        force: replace outputs that are there; inputs are never replaced.

    Raises:
        UserError: names the option, the path and what to do.
    """
    taken = {option: path for option, path in inputs.items() if path is not None}
    for option, path in outputs.items():
        if path is None:
            continue
        if "\0" in os.fspath(path):
            raise UserError(f"{option}: the path {os.fspath(path)!r} holds a NUL byte; check the path")
        if is_stream(path):
            continue
        for other, used in taken.items():
            if _overwrites(path, used):
                raise UserError(f"{option}: {path} would replace the file of {other}; name another one")
        if not force and os.path.exists(path):
            raise UserError(
                f"{option}: {path} is there already; add --force to replace it, or name another one"
            )
        taken[option] = path


def _overwrites(output: str | os.PathLike[str], used: str | os.PathLike[str]) -> bool:
    """Whether to write `output` would change `used`: they are one, or `used` lies in the folder `output`,
    or `output` is a file that is there in the folder `used`.
    """
    if os.path.exists(output) and os.path.exists(used) and os.path.samefile(output, used):
        return True
    new, old = Path(os.path.realpath(output)), Path(os.path.realpath(used))
    return new == old or new in old.parents or (old in new.parents and new.exists())


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
