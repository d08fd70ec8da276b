"""Types of command-line options that name files, and the check that no output is an input."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable
from pathlib import Path

from shared_embeddings.utils.errors import UserError


def existing_file(text: str) -> Path:
    """Return the path of a file that a command reads; an argparse type."""
    path = existing_path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file")
    return path


def existing_path(text: str) -> Path:
    """Return the path of a file or folder that a command reads; an argparse type."""
    if not os.path.exists(text):
        raise argparse.ArgumentTypeError(f"no such file: {text}; check the path")
    return Path(text)


def model_path(text: str) -> Path:
    """Return the path of a model, or a Hugging Face Hub id such as ``google/gemma``; an argparse type."""
    return Path(text) if is_hub_id(text) else existing_path(text)


def is_hub_id(text: str | os.PathLike[str]) -> bool:
    """Return whether a path that does not exist may be the id of a model on the Hugging Face Hub."""
    name = os.fspath(text)
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None and not os.path.lexists(name.split("/")[0])


def new_path(text: str) -> Path:
    """Return the path of an output, which must not exist unless ``--force`` is given; an argparse type."""
    return Path(text)


def output_path(text: str) -> Path:
    """Return the path of an output that replaces an existing one; an argparse type."""
    return Path(text)


def shared_table(text: str) -> str:
    """Return the name of a table that several processes write: outputs may exist; an argparse type."""
    return text


def check_outputs(outputs: Iterable[Path], inputs: Iterable[Path], force: bool) -> None:
    """Raise `UserError` if an output is an input or another output, or cannot be written, or exists.

    A folder is written as a whole, before outputs in it, such as a report.
    """
    read, written = [path.resolve() for path in inputs], list[Path]()
    for output in outputs:
        target = output.resolve()
        for path in [*read, *written]:
            is_same = path.exists() and target.exists() and path.samefile(target)
            is_part = path in read and target.is_relative_to(path) and target.exists()
            if is_same or is_part or path.is_relative_to(target):
                raise UserError(f"{output} would replace an input or another output; name another path")
        parent = next(folder for folder in target.parents if folder.exists())
        is_stream = output.exists() and not output.is_file() and not output.is_dir()
        if not is_stream and not (parent.is_dir() and os.access(parent, os.W_OK)):
            raise UserError(f"{output} cannot be written; name a path in a writable folder")
        if output.exists() and not force:
            raise UserError(f"{output} already exists; add --force to replace it, or name another path")
        written.append(target)
