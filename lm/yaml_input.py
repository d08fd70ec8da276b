"""Settings as people give them: a YAML file and ``-key value`` on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lm.errors import UserError
from shared_embeddings.command_line import EXPONENT


def from_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """The mapping that ``-config FILE -key value …`` stands for; the command line goes before the file.

    Raises:
        UserError: an argument that is no key, a key without a value, or a file that cannot be read.
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
    if not path.is_file():
        raise UserError(f"config {path}: no such file; check the path")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"config {path}: is no UTF-8 text; give a YAML file") from None
    content = parse_yaml(text, f"config {path}")
    if not isinstance(content, dict):
        raise UserError(f"config {path}: holds no mapping; write one 'key: value' per line")
    return {str(key): value for key, value in content.items()}


class _Loader(yaml.SafeLoader):
    """YAML whose numbers may be written 1e-3, which PyYAML takes for text, and whose keys are distinct."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+0123456789"))


def parse_yaml(text: str, source: str) -> Any:
    """What a YAML text says; `source` names it in errors.

    Raises:
        UserError: it is not YAML, or gives a key twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        raise UserError(f"{source}: cannot be read as YAML: {error}") from None
