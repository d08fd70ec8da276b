"""What the steps of recipes share: texts, small files, commands, and steps that are run once."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from recipes.common.results import REPOSITORY
from shared_embeddings.utils import reading
from shared_embeddings.utils.command_line import run
from shared_embeddings.utils.download import download, verify
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import sha256, write_text
from shared_embeddings.utils.options import parse_options

BYTE_ORDER_MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"
REPORT = "fit.json"
Settings = TypeVar("Settings")
# Part of a run: when it started and ended (None if it was killed).
Segment = dict[str, Any]


def read_lines(path: Path) -> list[str]:
    """Return the lines of `stream_lines` as a list."""
    return list(stream_lines(path))


def stream_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 text, maybe gzipped (``.gz``), which end at line feeds only.

    Unicode whitespace is collapsed, and a byte order mark is removed.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield from decode_lines(file, str(path))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: truncated or not gzip ({error}); replace it") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


def decode_lines(file: Iterable[bytes], name: str) -> Iterator[str]:
    """Yield the lines of an open file as `stream_lines` does; `name` is that of the file in messages."""
    start = 0
    for raw in file:
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{name}: not UTF-8 at byte {start + error.start}; convert it") from error
        yield " ".join((line if start else line.removeprefix(BYTE_ORDER_MARK)).split())
        start += len(raw)


def check_pairs(sides: Mapping[str, Sequence[str]]) -> None:
    """Raise `UserError` unless the lines of each side, by name, are equally many and not none."""
    counts = {name: len(lines) for name, lines in sides.items()}
    if len(set(counts.values())) != 1:
        listed = ", ".join(f"{name} has {count} lines" for name, count in counts.items())
        raise UserError(f"the sides differ in length: {listed}")
    if not all(counts.values()):
        raise UserError(f"no sentences in {' and '.join(counts)}")


def read_json(path: Path) -> Any:
    """Read a JSON file; ``None`` if it is missing or damaged."""
    try:
        return reading.read_json(path)
    except (OSError, ValueError):
        return None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_yaml(path: Path, content: dict[str, Any]) -> None:
    """Write a YAML file atomically, in the order of `content`."""
    write_text(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def parse_settings(where: str, kind: type[Settings], content: Any) -> Settings:
    """Return `content` as a dataclass of `kind`; whole numbers must be at least 1."""
    if not isinstance(content, dict):
        raise UserError(f"{where}: expected settings by name; see {kind.__name__}")
    settings = parse_options(where, kind, content)
    for name, value in vars(settings).items():
        for each in value if isinstance(value, tuple) else (value,):
            if type(each) is int and each < 1:
                raise UserError(f"{where}: {name} is {each}; it must be at least 1")
    return settings


def print_line(line: str) -> None:
    """Print a line in one write, so that lines of several workers do not mix."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def locate(name: str, folder: str, url: str, downloads: Path, sha256: str | None = None) -> Path:
    """Find the file `name` in ``$DATA_DIR/FOLDER``, or download ``URL/name``, and verify its checksum."""
    data_dir = os.environ.get("DATA_DIR")
    own = Path(data_dir, folder, name) if data_dir else None
    path = own if own and own.is_file() else downloads / name
    if path.is_file():
        verify(path, sha256)
    else:
        advice = f"when offline, put {name} into $DATA_DIR/{folder} and run again"
        download(f"{url}/{name}", path, sha256, advice)
    return path


def run_main(
    program: str, main: Callable[[Sequence[str]], None], arguments: Sequence[str] | None = None
) -> int:
    """Run `main` on the command line and return the exit status; `program` is the prefix of messages."""
    return run(program, main, arguments, advice="run the same command again to resume")


def run_step(
    stamps: Path,
    name: str,
    inputs: Sequence[Path],
    outputs: Sequence[Path],
    action: Callable[..., object],
    /,
    *arguments: Any,
    **settings: Any,
) -> None:
    """Call `action` with `arguments` unless its outputs exist, undamaged, with the same inputs and settings.

    The stamp in the folder `stamps` is written last, so that an interrupted step runs again. The action must
    write its outputs atomically (`shared_embeddings.utils.files.replacing`); a text that it returns is
    printed. Settings are all that determines the outputs besides the inputs, as JSON values.
    """

    def checksums(paths: Sequence[Path]) -> dict[str, str | None]:
        return {path.name: sha256(path) if path.is_file() else None for path in paths}

    stamp = stamps / f"{name}.json"
    key = {"settings": json.loads(json.dumps(settings)), "inputs": checksums(inputs)}
    if read_json(stamp) == {**key, "outputs": checksums(outputs)}:
        print_line(f"{name}: up to date")
        return
    print_line(f"{name}: running")
    if isinstance(message := action(*arguments), str):
        print_line(message)
    write_json(stamp, {**key, "outputs": checksums(outputs)})


def checksums_of(files: Mapping[str, Path]) -> dict[str, Any]:
    """Return the SHA-256 of ``files`` by name, and the ``checksum`` of those checksums."""
    found = {name: sha256(path) for name, path in files.items()}
    whole = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    return {"checksum": whole, "files": found}


def python_path() -> str:
    """The value of PYTHONPATH with which commands import this repository, whether or not it is installed."""
    return os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])


def run_tool(name: str, arguments: Sequence[str | Path], keep_open: Sequence[int] = ()) -> None:
    """Run a command of this Python environment, such as ``onmt_train``, which inherits stdout and stderr."""
    command = Path(sys.executable).with_name(name)
    if not command.exists():
        raise UserError(f"{command}: not installed; run 'make setup'")
    _run(name, [command, *arguments], keep_open)


def run_module(name: str, arguments: Sequence[str | Path], keep_open: Sequence[int] = ()) -> None:
    """Like `run_tool`, for a module such as ``lm.train.command``."""
    _run(name, [sys.executable, "-m", name, *arguments], keep_open)


def _run(name: str, command: Sequence[str | Path], keep_open: Sequence[int]) -> None:
    with subprocess.Popen(command, pass_fds=keep_open) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            # The command may have received the same Ctrl-C and saves its state; a first SIGTERM is not
            # counted as a second signal.
            process.terminate()
            process.wait()
            raise
    if status == 2:
        raise SystemExit(2)
    if status:
        raise UserError(f"{name} failed with status {status}; see its output above")


def with_overrides(own: Sequence[str | Path], given: Sequence[str]) -> list[str]:
    """Return the options of a command: those `given` by the user replace others of the same name in `own`."""

    def name_of(text: str) -> str:
        found = re.match(r"--?([a-zA-Z]\w*)", text)
        return found[1] if found else ""  # a value

    names = {name_of(text) for text in given}
    kept, is_kept = [], True
    for text in map(str, own):
        if name := name_of(text):
            is_kept = name not in names
        if is_kept:
            kept.append(text)
    return [*kept, *given]


def option_value(options: Sequence[str], name: str) -> str | None:
    """Return the last value of ``-name`` or ``--name`` among command-line options."""
    value = None
    for index, option in enumerate(options):
        key, _, attached = option.partition("=")
        if key in (f"-{name}", f"--{name}"):
            value = attached or (options[index + 1] if index + 1 < len(options) else None)
    return value


def peak_memory_of_children() -> float:
    """Return the largest resident memory of any child process so far, in MiB."""
    return round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, 1)


def kept_segments(segments: Sequence[Segment], saved: float | None) -> list[Segment]:
    """Return the run segments up to the last checkpoint, which was saved at `saved`; later work was lost."""
    kept = [segment for segment in segments if saved is not None and segment["started"] < saved]
    return [{**part, "ended": saved if part["ended"] is None else part["ended"]} for part in kept]


def fit_model(
    teacher: Path,
    embedding: dict[str, Any],
    counts: Path,
    texts: Sequence[Path],
    seed: int,
    output: Path,
    fit: Mapping[str, Any],
) -> None:
    """Write a copy of a trained model with an `embedding` fitted to the original one, as a row's `fit` says.

    ``shared-embeddings compress`` does it, with the word counts in a file or on the training texts, and
    writes its report to ``fit.json`` next to the copy.
    """
    # JSON is YAML.
    arguments: list[str | Path] = ["compress", "--model", teacher, "--method", json.dumps(dict(embedding))]
    arguments += ["--text", *texts] if fit.get("calibrate") else ["--token-counts", counts]
    arguments += ["--seed", str(seed), "--force"]
    arguments += ["--output", output, "--report", output.with_name(REPORT)]
    for key in ("fit_steps", "store"):
        if key in fit:
            arguments += [f"--{key.replace('_', '-')}", str(fit[key])]
    if "recover_steps" in fit:
        arguments += ["--recover", f"{fit['recover_steps']}steps"]
    run_module("shared_embeddings.cli.main", arguments)
