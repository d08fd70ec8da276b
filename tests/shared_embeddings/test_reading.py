"""YAML and JSON documents: plain values, distinct keys, bounded depth and size."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared_embeddings.errors import UserError
from shared_embeddings.utils.reading import (
    DocumentError,
    parse_json,
    parse_yaml,
    read_json,
    read_yaml,
    read_yaml_as_text,
)

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join(f'*{old}' for _ in range(9))}]\n" for old, new in zip("abcdefgh", "bcdefghi")
)


def test_plain_values() -> None:
    text = "a: 1e-3\nb: [1, 2.5, true, null, text]\nc: {d: 2020-01-01}\ne: &x {f: 1, g: 2}\nh: {<<: *x, f: 3}"
    assert parse_yaml(text, "t") == {
        "a": 0.001,
        "b": [1, 2.5, True, None, "text"],
        "c": {"d": "2020-01-01"},
        "e": {"f": 1, "g": 2},
        "h": {"f": 3, "g": 2},
    }
    assert parse_yaml("", "t") is None
    assert parse_json('{"a": [1, {"b": null}]}', "t") == {"a": [1, {"b": None}]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 5000, "nested more than 100 levels deep"),
        ("[" * 5000 + "]" * 5000, "nested more than 100 levels deep"),
        ("{b: " * 300 + "1" + "}" * 300, "nested more than 100 levels deep"),
        ("a: 1\na: 2", "the key 'a' is given twice"),
        ("a: {b: 1, b: 2}", "the key 'b' is given twice"),
        ("5: a", "the key '5' is not text"),
        ("yes: a", "the key 'yes' is not text"),
        ("[a, b]: c", "the key 'a list or mapping' is not text"),
        ("a: !!python/object/apply:os.system [ls]", "is not a plain value"),
        ("a: !!binary aGk=", "is not a plain value"),
        ("a: !!set {b}", "is not a plain value"),
        (BOMB, "has more than 1,000,000 values"),
        ("a: &a [*a]", "an alias refers to a value that contains it"),
        ("a: [", "cannot be read as YAML"),
        ("a: *b", "cannot be read as YAML"),
        ("a: \0", "cannot be read as YAML"),
        ('a: "\\0"', "contains NUL or surrogate characters"),
        ('{"a\\0": 1}', "contains NUL or surrogate characters"),
        ('a: "\\ud800"', "contains NUL or surrogate characters"),
        ("a: 1\n---\nb: 2", "cannot be read as YAML"),
        ("a: " + "9" * 5000, "t: "),
    ],
)
def test_other_yaml_fails_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(DocumentError) as error:
        parse_yaml(text, "t")
    message = str(error.value)
    assert reason in message and message.startswith("t: ") and "\n" not in message and len(message) < 400


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "nested more than 100 levels deep"),
        ("[" * 200 + "]" * 200, "nested more than 100 levels deep"),
        ('{"a": 1, "a": 2}', "the key 'a' is given twice"),
        ('{"x": {"a": 1, "a": 2}}', "the key 'a' is given twice"),
        ("{", "cannot be read as JSON"),
        ("", "cannot be read as JSON"),
    ],
)
def test_other_json_fails_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(DocumentError) as error:
        parse_json(text, "t")
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_values_as_text(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("a: 60.90\nb: [yes, 1e-3, null]\n")
    assert read_yaml_as_text(path) == {"a": "60.90", "b": ["yes", "1e-3", "null"]}
    path.write_text("a: 1\na: 2")
    with pytest.raises(DocumentError, match="the key 'a' is given twice"):
        read_yaml_as_text(path)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbfa: 1")
    assert read_yaml(path) == {"a": 1}
    path.write_bytes(b"\xff")
    for read in (read_yaml, read_json):
        with pytest.raises(DocumentError, match="config .* is not UTF-8 text"):
            read(path, "config")
        with pytest.raises(UserError, match="config: no such file"):
            read(tmp_path / "none", "config")
