"""Read YAML and JSON from users: plain values only, bounded in depth and size."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from shared_embeddings.utils.command_line import EXPONENT
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import first_line
from shared_embeddings.utils.path_options import check_input

MAX_DEPTH = 100
MAX_VALUES = 1_000_000  # of a YAML document with its aliases expanded
_PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)$")
_FRACTION = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$")
_MERGE = "tag:yaml.org,2002:merge"


class DocumentError(UserError):
    """A document that cannot be read; the one-line message names it and the problem."""


def read_yaml(path: Path, option: str = "file") -> Any:
    """The content of a YAML file; see `parse_yaml`.

    Args:
        path: the file.
        option: the option that names it, for messages.

    Raises:
        UserError: the file cannot be read, or `parse_yaml` fails.
    """
    return parse_yaml(_read_text(path, option), f"{option} {path}")


def read_json(path: Path, option: str = "file") -> Any:
    """The content of a JSON file; see `parse_json`. Raises like `read_yaml`."""
    return parse_json(_read_text(path, option), f"{option} {path}")


def read_yaml_as_text(path: Path, option: str = "file") -> Any:
    """Like `read_yaml`, but every scalar stays text: 60.90 stays "60.90"."""
    return _parse(_read_text(path, option), f"{option} {path}", _TextLoader)


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML text. Unlike in plain PyYAML, 1e-3 is a number, and 1_0, 010, 1:30 and .inf are texts.

    Args:
        text: at most `MAX_DEPTH` levels deep, with at most `MAX_VALUES` values after expanding aliases.
        where: the document's name in errors.

    Raises:
        DocumentError: the text is not YAML, repeats a key, has a key that is not a string or a value that is
            not plain, or is too deep or too large.
    """
    return _parse(text, where, _Loader)


def parse_json(text: str, where: str) -> Any:
    """Parse a JSON text.

    Args:
        text: at most `MAX_DEPTH` levels deep.
        where: the document's name in errors.

    Raises:
        DocumentError: the text is not JSON, repeats a key, or is too deep.
    """

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            raise DocumentError(f"{where}: the key {_repeated(key for key, _ in pairs)!r} is given twice")
        return content

    try:
        content = json.loads(text, object_pairs_hook=distinct)
    except DocumentError:
        raise
    except RecursionError:
        raise DocumentError(_too_deep(where)) from None
    except ValueError as error:
        raise DocumentError(f"{where}: cannot be read as JSON: {first_line(error)}") from None
    if _is_deep(content):
        raise DocumentError(_too_deep(where))
    return content


def _parse(text: str, where: str, kind: type[_Loader]) -> Any:
    """Parse a YAML text with a loader; see `parse_yaml`."""
    try:
        loader = kind(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise DocumentError(f"{where}: cannot be read as YAML: {_yaml_reason(error)}") from None
    except RecursionError:
        raise DocumentError(_too_deep(where)) from None
    except (ValueError, OverflowError) as error:
        raise DocumentError(f"{where}: {first_line(error)}") from None


def _read_text(path: Path, option: str) -> str:
    """The text of a file, without a byte order mark."""
    check_input(option, path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DocumentError(f"{option} {path}: is not UTF-8 text") from None


def _too_deep(where: str) -> str:
    return f"{where}: is nested more than {MAX_DEPTH} levels deep"


def _yaml_reason(error: yaml.YAMLError) -> str:
    """PyYAML's error message on one line, with line and column."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem:
        mark = error.problem_mark or error.context_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        return f"{first_line(ValueError(error.problem))}{place}"
    return " ".join(str(error).split())[:200]


def _repeated(keys: Iterable[str]) -> str:
    """The first key that occurred before."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    raise AssertionError("no key is repeated")


def _is_readable(text: str) -> bool:
    """Whether a text has no NUL bytes, which are invalid in paths, and no surrogates, invalid in UTF-8."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def _is_deep(content: Any) -> bool:
    """Whether lists and mappings are nested more than `MAX_DEPTH` deep; walks without recursion."""
    level = [content]
    for _ in range(MAX_DEPTH + 1):
        level = [
            part
            for value in level
            if isinstance(value, (dict, list))
            for part in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return False
    return True


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
        """Build a plain value."""
        if node.tag not in _PLAIN:
            raise yaml.constructor.ConstructorError(
                None, None, f"{node.tag!r} is not a plain value", node.start_mark
            )
        value = super().construct_object(node, deep=True)
        if isinstance(value, str) and not _is_readable(value):
            raise yaml.constructor.ConstructorError(
                None, None, f"the text {value[:40]!r} contains NUL or surrogate characters", node.start_mark
            )
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping with distinct string keys; ``<<`` merges other mappings into it."""
        own = [self._key(key) for key, _ in node.value if key.tag != _MERGE]
        if len(set(own)) < len(own):
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {_repeated(own)!r} is given twice", node.start_mark
            )
        return super().construct_mapping(node, deep=True)

    def _key(self, node: yaml.Node) -> str:
        """The key of a node."""
        key = self.construct_object(node) if isinstance(node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            written = node.value if isinstance(node, yaml.ScalarNode) else "a list or mapping"
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {written!r} is not text; put it in quotes", node.start_mark
            )
        return key


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

    Raises:
        ValueError: a node contains an alias to itself.
    """
    known = sizes.get(id(node))
    if known == 0:
        raise ValueError("an alias refers to a value that contains it")
    if known is not None:
        return known
    sizes[id(node)] = 0
    total = 1
    if isinstance(node, yaml.SequenceNode):
        total += sum(_size(item, sizes) for item in node.value)
    elif isinstance(node, yaml.MappingNode):
        total += sum(_size(key, sizes) + _size(value, sizes) for key, value in node.value)
    sizes[id(node)] = total
    return total
