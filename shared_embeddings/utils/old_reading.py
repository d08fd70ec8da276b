"""Read YAML and JSON from users: plain values only, bounded in depth and size."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import yaml

from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.old_command_line import EXPONENT
from shared_embeddings.utils.old_files import first_line
from shared_embeddings.utils.path_options import check_input

MAX_DEPTH = 100
MAX_VALUES = 1_000_000  # of a YAML document with its aliases expanded
_PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)$")
_FRACTION = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$")
# NUL bytes are invalid in paths, surrogates in UTF-8.
_UNREADABLE = re.compile("[\0\ud800-\udfff]")


class DocumentError(UserError):
    """A document that cannot be read; the one-line message names it and the problem."""


def read_yaml(path: Path, option: str = "file") -> Any:
    """The content of a YAML file, see `parse_yaml`; messages name the `option`."""
    return parse_yaml(_read_text(path, option), f"{option} {path}")


def read_json(path: Path, option: str = "file") -> Any:
    """The content of a JSON file, see `parse_json`; messages name the `option`."""
    return parse_json(_read_text(path, option), f"{option} {path}")


def read_yaml_as_text(path: Path, option: str = "file") -> Any:
    """Like `read_yaml`, but every scalar stays text: 60.90 stays "60.90"."""
    return _parse_yaml(_read_text(path, option), f"{option} {path}", _TextLoader)


def _read_text(path: Path, option: str) -> str:
    """The text of a file, without a byte order mark."""
    check_input(option, path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DocumentError(f"{option} {path}: is not UTF-8 text") from None


def parse_json(text: str, where: str) -> Any:
    """Parse a JSON text, at most `MAX_DEPTH` levels deep; the document is `where` in errors.

    DocumentError if the text is not JSON, repeats a key, or is too deep.
    """

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _check_distinct(key for key, _ in pairs)
        return dict(pairs)

    try:
        content = json.loads(text, object_pairs_hook=distinct)
        level = [content]
        for _ in range(MAX_DEPTH + 1):
            level = [
                part
                for one in level
                if isinstance(one, (dict, list))
                for part in (one.values() if isinstance(one, dict) else one)
            ]
        if level:
            raise RecursionError
    except json.JSONDecodeError as error:
        raise DocumentError(f"{where}: cannot be read as JSON: {first_line(error)}") from None
    except RecursionError:
        raise DocumentError(f"{where}: is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise DocumentError(f"{where}: {first_line(error)}") from None
    return content


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML text. Unlike in plain PyYAML, 1e-3 is a number, and 1_0, 010, 1:30 and .inf are texts.

    Args:
        text: at most `MAX_DEPTH` levels deep, with at most `MAX_VALUES` values after expanding aliases.
        where: the document's name in errors.

    Raises:
        DocumentError: the text is not YAML, repeats a key, has a key that is not a string or a value that is
            not plain, or is too deep or too large.
    """
    return _parse_yaml(text, where, _Loader)


def _parse_yaml(text: str, where: str, kind: type[_Loader]) -> Any:
    try:
        loader = kind(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        reason, mark = " ".join(str(error).split())[:200], None
        if isinstance(error, yaml.MarkedYAMLError) and error.problem:
            reason, mark = first_line(ValueError(error.problem)), error.problem_mark or error.context_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise DocumentError(f"{where}: cannot be read as YAML: {reason}{place}") from None
    except RecursionError:
        raise DocumentError(f"{where}: is nested more than {MAX_DEPTH} levels deep") from None
    except (ValueError, OverflowError) as error:
        raise DocumentError(f"{where}: {first_line(error)}") from None


def _check_distinct(keys: Iterable[str]) -> None:
    for key, number in Counter(keys).items():
        if number > 1:
            raise ValueError(f"the key {key!r} is given twice")


class _Loader(yaml.SafeLoader):
    """A loader of plain values with distinct string keys, bounded depth and bounded aliases."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a value; fails beyond `MAX_DEPTH`."""
        self.depth += 1
        if self.depth > MAX_DEPTH + 1:
            raise RecursionError
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def get_single_node(self) -> yaml.Node | None:
        """Compose the document; fails before building values if aliases make it too large."""
        node = super().get_single_node()
        if node is not None and _size(node, {}) > MAX_VALUES:
            raise ValueError(f"has more than {MAX_VALUES:,} values with its aliases expanded")
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag not in _PLAIN:
            _refuse(node, f"{node.tag!r} is not a plain value")
        value = super().construct_object(node, deep=True)
        if isinstance(value, str) and _UNREADABLE.search(value):
            _refuse(node, f"the text {value[:40]!r} contains NUL or surrogate characters")
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping with distinct string keys; ``<<`` merges other mappings into it."""
        keys: list[Any] = []
        for key in (key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"):
            is_scalar = isinstance(key, yaml.ScalarNode)
            keys.append(self.construct_object(key) if is_scalar else None)
            if not isinstance(keys[-1], str):
                written = key.value if is_scalar else "a list or mapping"
                _refuse(key, f"the key {written!r} is not text; put it in quotes")
        try:
            _check_distinct(keys)
        except ValueError as error:
            _refuse(node, str(error))
        return super().construct_mapping(node, deep=True)


def _refuse(node: yaml.Node, problem: str) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


# Dates stay text, since no setting is one, and so do other numbers of YAML 1.1: 1_0, 010 (8), 1:30 (90).
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":int", ":float"))
    ]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
for _kind, _number in [("int", _WHOLE), ("float", _FRACTION), ("float", EXPONENT)]:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _number, list("-+.0123456789"))


class _TextLoader(_Loader):
    """Like `_Loader`, but every scalar stays text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own attribute)


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """The number of values of a node with its aliases expanded.

    Args:
        node: a node of a document.
        sizes: sizes of visited nodes; 0 for nodes that are being counted.
    """
    if sizes.get(id(node)) == 0:
        raise ValueError("an alias refers to a value that contains it")
    if id(node) not in sizes:
        sizes[id(node)] = 0
        parts = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        sizes[id(node)] = 1 + sum(_size(part, sizes) for part in parts)
    return sizes[id(node)]
