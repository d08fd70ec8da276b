"""How a command uses the paths of its options, and checks before any work."""

from __future__ import annotations

import argparse
import enum
import itertools
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.old_files import AnyPath, followed, is_stream, os_error_line, remove_leftovers

# The value of an option or of a key of a table: None, a path, or several.
Given = AnyPath | Sequence[AnyPath] | None


class PathOption(enum.Enum):
    """How a command uses the path of an option; the ``type`` of the option."""

    FILE = enum.auto()  # reads a file
    SOURCE = enum.auto()  # reads a file or a folder
    MODEL = enum.auto()  # likewise, or a model of the Hugging Face Hub by its name
    NEW_FILE = enum.auto()  # writes a file; replaces an existing one only with ``--force``
    NEW = enum.auto()  # like ``NEW_FILE``, for a file or a folder
    OUTPUT = enum.auto()  # writes a file; replaces an existing one
    UPDATED = enum.auto()  # reads a file and replaces it
    FOLDER = enum.auto()  # manages a folder and checks its files itself

    def __call__(self, text: str) -> Path:
        return Path(text)

    @property
    def is_read(self) -> bool:
        return self in (PathOption.FILE, PathOption.SOURCE, PathOption.MODEL)


def is_hub_name(text: AnyPath) -> bool:
    """Whether a path that does not exist may be the name of a model on the Hugging Face Hub."""
    name = os.fspath(text)
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None and not os.path.lexists(name.split("/")[0])


def check_path_options(actions: Iterable[argparse.Action], given: argparse.Namespace) -> None:
    """Check the paths of a command line, whose options have a `PathOption` as their type; see `check_paths`.

    With the option ``force``, the command may replace existing files, but never an input. Defaults are not
    checked. An output in `given` that is a symbolic link becomes the target of the link, which is replaced.
    """
    table, outputs = {}, {}
    for action in actions:
        value = getattr(given, action.dest, None)
        if not isinstance(action.type, PathOption):
            continue
        if value is not action.default:
            table[(*action.option_strings, action.dest)[0]] = (action.type, value)
        if not action.type.is_read:
            outputs[action.dest] = value
    check_paths(table, bool(getattr(given, "force", False)))
    for name, value in outputs.items():
        if isinstance(value, Path):
            setattr(given, name, followed(value))
        elif isinstance(value, list):
            setattr(given, name, [*map(followed, value)])


def check_paths(table: Mapping[str, tuple[PathOption, Given]], force: bool = False) -> None:
    """Check that inputs are readable and outputs writable, before any work.

    No output may be an input or another output. Leftovers of killed processes are deleted first.

    Args:
        table: option -> how the command uses it, and its value.
        force: allow outputs to replace existing files.

    Raises:
        UserError: names the option and the path.
    """
    inputs: dict[str, AnyPath] = {}
    kept: dict[str, AnyPath] = {}
    replaced: dict[str, AnyPath] = {}
    for option, (kind, given) in table.items():
        paths = numbered(option, given)
        if kind.is_read:
            inputs.update(paths)
        elif kind in (PathOption.NEW_FILE, PathOption.NEW):
            kept.update(paths)
        elif kind is not PathOption.FOLDER:
            replaced.update(paths)
        for name, path in paths.items():
            check_no_nul(name, path)
            is_file = kind in (PathOption.FILE, PathOption.UPDATED)
            is_source = kind is PathOption.SOURCE or (kind is PathOption.MODEL and not is_hub_name(path))
            if is_file or (is_source and not os.path.isdir(path)):
                check_input(name, path)
            if kind.is_read or is_stream(path):
                continue
            if not can_be_created(path):
                raise UserError(f"{name}: {path} cannot be written; name a path in a writable folder")
            if kind is PathOption.FOLDER:
                if os.path.isfile(path):
                    raise UserError(f"{name}: {path} is a file; name a folder")
                if not os.path.exists(path) and os.path.islink(path):
                    raise UserError(
                        f"{name}: {path} is a link to nothing; create its target, or name a folder"
                    )
            elif os.path.isdir(path) and (kind is not PathOption.NEW or os.path.ismount(path)):
                raise UserError(f"{name}: {path} is a folder; name a file")
            remove_leftovers(Path(path))
    check_outputs(kept, inputs, force)
    for (option, path), (other, folder) in itertools.product(replaced.items(), kept.items()):
        if not is_stream(path) and Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents:
            raise UserError(
                f"{option}: {path} is inside {other}, which is written as a whole; name another one"
            )
    check_outputs(replaced, {**inputs, **kept}, force=True)


def check_new_files(outputs: Sequence[Path], force: bool, model: Path | None = None) -> None:
    """Check that files of ``--output``, whose names a command chooses, can be written; see `check_paths`."""
    table = {f"--output ({path.name})": (PathOption.NEW_FILE, path) for path in outputs}
    check_paths({"--model": (PathOption.SOURCE, model), **table}, force)


def numbered(option: str, given: Given) -> dict[str, AnyPath]:
    """The paths of an option by its name, with a number if there are several."""
    if given is None or given == "":
        return {}
    if isinstance(given, (str, os.PathLike)):
        return {option: given}
    return {
        option if len(given) == 1 else f"{option} ({number})": path for number, path in enumerate(given, 1)
    }


def check_no_nul(option: str, path: AnyPath) -> None:
    """Raise `UserError` for a path with a NUL byte, which no file system allows."""
    if "\0" in os.fspath(path):
        raise UserError(f"{option}: the path {os.fspath(path)!r} contains a NUL byte; check the path")


def check_input(option: str, path: AnyPath) -> None:
    """Check that the path of an option is a readable regular file.

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

    Both are paths by option. Symbolic and hard links are resolved. Streams (`is_stream`) may exist. Inputs
    are never replaced.

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
            is_same = os.path.exists(path) and os.path.exists(used) and os.path.samefile(path, used)
            new, old = Path(os.path.realpath(path)), Path(os.path.realpath(used))
            # `used` may be inside the folder `path`, or `path` inside the folder `used`, which is replaced as
            # a whole if it is another output.
            is_inside = old in new.parents and (new.exists() or (other in outputs and old.exists()))
            if is_same or new == old or new in old.parents or is_inside:
                raise UserError(f"{option}: {path} would replace the file of {other}; name another one")
        if not force and os.path.lexists(path):  # a link to nothing would create its target
            raise UserError(
                f"{option}: {path} already exists; add --force to replace it, or name another one"
            )
        taken[option] = path


def can_be_created(path: AnyPath) -> bool:
    """Whether the parent folder of `path` is writable, or can be created."""
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return os.path.isdir(folder) and os.access(folder, os.W_OK)
