"""Runs commands in this process on malformed input that is generated from their options."""

from __future__ import annotations

import argparse
import hashlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

USER_ERROR = 2
SECONDS = 20
MOST_LINES = 3
ABSENT = "/nowhere/file"
# Not 64-bit integers; not finite numbers.
NO_COUNTS = ("x", "", "1.5", "nan", "9" * 400, "1_0")
NO_NUMBERS = ("x", "", "nan", "inf", "-inf", "1e999", "1_0")
DEEP = "[" * 3000
BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 12)
)
DOCUMENTS: dict[str, bytes] = {
    "nested deeply": DEEP.encode(),
    "mappings nested deeply": ("{a: " * 3000).encode(),
    "nested deeply and closed": (DEEP + "]" * 3000).encode(),
    "aliases that expand without end": BOMB.encode(),
    "an alias of itself": b"a: &a [*a]",
    "a key that is no text": b"5: a",
    "a key that is a list": b"[a]: b",
    "a key twice": b"a: 1\na: 2",
    "a NUL byte": b'a: "\\0"',
    "half a character": b'a: "\\ud800"',
    "not UTF-8": b"a: \xff",
    "no YAML": b"a: [",
    "an object of Python": b"a: !!python/object/apply:os.system [ls]",
    "a text": b"text",
    "a list": b"- a\n- b",
    "two documents": b"a: 1\n---\nb: 2",
    "an unknown key": b"no_such_key: 1",
}


class TookTooLongError(BaseException):
    """A command timed out. A BaseException, so that the command does not catch it."""


@dataclass
class Command:
    """A command and a valid use of it."""

    name: str  # name on the command line, with its subcommand
    entry: Callable[[], Any]  # runs it on ``sys.argv``; returns or exits with its status
    options: dict[str, list[str]]  # option -> its values in the valid use
    head: list[str] = field(default_factory=list)  # arguments before the options
    least: Mapping[str, float] = field(default_factory=dict)  # option -> the smallest valid number, if not 1
    inputs: Sequence[str] = ()  # options that name files to read
    folders: Sequence[str] = ()  # options that name folders to read
    outputs: Sequence[str] = ()  # options that name files to write
    documents: Sequence[str] = ()  # options that name YAML files
    mappings: Sequence[str] = ()  # options whose value is a YAML mapping
    free: Sequence[str] = ()  # numeric options that accept any 64-bit number
    ranged: Sequence[str] = ()  # numeric options whose bounds the test adds itself
    before: Sequence[Callable[[], Any]] = ()  # patches for the expensive part, which must not run


@dataclass(frozen=True)
class Case:
    """Arguments, and the exit status they must lead to."""

    what: str  # a description of what is wrong
    arguments: list[str]  # all arguments
    status: int = USER_ERROR  # 2, or 0 for valid arguments
    document: bytes = b""  # bytes to write into the file `written` first
    written: Path | None = None  # a file


def arguments_of(command: Command, changed: Mapping[str, Sequence[str] | None] | None = None) -> list[str]:
    """The arguments of the valid use with some options changed; None removes an option."""
    options = {**command.options, **(changed or {})}
    given = [[name, *values] for name, values in options.items() if values is not None]
    return [*command.head, *(text for words in given for text in words)]


def actions_of(command: Command) -> list[argparse.Action]:
    """The options of a command, from the parser of its valid use."""
    parsers: list[argparse.ArgumentParser] = []
    original = argparse.ArgumentParser.parse_known_args

    def remember(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        parsers.append(self)
        return original(self, *args, **kwargs)

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", remember):
        assert run(command, arguments_of(command)) == 0, f"{command.name}: the valid use fails"
    found = max(parsers, key=lambda parser: len(parser._actions))
    return [action for action in found._actions if action.option_strings and action.dest != "help"]


def option_cases(command: Command, actions: Sequence[argparse.Action]) -> Iterator[Case]:
    """Cases with one invalid option each, by the kind of the option."""
    for action in actions:
        name = next((name for name in action.option_strings if name in command.options), None)
        name = name or max(action.option_strings, key=len)
        for text in _wrong_values(command, action, name):
            yield Case(f"{name} {text[:30]!r}", arguments_of(command, {name: [text]}))
        if action.nargs == 0:
            yield Case(f"{name}=3", [*arguments_of(command, {name: None}), f"{name}=3"])
        elif action.nargs != "*":
            yield Case(f"{name} without a value", [*arguments_of(command, {name: None}), name])
        if action.nargs == 0 or name in command.options:
            values = command.options.get(name, [])
            yield Case(f"{name} twice", [*arguments_of(command, {name: values}), name, *values])


def _wrong_values(command: Command, action: argparse.Action, name: str) -> Iterator[str]:
    """Invalid values of an option."""
    kind = getattr(action.type, "__name__", "") if action.type else ""
    if action.choices:
        yield "no_such_choice"
    elif name in command.ranged:
        yield from ("x", "9" * 400)
    elif kind in ("int", "whole_number", "positive"):
        yield from NO_COUNTS
        if name not in command.free:
            yield str(int(command.least.get(name, 1)) - 1)
    elif kind in ("float", "finite_number"):
        yield from NO_NUMBERS
        if name not in command.free:
            yield str(command.least.get(name, 0) - 0.5)
    elif name in (*command.inputs, *command.folders):
        yield from (ABSENT, "a\0b", "x" * 5000)
        if name in command.options:
            yield ""  # same as omitting the others
        if name in command.inputs:
            yield "/"
    elif name in command.outputs:
        yield from ("a\0b", "x" * 5000, "/", "/dev/null/x")


def other_cases(command: Command, folder: Path) -> Iterator[Case]:
    """Unknown and extra arguments, and malformed documents."""
    valid = arguments_of(command)
    yield Case("an unknown option", [*valid, "--no_such_option", "3"])
    yield Case("an unknown flag", [*valid, "--no_such_flag"])
    for name in command.documents:
        for what, content in DOCUMENTS.items():
            path = folder / "document.yaml"
            arguments = arguments_of(command, {name: [str(path)]})
            yield Case(f"{name}: {what}", arguments, document=content, written=path)
    for name in command.mappings:
        for what, content in DOCUMENTS.items():
            if what != "not UTF-8":
                yield Case(f"{name}: {what}", arguments_of(command, {name: [content.decode()]}))


@contextmanager
def in_time() -> Iterator[None]:
    """Raise `TookTooLongError` after `SECONDS`."""

    def stop(*_: object) -> None:
        raise TookTooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(command: Command, arguments: Sequence[str]) -> int:
    """Run a command in this process without its expensive part; returns its exit status."""
    with pytest.MonkeyPatch.context() as patch, in_time():
        patch.setattr("sys.argv", [command.name.split()[0], *arguments])
        patches = [make() for make in command.before]
        try:
            for one in patches:
                one.start()
            return int(command.entry() or 0)
        except SystemExit as end:
            return int(end.code or 0) if not isinstance(end.code, str) else 1
        finally:
            for one in patches:
                one.stop()


def digest(folder: Path) -> dict[str, str]:
    """Checksums of all files below a folder, and its folders."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def failure_of(command: Command, case: Case, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a case; returns what the command did wrong, or an empty string."""
    if case.written is not None:
        case.written.write_bytes(case.document)
    before = digest(folder)
    capsys.readouterr()
    try:
        status = run(command, case.arguments)
    except TookTooLongError:
        return f"{case.what}: took more than {SECONDS} s"
    except BaseException as error:  # noqa: BLE001 (any is a traceback)
        return f"{case.what}: {type(error).__name__}: {str(error)[:200]}"
    error = capsys.readouterr().err
    if status != case.status:
        return f"{case.what}: status {status}, wanted {case.status}: {error[:200]!r}"
    if "Traceback" in error or error.count("\n") > MOST_LINES:
        return f"{case.what}: {error.count(chr(10))} lines: {error[-300:]!r}"
    if status and not error.strip():
        return f"{case.what}: no error message"
    if status and digest(folder) != before:
        changed = {*digest(folder).items()} ^ {*before.items()}
        return f"{case.what}: changed {sorted(name for name, _ in changed)}"
    return ""


def check_cases(
    command: Command, folder: Path, cases: Sequence[Case], capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that a command does in all cases what it must, and changes nothing in a folder when it fails."""
    found = [line for case in cases if (line := failure_of(command, case, folder, capsys))]
    print(f"{command.name}: {len(cases)} cases, {len(found)} wrong")
    assert not found, "\n".join(found)
