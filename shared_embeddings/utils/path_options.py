"""Option types for paths: how a command uses each path, and checks before any work."""

from __future__ import annotations

import argparse
import enum
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import (
    AnyPath,
    can_be_created,
    check_input,
    check_no_nul,
    check_outputs,
    followed,
    is_stream,
    remove_leftovers,
)

# The value of an option or of a key of a table: None, a path, or several.
Given = AnyPath | Sequence[AnyPath] | None


class PathOption(enum.Enum):
    """How a command uses the path of an option; the ``type`` of the option.

    Attributes:
        FILE: reads a file.
        SOURCE: reads a file or a folder.
        NEW_FILE: writes a file; replaces an existing one only with ``--force``.
        NEW: like ``NEW_FILE``, for a file or a folder.
        OUTPUT: writes a file; replaces an existing one.
        UPDATED: reads a file and replaces it.
        FOLDER: manages a folder and checks its files itself.
    """

    FILE = enum.auto()
    SOURCE = enum.auto()
    NEW_FILE = enum.auto()
    NEW = enum.auto()
    OUTPUT = enum.auto()
    UPDATED = enum.auto()
    FOLDER = enum.auto()

    def __call__(self, text: str) -> Path:
        """Convert the text of a command line."""
        return Path(text)

    @property
    def is_read(self) -> bool:
        """Whether the command only reads the path."""
        return self in (PathOption.FILE, PathOption.SOURCE)


def check_path_options(actions: Iterable[argparse.Action], given: argparse.Namespace) -> None:
    """Check the paths of a command line, whose options have a `PathOption` as their type.

    An output that is a symbolic link becomes the target of the link, which is replaced.

    With the option ``force``, the command may replace existing files, but never an input. Defaults are not
    checked.

    Args:
        actions: the options of the parser.
        given: the parsed arguments; is modified.

    Raises:
        UserError: see `check_paths`.
        TypeError: the type of an option is `Path`.
    """
    table = {}
    for action in actions:
        if action.type is Path:
            raise TypeError(f"{action.dest}: its type must be a PathOption, not Path")
        value = getattr(given, action.dest, None)
        if isinstance(action.type, PathOption) and value is not action.default:
            name = action.option_strings[0] if action.option_strings else action.dest
            table[name] = (action.type, value)
    check_paths(table, bool(getattr(given, "force", False)))
    for action in actions:
        value = getattr(given, action.dest, None)
        if not isinstance(action.type, PathOption) or action.type.is_read:
            continue
        if isinstance(value, Path):
            setattr(given, action.dest, followed(value))
        elif isinstance(value, list):
            setattr(given, action.dest, list(map(followed, value)))


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
            _check_path(name, path, kind)
    check_outputs(kept, inputs, force)
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


def _check_path(option: str, path: AnyPath, kind: PathOption) -> None:
    """Check a single path.

    Raises:
        UserError: it cannot be read or written.
    """
    check_no_nul(option, path)
    is_file = kind in (PathOption.FILE, PathOption.UPDATED)
    if is_file or (kind is PathOption.SOURCE and not os.path.isdir(path)):
        check_input(option, path)
    if kind.is_read or is_stream(path):
        return
    if not can_be_created(path):
        raise UserError(f"{option}: {path} cannot be written; name a path in a writable folder")
    if kind is PathOption.FOLDER:
        if os.path.isfile(path):
            raise UserError(f"{option}: {path} is a file; name a folder")
        if not os.path.exists(path) and os.path.islink(path):
            raise UserError(f"{option}: {path} is a link to nothing; create its target, or name a folder")
    elif os.path.isdir(path) and (kind is not PathOption.NEW or os.path.ismount(path)):
        raise UserError(f"{option}: {path} is a folder; name a file")
    remove_leftovers(Path(path))
