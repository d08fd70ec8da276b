"""Read lines, YAML and JSON from users; messages name the file."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import yaml

from shared_embeddings.utils.errors import UserError, first_line
from shared_embeddings.utils.files import AnyPath


class _Loader(yaml.SafeLoader):
    """PyYAML's loader of plain values, for which 1e-3 is a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def open_bytes(path: AnyPath) -> IO[bytes]:
    """Open a file for reading; its content is decompressed if its name ends in ``.gz``."""
    return cast(IO[bytes], gzip.open(path)) if os.fspath(path).endswith(".gz") else open(path, "rb")


def read_lines(path: AnyPath) -> Iterator[str]:
    """Yield the lines of a UTF-8 text without their ends and without a byte order mark at the beginning.

    Only a line feed ends a line, with or without a carriage return. The text may be compressed (``.gz``).
    UserError names a line that is not UTF-8.
    """
    with open_bytes(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                try:
                    yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError:
                    raise UserError(f"{path}: line {number} is not UTF-8 text; convert the file") from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{path}: cannot be decompressed ({first_line(error)}); get it again") from None


def read_text(path: AnyPath) -> str:
    """Return the content of a UTF-8 text without a byte order mark."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {error.start}); convert the file") from None


def read_yaml(path: AnyPath) -> Any:
    """Return the content of a YAML file, see `parse_yaml`."""
    return parse_yaml(read_text(path), str(path))


def read_json(path: AnyPath) -> Any:
    """Return the content of a JSON file."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, where: str) -> Any:
    """Parse a JSON text; UserError names the document `where`."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: cannot be read as JSON: {first_line(error)}") from None


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML text, where 1e-3 is a number, too; UserError names the document `where`."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        reason = getattr(error, "problem", None) or first_line(error)
        raise UserError(f"{where}: cannot be read as YAML: {reason}{place}") from None
