"""Options that name files: what a command does with each of them, and the checks that follow from it."""

from __future__ import annotations

import argparse
import enum
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import can_be_made, check_input, check_outputs, is_stream, remove_leftovers

# What one option, or one key of a table, gives: nothing, a path, or several.
Given = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None


class PathOption(enum.Enum):
    """What a command does with the path of an option; used as the ``type`` of the option.

    Attributes:
        FILE: reads a file.
        SOURCE: reads a file or a folder.
        NEW_FILE: writes a file, over one that is there only with ``--force``.
        NEW: the same for what may be a folder, too.
        OUTPUT: writes a file, over an earlier one as well.
        UPDATED: reads a file and writes it again.
        FOLDER: manages a folder, whose files the command checks itself.
    """

    FILE = enum.auto()
    SOURCE = enum.auto()
    NEW_FILE = enum.auto()
    NEW = enum.auto()
    OUTPUT = enum.auto()
    UPDATED = enum.auto()
    FOLDER = enum.auto()

    def __call__(self, text: str) -> Path:
        """Return the path that a command line names."""
        return Path(text)

    @property
    def is_read(self) -> bool:
        """Whether the command reads it, and never writes it."""
        return self in (PathOption.FILE, PathOption.SOURCE)


def check_path_options(actions: Iterable[argparse.Action], given: argparse.Namespace) -> None:
    """Check the paths of a command line by what its parser says of them.

    An option ``force`` lets the command replace what is there; nothing lets it replace an input. Defaults are
    the command's own business.

    Args:
        actions: of the parser.
        given: what was parsed.

    Raises:
        UserError: see `check_paths`.
        TypeError: an option is a path of which the parser does not say what becomes of it.
    """
    table = {}
    for action in actions:
        if action.type is Path:
            raise TypeError(
                f"{action.dest}: its type must be a PathOption, which says what becomes of the path"
            )
        value = getattr(given, action.dest, None)
        if isinstance(action.type, PathOption) and value is not action.default:
            name = action.option_strings[0] if action.option_strings else action.dest
            table[name] = (action.type, value)
    check_paths(table, bool(getattr(given, "force", False)))


def check_paths(table: Mapping[str, tuple[PathOption, Given]], force: bool = False) -> None:
    """Check that inputs can be read and outputs can be written, before any work.

    No output may be an input or another output. What a killed process has left of outputs is cleared first.

    Args:
        table: option -> what the command does with it, and its value.
        force: replace outputs that are there.

    Raises:
        UserError: names the option, the path and what to do.
    """
    inputs: dict[str, str | os.PathLike[str] | None] = {}
    kept: dict[str, str | os.PathLike[str] | None] = {}
    replaced: dict[str, str | os.PathLike[str] | None] = {}
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


def numbered(option: str, given: Given) -> dict[str, str | os.PathLike[str]]:
    """The paths of an option by its name, with a number where there are several."""
    if given is None or given == "":
        return {}
    if isinstance(given, (str, os.PathLike)):
        return {option: given}
    return {
        option if len(given) == 1 else f"{option} ({number})": path for number, path in enumerate(given, 1)
    }


def _check_path(option: str, path: str | os.PathLike[str], kind: PathOption) -> None:
    """Check one path by itself.

    Raises:
        UserError: it cannot be read, or not written.
    """
    if "\0" in os.fspath(path):
        raise UserError(f"{option}: the path {os.fspath(path)!r} holds a NUL byte; check the path")
    is_file = kind in (PathOption.FILE, PathOption.UPDATED)
    if is_file or (kind is PathOption.SOURCE and not os.path.isdir(path)):
        check_input(option, path)
    if kind.is_read or is_stream(path):
        return
    if not can_be_made(path):
        raise UserError(f"{option}: {path} cannot be written; name one in a folder that can")
    if kind is PathOption.FOLDER:
        if os.path.isfile(path):
            raise UserError(f"{option}: {path} is a file; name a folder")
        return
    if os.path.isdir(path) and (kind is not PathOption.NEW or os.path.ismount(path)):
        raise UserError(f"{option}: {path} is a folder; name a file")
    remove_leftovers(Path(path))
