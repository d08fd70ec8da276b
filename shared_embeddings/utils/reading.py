"""Documents that people write, in YAML and JSON: plain values only, bounded in depth and size."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import EXPONENT
from shared_embeddings.utils.files import check_input, first_line

MAX_DEPTH = 100
MAX_VALUES = 1_000_000  # of a YAML document, with every alias written out
_PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}
_MERGE = "tag:yaml.org,2002:merge"


class DocumentError(UserError):
    """A document that cannot be read; the message names it and says in one line what is wrong."""


def read_yaml(path: Path, option: str = "file") -> Any:
    """The content of a YAML file; see `parse_yaml`.

    Args:
        path: of the file.
        option: that names the file, for messages.

    Raises:
        UserError: there is no such regular file, or its content is not as `parse_yaml` wants it.
    """
    return parse_yaml(_read_text(path, option), f"{option} {path}")


def read_json(path: Path, option: str = "file") -> Any:
    """The content of a JSON file; see `parse_json`, and `read_yaml` for what is raised."""
    return parse_json(_read_text(path, option), f"{option} {path}")


def read_yaml_as_text(path: Path, option: str = "file") -> Any:
    """The content of a YAML file as `read_yaml`, but every value stays text: 60.90 stays 60.90."""
    return _parse(_read_text(path, option), f"{option} {path}", _TextLoader)


def parse_yaml(text: str, where: str) -> Any:
    """The plain values of a YAML text. Numbers may be written 1e-3, which PyYAML takes for text.

    Args:
        text: at most `MAX_DEPTH` deep and, with every alias written out, of at most `MAX_VALUES` values.
        where: what errors call it.

    Raises:
        DocumentError: it is not YAML, gives a key twice, has a key that is not a string or a value that is
            not plain, or is too deep or too large.
    """
    return _parse(text, where, _Loader)


def parse_json(text: str, where: str) -> Any:
    """The values of a JSON text, at most `MAX_DEPTH` deep.

    Args:
        text: the document.
        where: what errors call it.

    Raises:
        DocumentError: it is not JSON, gives a key twice, or is too deep.
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
    """The values that a loader finds in a YAML text; see `parse_yaml`."""
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
    """The text of a file, without the mark that some editors put at its start."""
    check_input(option, path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DocumentError(f"{option} {path}: is not UTF-8 text") from None


def _too_deep(where: str) -> str:
    return f"{where}: is nested more than {MAX_DEPTH} deep"


def _yaml_reason(error: yaml.YAMLError) -> str:
    """PyYAML's account of an error in one line, its place included."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem:
        mark = error.problem_mark or error.context_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        return f"{first_line(ValueError(error.problem))}{place}"
    return " ".join(str(error).split())[:200]


def _repeated(keys: Iterable[str]) -> str:
    """The first key that came before."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    raise AssertionError("no key is repeated")


def _is_readable(text: str) -> bool:
    """Whether a text has no NUL byte, which no path has, and no half of a character, which no file has."""
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
    """Plain values, distinct keys that are strings, bounded depth and bounded aliases."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a value, not too deep."""
        self.depth += 1
        if self.depth > MAX_DEPTH + 1:
            raise RecursionError
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def get_single_node(self) -> yaml.Node | None:
        """Compose the document; it fails before anything is built when aliases make it too large."""
        node = super().get_single_node()
        if node is not None and _size(node, {}) > MAX_VALUES:
            raise ValueError(f"holds more than {MAX_VALUES:,} values with its aliases written out")
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Build a value of a plain kind."""
        if node.tag not in _PLAIN:
            raise yaml.constructor.ConstructorError(
                None, None, f"{node.tag!r} is not a plain value", node.start_mark
            )
        value = super().construct_object(node, deep=True)
        if isinstance(value, str) and not _is_readable(value):
            raise yaml.constructor.ConstructorError(
                None, None, f"the text {value[:40]!r} has characters that no text has", node.start_mark
            )
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping whose own keys are distinct strings; ``<<`` merges others into it."""
        own = [self._key(key) for key, _ in node.value if key.tag != _MERGE]
        if len(set(own)) < len(own):
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {_repeated(own)!r} is given twice", node.start_mark
            )
        return super().construct_mapping(node, deep=True)

    def _key(self, node: yaml.Node) -> str:
        """The key that a node stands for."""
        key = self.construct_object(node) if isinstance(node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            written = node.value if isinstance(node, yaml.ScalarNode) else "a list or mapping"
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {written!r} is not text; put it in quotes", node.start_mark
            )
        return key


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+0123456789"))
# Dates stay text: no setting here is one.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


class _TextLoader(_Loader):
    """As `_Loader`, but every value is text, as it is written."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own attribute)


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """How many values a node stands for, with every alias written out.

    Args:
        node: of a document.
        sizes: those of nodes that were seen; 0 for those that are being counted.

    Raises:
        ValueError: an alias stands inside of what it refers to.
    """
    known = sizes.get(id(node))
    if known == 0:
        raise ValueError("an alias refers to what it stands in")
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
