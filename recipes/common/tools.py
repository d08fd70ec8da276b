"""What the steps of recipes share: texts, small files, commands, steps that are run once, and ``--smoke``."""

from __future__ import annotations

import contextlib
import fnmatch
import gzip
import hashlib
import io
import json
import os
import random
import re
import resource
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import yaml

from lm.data.datasets import download, verify
from recipes.common.results import REPOSITORY, SMOKE_FOLDER
from shared_embeddings.utils import reading
from shared_embeddings.utils.command_line import run
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import replacing, sha256, write_text

# Part of a run: when it started and ended (None if it was killed).
Segment = dict[str, Any]


def read_lines(path: Path) -> list[str]:
    """Return the lines of `stream_lines` as a list."""
    return list(stream_lines(path))


def stream_lines(path: Path, member: IO[bytes] | None = None) -> Iterator[str]:
    """Yield the lines of a UTF-8 text, maybe gzipped (``.gz``), which end at line feeds only.

    Unicode whitespace is collapsed, and a byte order mark is removed. The text may be an opened `member` of
    an archive.
    """
    try:
        opened = member or (gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb"))
        with io.TextIOWrapper(opened, encoding="utf-8-sig", newline="\n") as file:  # type: ignore[type-var]
            for line in file:
                yield " ".join(line.split())
    except (EOFError, UnicodeDecodeError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: truncated, or not text in UTF-8 ({error}); replace it") from error


def check_pairs(sides: Mapping[str, Sequence[str]], wanted: int | None = None) -> None:
    """Raise `UserError` unless all sides, by name, have equal numbers of lines above 0, or `wanted` lines."""
    counts = {name: len(lines) for name, lines in sides.items()}
    expected = next(iter(counts.values())) if wanted is None else wanted
    if expected == 0 or {*counts.values()} != {expected}:
        listed = ", ".join(f"{name} has {count} lines" for name, count in counts.items())
        also = "equal numbers above 0" if wanted is None else f"{wanted} in each"
        raise UserError(f"{listed}; expected {also}; replace the files")


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


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name atomically."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def matching(names: Iterable[str], patterns: Sequence[str], what: str) -> list[str]:
    """Return the names that match one of the patterns; each pattern must match a name of `what`."""
    listed = list(names)
    for pattern in patterns:
        if not fnmatch.filter(listed, pattern):
            raise UserError(f"no {what} matches {pattern!r}; there are: {', '.join(listed)}")
    return [name for name in listed if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def data_dir() -> Path | None:
    """Return ``$DATA_DIR``, the folder of the user's own data."""
    text = os.environ.get("DATA_DIR")
    return Path(text).absolute() if text else None


def locate(name: str, folder: str, url: str, downloads: Path, sha256: str | None = None) -> Path:
    """Find the file `name` in ``$DATA_DIR/FOLDER``, or download ``URL/name``, and verify its checksum."""
    home = data_dir()
    path = downloads / name
    if home is not None and (home / folder / name).is_file():
        path = home / folder / name
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
        print(f"{name}: up to date", flush=True)
        return
    print(f"{name}: running", flush=True)
    if isinstance(message := action(*arguments), str):
        print(message, flush=True)
    write_json(stamp, {**key, "outputs": checksums(outputs)})


def checksums_of(folder: Path, files: Iterable[Path]) -> dict[str, Any]:
    """Return the SHA-256 of ``files`` by name in a folder, and the ``checksum`` of those checksums."""
    checksums = {str(path.relative_to(folder)): sha256(path) for path in files}
    whole = hashlib.sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest()
    return {"checksum": whole, "files": checksums}


def python_path() -> str:
    """The value of PYTHONPATH with which commands import this repository, whether or not it is installed."""
    return os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])


# Processes of `run_command`, which may run in several threads.
RUNNING: set[subprocess.Popen[bytes]] = set()


def run_command(name: str, arguments: Sequence[str | Path], log: Path | None = None) -> None:
    """Run a command of this Python environment, such as ``onmt_train``; it must end with 0.

    It inherits stdout and stderr, or prints to a log.
    """
    command = Path(sys.executable).with_name(name)
    if not command.exists():
        raise UserError(f"{command}: not installed; run 'make setup'")
    environment = {**os.environ, "PYTHONPATH": python_path()}
    with contextlib.ExitStack() as stack:
        streams: dict[str, Any] = {}
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            streams = {"stdout": stack.enter_context(log.open("ab")), "stderr": subprocess.STDOUT}
        process = subprocess.Popen([command, *map(str, arguments)], env=environment, **streams)
        RUNNING.add(process)
        try:
            status = process.wait()
        except KeyboardInterrupt:
            # The command may have received the same Ctrl-C and saves its state; a first SIGTERM is not
            # counted as a second signal.
            process.terminate()
            process.wait()
            raise
        finally:
            RUNNING.discard(process)
    if status and log is not None:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
        print("\n".join(f"  | {line}" for line in lines), file=sys.stderr)
        raise UserError(f"{name} failed with status {status}; the last lines of {log} are above")
    if status == 2:
        raise SystemExit(2)
    if status:
        raise UserError(f"{name} failed with status {status}; see its output above")


def with_overrides(defaults: Sequence[str | Path], options: Sequence[str]) -> list[str]:
    """Return the options of a command: those of the user replace `defaults` of the same name."""

    def name_of(text: str) -> str:
        match = re.match(r"--?([a-zA-Z]\w*)", text)
        return match[1] if match else ""  # a value

    names = {name_of(text) for text in options}
    result, is_kept = [], True
    for text in map(str, defaults):
        if name := name_of(text):
            is_kept = name not in names
        if is_kept:
            result.append(text)
    return [*result, *options]


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
    before = [segment for segment in segments if saved is not None and segment["started"] < saved]
    return [{**segment, "ended": segment["ended"] or saved} for segment in before]


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
    arguments += ["--output", output, "--report", output.with_name("fit.json")]
    for key in ("fit_steps", "store"):
        if key in fit:
            arguments += [f"--{key.replace('_', '-')}", str(fit[key])]
    if "recover_steps" in fit:
        arguments += ["--recover", f"{fit['recover_steps']}steps"]
    if not fit.get("check", True):
        arguments.append("--no-check")
    run_command("shared-embeddings", arguments)


SMOKE = "--smoke"
SMOKE_HELP = f"use a generated text of a few hundred lines, in a separate folder {SMOKE_FOLDER}"
# Lines of text to train on, and to validate or test on.
LINES, TEST_LINES = 250, 10
# Words and semantic classes of a generated text, and BPE merges.
WORDS, CLASSES, MERGES = 400, 12, 200
# Longest translation in subwords or characters; longer than the desired length of headlines.
LONGEST = 30
CUTOFFS = (60, 120, 180)
# For methods that are fitted by gradient descent.
FIT_STEPS = 20
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


def classes_file(number: int) -> str:
    """Return the file name of `number` semantic classes, in recipes with several."""
    return f"classes_{number}.npz"


def generated_words(lines: int, seed: int) -> Iterator[list[str]]:
    """Yield lines of three to fifteen of `generated_vocabulary`, sampled by Zipf's law."""
    words = generated_vocabulary()
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    draw = random.Random(seed)
    for _ in range(lines):
        yield draw.choices(words, weights, k=draw.randint(3, 15))


def generated_vocabulary() -> list[str]:
    """Return the `WORDS` of a made-up language, of one to four syllables, short words first."""
    draw = random.Random(0)
    words: dict[str, None] = dict.fromkeys(_SYLLABLES)
    while len(words) < WORDS:
        words["".join(draw.choices(_SYLLABLES, k=draw.randint(2, 4)))] = None
    return list(words)


def generated_pairs(lines: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield sentences of the made-up language, and the same sentences with reversed words."""
    for words in generated_words(lines, seed):
        yield sentence(words), sentence([word[::-1] for word in words])


def sentence(words: Sequence[str]) -> str:
    """Join words to a sentence, with a capital and a period."""
    return f"{' '.join(words).capitalize()}."
