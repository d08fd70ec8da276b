"""Settings as people give them: a YAML file and ``-key value`` on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared_embeddings.errors import UserError
from shared_embeddings.utils.reading import parse_yaml, read_yaml


def from_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """The mapping that ``-config FILE -key value …`` stands for; the command line goes before the file.

    Raises:
        UserError: an argument that is no key, a key without a value or with two, or a file that cannot be
            read.
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
            raise UserError(f"'{key}' is given twice on the command line; give it once")
        if key == "config":
            path = Path(value)
        else:
            given[key] = parse_yaml(value, f"-{key}")
    return {**(read_file(path) if path else {}), **given}


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a configuration file.

    Raises:
        UserError: the file is missing, is no text, or holds no mapping.
    """
    content = read_yaml(path, "config")
    if not isinstance(content, dict):
        raise UserError(f"config {path}: holds no mapping; write one 'key: value' per line")
    return content
