"""Every command with all its options that name files, and a way to run it in this process."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest

from tests.test_setup import COMMANDS

SECONDS = 60
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
    "--validation-target {<target} --report {>report}",
    "shared-embeddings compress by counts": "compress --model {<<model} --method standard --output {>output} "
    "--token-counts {<counts} --report {>report}",
    "shared-embeddings compress after trimming": "compress --model {<<model} --method standard "
    "--trim-to {<kept} {<more} --output {>output} --report {>report}",
    "shared-embeddings correlation": "correlation --model {<<model} --output elsewhere",
    "shared-embeddings similarity": "similarity --vectors {<vectors} --pairs {<pairs} {<more}",
    "shared-embeddings similarity of a model": "similarity --model {<<model} --pairs {<pairs}",
    "shared-embeddings trim": "trim --model {<<model} --text {<text} --source-text {<source} "
    "--target-text {<target} --keep {<keep} --held-out {<held} --output {>output}",
    "lm_prepare": "-train {<train} {<more} -valid {<valid} -test {<test} -output elsewhere",
    "lm_eval": "-model {<model} -data {<<data} -reference {<reference} -output {>output}",
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
NEVER = ("shared-embeddings trim",)  # never replaces anything and has no such option


class Place(NamedTuple):
    """A file in a call.

    Attributes:
        name: name of the file.
        kind: its marker in `CALLS`.
    """

    name: str
    kind: str

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
    has_option = call not in NEVER and any(place.kind == ">" for place in places(call))
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
        limited(),
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        patch.setattr("sys.argv", [command, *given])
        try:
            status = called() or 0
        except SystemExit as end:
            status = int(end.code or 0)
    return Ended(status, errors.getvalue())


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Interrupt what takes longer than `SECONDS`, such as waiting for the writer of a pipe."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"still running after {SECONDS} seconds")

    previous = signal.signal(signal.SIGALRM, fail)
    signal.alarm(SECONDS)
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
