"""Every command with small inputs, its runs in this process, and malformed input from its options."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import pytest

from shared_embeddings.utils.path_options import PathOption
from tests.lm.runs import write_corpus, write_model
from tests.nmt.conftest import Host
from tests.test_setup import COMMANDS

SECONDS, SECONDS_MALFORMED = 60, 20
PLACE = re.compile(r"\{(<<|<|>>|>)(\w+)\}")
# Their files belong to a run; see the tests of training and of the server.
OF_TRAINING = ("lm_train", "onmt_train", "onmt_server")
_SUBWORDS = "src_subword_model tgt_subword_model src_subword_vocab tgt_subword_vocab"
_TERMS = "termbase_path tm_path tags_dictionary_path"
_READ = " ".join(f"-{name} {{<{name}}}" for name in f"{_SUBWORDS} {_TERMS}".split())

# Name -> arguments. {<name} is an input file, {<<name} an input file or folder, {>name} an output that is
# replaced only with --force, and {>>name} an output that is always replaced.
CALLS = {
    "shared-embeddings classes": "classes --text {<text} {<more} --vocab {<vocab} --num-classes 2 "
    "--output {>output} --figure {>figure}",
    "shared-embeddings classes again": "classes --vectors-of {<classes} --num-classes 2 --output {>output} "
    "--figure {>figure}",
    "shared-embeddings compress": "compress --model {<<model} --method standard --output {>output} "
    "--text {<text} {<more} --validation {<<validation} --validation-source {<source} "
    "--validation-target {<target} --calibration {>>calibration} --report {>report}",
    "shared-embeddings compress by counts": "compress --model {<<model} --method standard --output {>output} "
    "--token-counts {<counts} --report {>report}",
    "shared-embeddings compress after trimming": "compress --model {<<model} --method standard "
    "--trim-to {<kept} {<more} --output {>output} --report {>report}",
    "shared-embeddings similarity": "similarity --vectors {<vectors} --pairs {<pairs} {<more}",
    "shared-embeddings similarity of a model": "similarity --model {<<model} --pairs {<pairs}",
    "shared-embeddings trim": "trim --model {<<model} --text {<text} --source-text {<source} "
    "--target-text {<target} --keep {<keep} --held-out {<held} --output {>output}",
    "lm_prepare": "-train {<train} {<more} -valid {<valid} -test {<test} -output elsewhere",
    "lm_evaluate": "-model {<model} -data {<<data} -reference {<reference} -output {>output}",
    "lm_generate": "-model {<model}",
    "onmt_average_models": "-models {<model} {<more} -output {>output}",
    "onmt_release_model": "-model {<model} -output {>output}",
    "onmt_release_model to CTranslate2": "-model {<model} -output {>output} -format ctranslate2",
    "onmt_characters split": "split -input {<input} -output {>>output}",
    "onmt_characters join": "join -input {<input} -output {>>output}",
    "onmt_character_vocab": "-source {<source} {<more} -target {<target} -output {>>output}",
    "onmt_rerank": "-source {<source} -hypotheses {<hypotheses} -n_best 1 -output {>>output}",
    "onmt_rouge": "--candidates {<candidates} --references {<references} {<more} --exceptions {<exceptions}",
    "onmt_translate": f"-model {{<model}} {{<more}} -src {{<src}} -tgt {{<tgt}} -output {{>>output}} "
    f"-desired_lengths {{<lengths}} -phrase_table {{<phrases}} -log_file {{>>log}} {_READ}",
    "onmt_translate and its options": "-model {<model} -src {<src} -config {<config} -save_config {>>saved}",
    "onmt_build_vocab": '-data {"c":{"path_src":"{<src}","path_tgt":"{<tgt}"}} '
    f"-src_vocab {{>src_vocab}} -tgt_vocab {{>tgt_vocab}} -save_data elsewhere {_READ}",
}
FORCE = {"onmt_build_vocab": "-overwrite"}


class Place(NamedTuple):
    """A file in a call."""

    name: str  # name of the file
    kind: str  # its marker in `CALLS`

    @property
    def is_read(self) -> bool:
        """Whether the command reads it."""
        return "<" in self.kind


def places(call: str) -> list[Place]:
    """The files of a call."""
    return [Place(name, kind) for kind, name in PLACE.findall(CALLS[call])]


def arguments(call: str, folder: Path, instead: Mapping[str, object], force: bool = False) -> list[str]:
    """The arguments of a call.

    Args:
        call: a key of `CALLS`.
        folder: folder of the files; inputs are created with a line of text.
        instead: other paths, by name.
        force: allow replacing outputs.
    """
    for place in places(call):
        if place.is_read and not (folder / place.name).exists():
            (folder / place.name).write_text("x\n" if place.name != "config" else "beam_size: 2\n")

    def path(found: re.Match[str]) -> str:
        return str(instead.get(found[2], folder / found[2]))

    given = [PLACE.sub(path, word) for word in CALLS[call].split()]
    given = [str(folder / word) if word == "elsewhere" else word for word in given]
    has_option = any(place.kind == ">" for place in places(call))
    return [*given, FORCE.get(call, "--force")] if force and has_option else given


class Ended(NamedTuple):
    """Exit status and stderr of a command."""

    status: int
    error: str


def run(command: str, given: list[str]) -> Ended:
    """Run a command in this process; fails if it takes too long."""
    module, function = COMMANDS[command].split(":")
    called = getattr(importlib.import_module(module), function)
    errors, status = io.StringIO(), 0
    with (
        pytest.MonkeyPatch.context() as patch,
        limited(SECONDS),
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        patch.setattr("sys.argv", [command, *given])
        try:
            status = called() or 0
        except SystemExit as end:
            status = int(end.code or 0)
    return Ended(status, errors.getvalue())


class TookTooLongError(BaseException):
    """A command timed out. A BaseException, so that the command does not catch it."""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Interrupt what takes longer, such as waiting for the writer of a pipe."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise TookTooLongError(f"still running after {seconds} seconds")

    previous = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def content(folder: Path) -> dict[str, object]:
    """The content of a folder: contents of files, targets of links, and modes of the rest."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = path.read_bytes() if path.is_file() else path.stat().st_mode
    return found


NO_PROCESS = 4999999  # a number too large for a process


def plant(output: Path, home: Path, data: bytes = b"\xff") -> None:
    """Put files and links to the folder `home` beside an output, as leftovers of killed processes."""
    for middle in (f"{NO_PROCESS}", f"{NO_PROCESS}.old", f"{os.getpid()}.old"):
        output.with_name(f".{output.name}.{middle}.tmp").write_bytes(data)
    for middle in (f"{NO_PROCESS + 1}", f"{NO_PROCESS + 1}.old"):
        output.with_name(f".{output.name}.{middle}.tmp").symlink_to(home)
    output.with_name(f".{output.name}.{NO_PROCESS + 2}.tmp").symlink_to(home / "precious")


SENTENCES = "a b c d\nc d a b\nb b e f\n"


class Writer(NamedTuple):
    """A command that writes."""

    command: str  # its name
    arguments: str  # separated by spaces; inputs are in ``{inputs}``, outputs start with ``@``
    force: str | None = "--force"  # the option that lets it replace outputs; None if it always does
    is_folder: bool = False  # whether its first output is a folder

    def given(self, inputs: Path, folder: Path) -> list[str]:
        """Its arguments for inputs and outputs in two folders."""
        words = [word.replace("@", f"{folder}/") for word in self.arguments.split()]
        return [word.format(inputs=inputs) for word in words]

    def outputs(self, folder: Path) -> list[Path]:
        """The outputs in a folder."""
        return [folder / word[1:] for word in self.arguments.split() if word.startswith("@")]


_COMPRESS = "compress --method projective --rank 2 --output @small --report @report.json --model"
WRITERS = {
    "onmt_characters": Writer("onmt_characters", "split -input {inputs}/text -output @out", None),
    "onmt_rerank": Writer(
        "onmt_rerank", "-source {inputs}/text -hypotheses {inputs}/text -n_best 1 -output @out", None
    ),
    "onmt_character_vocab": Writer(
        "onmt_character_vocab", "-source {inputs}/text -target {inputs}/text -output @out", None
    ),
    "onmt_build_vocab": Writer(
        "onmt_build_vocab",
        "-config {inputs}/vocab.yaml -src_vocab @source.vocab -tgt_vocab @target.vocab -save_data @samples",
        "-overwrite",
    ),
    "onmt_translate": Writer(
        "onmt_translate",
        "-model {inputs}/nmt.pt -src {inputs}/long.src -output @out -beam_size 2 -max_length 5",
        None,
    ),
    "onmt_average_models": Writer("onmt_average_models", "-models {inputs}/nmt.pt -output @out.pt"),
    "onmt_release_model": Writer("onmt_release_model", "-model {inputs}/nmt.pt -output @out.pt"),
    "onmt_release_model to CTranslate2": Writer(
        "onmt_release_model", "-model {inputs}/nmt.pt -format ctranslate2 -output @out", is_folder=True
    ),
    "lm_prepare": Writer(
        "lm_prepare",
        "-train {inputs}/train.txt -valid {inputs}/text -test {inputs}/text -output @data",
        "-force",
        is_folder=True,
    ),
    "lm_prepare with a split": Writer(
        "lm_prepare", "-train {inputs}/train.txt -output @data", "-force", is_folder=True
    ),
    "lm_evaluate": Writer("lm_evaluate", "-model {inputs}/lm.pt -data {inputs}/text -output @out.json"),
    "classes": Writer(
        "shared-embeddings",
        "classes --text {inputs}/text --vocab {inputs}/words --num-classes 2 --dim 3 --epochs 1 "
        "--output @out.npz --figure @out.png",
    ),
    "compress a language model": Writer("shared-embeddings", f"{_COMPRESS} {{inputs}}/lm.pt"),
    "compress a translation model": Writer("shared-embeddings", f"{_COMPRESS} {{inputs}}/nmt.pt"),
    "compress a folder": Writer("shared-embeddings", f"{_COMPRESS} {{inputs}}/gpt2", is_folder=True),
    "trim": Writer("shared-embeddings", "trim --model {inputs}/lm.pt --text {inputs}/text --output @small"),
    "trim a translation model": Writer(
        "shared-embeddings", "trim --model {inputs}/nmt.pt --text {inputs}/test.src --output @small"
    ),
}


def make_inputs(folder: Path) -> None:
    """Write the inputs of all `WRITERS`; the models are tiny."""
    from tests.shared_embeddings.hf.models import write as write_folder

    for name in ("text", "more"):
        (folder / name).write_text(SENTENCES * 20)
    (folder / "train.txt").write_text(SENTENCES * 2000)
    (folder / "words").write_text("a\nb\nc\nd\ne\nf\n")
    corpus = write_corpus(folder / "corpus", "a b c d e f")
    write_model(folder / "lm.pt", corpus)
    write_folder("gpt2", folder / "gpt2")
    host = Host(folder)
    (folder / "long.src").write_text((folder / "test.src").read_text() * 4)
    shutil.copyfile(host.train("model", train_steps=1, save_checkpoint_steps=1), folder / "nmt.pt")
    (folder / "vocab.yaml").write_text(
        f"data: {{corpus: {{path_src: {folder}/train.src, path_tgt: {folder}/train.tgt}}}}\nn_sample: -1\n"
    )


USER_ERROR = 2
MOST_LINES = 3
ABSENT = "/nowhere/file"
NEW_FILES = (PathOption.NEW_FILE, PathOption.NEW, PathOption.OUTPUT)
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


@dataclass
class Command:
    """A command and a valid use of it."""

    name: str  # name on the command line, with its subcommand
    entry: Callable[[], Any]  # runs it on ``sys.argv``; returns or exits with its status
    options: dict[str, list[str]]  # option -> its values in the valid use
    head: list[str] = field(default_factory=list)  # arguments before the options
    least: Mapping[str, float] = field(default_factory=dict)  # option -> the smallest valid number, if not 1
    inputs: Sequence[str] = ()  # options that name files to read, and have no type that says so
    folders: Sequence[str] = ()  # options that name folders to read, as above
    outputs: Sequence[str] = ()  # options that name files to write, as above
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
        assert run_command(command, arguments_of(command)) == 0, f"{command.name}: the valid use fails"
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
    elif name in (*command.inputs, *command.folders) or action.type in (PathOption.FILE, PathOption.SOURCE):
        yield from (ABSENT, "a\0b", "x" * 5000)
        if name in command.options:
            yield ""  # same as omitting the others
        if name in command.inputs or action.type is PathOption.FILE:
            yield "/"
    elif name in command.outputs or action.type in NEW_FILES:
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


def run_command(command: Command, arguments: Sequence[str]) -> int:
    """Run a command in this process without its expensive part; returns its exit status."""
    with pytest.MonkeyPatch.context() as patch, limited(SECONDS_MALFORMED), contextlib.ExitStack() as stack:
        patch.setattr("sys.argv", [command.name.split()[0], *arguments])
        for make in command.before:
            stack.enter_context(make())
        try:
            return int(command.entry() or 0)
        except SystemExit as end:
            return int(end.code or 0) if not isinstance(end.code, str) else 1


def failure_of(command: Command, case: Case, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a case; returns what the command did wrong, or an empty string."""
    if case.written is not None:
        case.written.write_bytes(case.document)
    before = content(folder)
    capsys.readouterr()
    try:
        status = run_command(command, case.arguments)
    except TookTooLongError:
        return f"{case.what}: took more than {SECONDS_MALFORMED} s"
    except BaseException as error:  # noqa: BLE001 (any is a traceback)
        return f"{case.what}: {type(error).__name__}: {str(error)[:200]}"
    error = capsys.readouterr().err
    if status != case.status:
        return f"{case.what}: status {status}, wanted {case.status}: {error[:200]!r}"
    if "Traceback" in error or error.count("\n") > MOST_LINES:
        return f"{case.what}: {error.count(chr(10))} lines: {error[-300:]!r}"
    if status and not error.strip():
        return f"{case.what}: no error message"
    if status and (now := content(folder)) != before:
        changed = [name for name in {*now, *before} if now.get(name) != before.get(name)]
        return f"{case.what}: changed {sorted(changed)}"
    return ""


def check_cases(
    command: Command, folder: Path, cases: Sequence[Case], capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that a command does in all cases what it must, and changes nothing in a folder when it fails."""
    found = [line for case in cases if (line := failure_of(command, case, folder, capsys))]
    print(f"{command.name}: {len(cases)} cases, {len(found)} wrong")
    assert not found, "\n".join(found)
