"""Settings from a YAML file and from ``-key value`` on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared_embeddings.errors import UserError
from shared_embeddings.utils.reading import parse_yaml, read_yaml


def from_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse ``-config FILE -key value …``; the command line overrides the file.

    Raises:
        UserError: an argument is not a key, a key has no value or is repeated, or the file cannot be read.
    """
    given: dict[str, Any] = {}
    path = None
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not re.match(r"--?[a-zA-Z]", argument):
            raise UserError(f"unexpected argument {argument!r}; write -key value, see --help")
        key, separator, value = argument.lstrip("-").partition("=")
        if not separator:
            if not rest:
                raise UserError(f"'{key}' has no value; write -{key} VALUE")
            value = rest.pop(0)
        if key in given or (key == "config" and path is not None):
            raise UserError(f"'{key}' is repeated on the command line; remove one")
        if key == "config":
            path = Path(value)
        else:
            given[key] = parse_yaml(value, f"-{key}")
    return {**(read_file(path) if path else {}), **given}


def read_file(path: Path) -> dict[str, Any]:
    """Read the mapping in a configuration file.

    Raises:
        UserError: the file is missing or not a YAML mapping.
    """
    content = read_yaml(path, "config")
    if not isinstance(content, dict):
        raise UserError(f"config {path}: is not a mapping; write one 'key: value' per line")
    return content
