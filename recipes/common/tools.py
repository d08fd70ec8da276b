"""Running commands and resumable steps from a recipe, and the small files of a run."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from shared_embeddings.errors import UserError
from shared_embeddings.utils import reading
from shared_embeddings.utils.command_line import run
from shared_embeddings.utils.files import sha256, write_text


def run_tool(name: str, arguments: Sequence[str | Path], keep_open: Sequence[int] = ()) -> None:
    """Run a command of this Python environment with inherited stdout and stderr.

    Args:
        name: name of the command, such as ``onmt_train``.
        arguments: its arguments.
        keep_open: file descriptors to inherit.

    Raises:
        UserError: the command is not installed, or it failed.
        SystemExit: status 2 if the command reported a user error.
    """
    command = Path(sys.executable).with_name(name)
    if not command.exists():
        raise UserError(f"{command}: not installed; run 'make setup'")
    _run(name, [command, *arguments], keep_open)


def run_module(name: str, arguments: Sequence[str | Path], keep_open: Sequence[int] = ()) -> None:
    """Like `run_tool`, for a module such as ``lm.train.command``."""
    _run(name, [sys.executable, "-m", name, *arguments], keep_open)


def with_overrides(own: Sequence[str | Path], given: Sequence[str]) -> list[str]:
    """Return the options of a command: `given` replaces options of the same name in `own`.

    Args:
        own: default options with values.
        given: options of the user with values.
    """
    names = {_option_name(text) for text in given}
    kept, is_kept = [], True
    for text in map(str, own):
        if name := _option_name(text):
            is_kept = name not in names
        if is_kept:
            kept.append(text)
    return [*kept, *given]


def _option_name(text: str) -> str:
    """Return the name of an option; empty for a value."""
    found = re.match(r"--?([a-zA-Z]\w*)", text)
    return found[1] if found else ""


def _run(name: str, command: Sequence[str | Path], keep_open: Sequence[int]) -> None:
    """Run a command; on interruption, wait until it has saved its state."""
    with subprocess.Popen(command, pass_fds=keep_open) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            # The command may have received the same Ctrl-C; a first SIGTERM is not counted as a second
            # signal.
            process.terminate()
            process.wait()
            raise
    if status == 2:
        raise SystemExit(2)
    if status:
        raise UserError(f"{name} failed with status {status}; see its output above")


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


def run_main(
    program: str, main: Callable[[Sequence[str]], None], arguments: Sequence[str] | None = None
) -> int:
    """Run `main` on the command line and return the exit status, see
    `shared_embeddings.utils.command_line.run`.

    Args:
        program: prefix of messages.
        main: function of the arguments.
        arguments: default: ``sys.argv[1:]``.
    """
    return run(program, main, arguments, advice="run the same command again to resume")


def run_step(
    name: str,
    stamps: Path,
    action: Callable[[], object],
    *,
    inputs: Sequence[Path],
    outputs: Sequence[Path],
    settings: Mapping[str, Any],
) -> None:
    """Run `action` unless its outputs exist, undamaged, with the same inputs and settings.

    The stamp is written last, so that an interrupted step runs again. `action` must write its outputs
    atomically (`shared_embeddings.utils.files.replacing`).

    Args:
        name: name of the step and its stamp.
        stamps: folder of the stamps.
        action: writes the outputs.
        inputs: input files.
        outputs: output files.
        settings: everything else that determines the outputs, as JSON values.
    """
    stamp = stamps / f"{name}.json"
    key = {"settings": json.loads(json.dumps(dict(settings))), "inputs": _checksums(inputs)}
    if read_json(stamp) == {**key, "outputs": _checksums(outputs)}:
        print_line(f"{name}: up to date")
        return
    print_line(f"{name}: running")
    action()
    write_text(stamp, json.dumps({**key, "outputs": _checksums(outputs)}, indent=2) + "\n")


def print_result(work: Callable[[], str]) -> None:
    """Call `work` and print the line that it returns."""
    print_line(work())


def print_line(line: str) -> None:
    """Print a line in one write, so that lines of several workers do not mix."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _checksums(paths: Sequence[Path]) -> dict[str, str | None]:
    """Return checksums by file name; ``None`` for missing files."""
    return {path.name: sha256(path) if path.is_file() else None for path in paths}


REPORT = "fit.json"
# Part of a run: when it started and ended (None if it was killed).
Segment = dict[str, Any]


def distillation_options(distill: dict[str, Any], model: Path) -> dict[str, Any]:
    """Return the training option for a row's ``distill``, with the teacher's trained `model`."""
    return {"embedding_distillation": {**distill, "teacher": str(model)}}


def fit_model(
    teacher: Path,
    embedding: dict[str, Any],
    counts: Path,
    seed: int,
    output: Path,
    fit: Mapping[str, Any],
) -> None:
    """Write a copy of a trained model with an embedding fitted to the original one.

    This runs ``shared-embeddings compress``, which writes its report to ``fit.json`` next to the copy.

    Args:
        teacher: trained model of any host.
        embedding: method and options of the new embedding.
        counts: file with a word, a tab and its count per line.
        seed: random seed.
        output: the new model.
        fit: the row's ``fit``; ``fit_steps`` and ``store`` are optional.

    Raises:
        UserError: the command failed.
        SystemExit: status 2 if the command reported a user error.
    """
    arguments: list[str | Path] = ["compress", "--model", teacher, "--method", embedding["method"]]
    arguments += ["--token-counts", counts, "--seed", str(seed), "--force"]
    arguments += ["--output", output, "--report", output.with_name(REPORT)]
    for key, name in (("fit_steps", "--fit-steps"), ("store", "--store")):
        if key in fit:
            arguments += [name, str(fit[key])]
    for name, value in embedding.items():
        if name != "method":
            text = value if isinstance(value, str) else json.dumps(value)
            arguments += ["--embedding-output" if name == "output" else f"--{name}", text]
    run_module("shared_embeddings.cli.main", arguments)


def kept_segments(segments: Sequence[Segment], saved: float | None) -> list[Segment]:
    """Return the run segments up to the last checkpoint, which was saved at `saved`; later work was lost."""
    kept = [segment for segment in segments if saved is not None and segment["started"] < saved]
    return [{**part, "ended": saved if part["ended"] is None else part["ended"]} for part in kept]
