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
    """Run the command `name` of the environment that this Python belongs to; its output goes where ours goes.

    Args:
        name: for instance ``onmt_train``.
        arguments: its arguments.
        keep_open: file descriptors that it inherits.

    Raises:
        UserError: the command is not installed, or it failed.
        SystemExit: with status 2 when the command has reported a mistake of the user's itself.
    """
    command = Path(sys.executable).with_name(name)
    if not command.exists():
        raise UserError(f"{command}: not installed; run 'make setup'")
    _run(name, [command, *arguments], keep_open)


def run_module(name: str, arguments: Sequence[str | Path], keep_open: Sequence[int] = ()) -> None:
    """As `run_tool`, for a module of this project that is a program, such as ``lm.train.command``."""
    _run(name, [sys.executable, "-m", name, *arguments], keep_open)


def with_overrides(own: Sequence[str | Path], given: Sequence[str]) -> list[str]:
    """The options of a command: ours, except those that the user sets; the command takes each once.

    Args:
        own: options with their values.
        given: those of the user, likewise.
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
    """The name of the option that an argument is; nothing for a value."""
    found = re.match(r"--?([a-zA-Z]\w*)", text)
    return found[1] if found else ""


def _run(name: str, command: Sequence[str | Path], keep_open: Sequence[int]) -> None:
    """Run a command; when interrupted, wait until it has saved its state."""
    with subprocess.Popen(command, pass_fds=keep_open) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            # It may have received the same Ctrl-C; its first SIGTERM does not count as a second one.
            process.terminate()
            process.wait()
            raise
    if status == 2:
        raise SystemExit(2)
    if status:
        raise UserError(f"{name} ended with status {status}; see its output above")


def option_value(options: Sequence[str], name: str) -> str | None:
    """The value of ``-name`` or ``--name`` among command line options, the last one if there are several."""
    value = None
    for index, option in enumerate(options):
        key, _, attached = option.partition("=")
        if key in (f"-{name}", f"--{name}"):
            value = attached or (options[index + 1] if index + 1 < len(options) else None)
    return value


def peak_memory_of_children() -> float:
    """Largest resident memory of any child process so far, in MiB."""
    return round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, 1)


def read_json(path: Path) -> Any:
    """The content of a JSON file; ``None`` when it is absent or damaged."""
    try:
        return reading.read_json(path)
    except (OSError, ValueError):
        return None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, completely or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_yaml(path: Path, content: dict[str, Any]) -> None:
    """Write a YAML file in the order of `content`, completely or not at all."""
    write_text(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def run_main(
    program: str, main: Callable[[Sequence[str]], None], arguments: Sequence[str] | None = None
) -> int:
    """Run `main` on the command line, return the exit status; see `shared_embeddings.utils.command_line.run`.

    Args:
        program: what the line starts with.
        main: takes the arguments.
        arguments: ``sys.argv[1:]`` if not given.
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
    """Run `action` unless its outputs are there, undamaged, and come from the same inputs and settings.

    The stamp is written after the outputs, so that an interrupted step runs again. `action` must write each
    output under a temporary name (`shared_embeddings.utils.files.replacing`).

    Args:
        name: what is printed, and the name of the stamp.
        stamps: folder of the stamps.
        action: makes the outputs.
        inputs: files whose content decides about the outputs.
        outputs: files that `action` leaves.
        settings: everything else that decides about the outputs, as JSON values.
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
    """Do `work` and print the line that it returns."""
    print_line(work())


def print_line(line: str) -> None:
    """Print a line in one piece: ``print`` of an unbuffered process writes its end apart, and workers mix."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _checksums(paths: Sequence[Path]) -> dict[str, str | None]:
    """Checksum by file name; ``None`` where the file is absent."""
    return {path.name: sha256(path) if path.is_file() else None for path in paths}


REPORT = "fit.json"


def distillation_options(distill: dict[str, Any], model: Path) -> dict[str, Any]:
    """The option of training that a row's ``distill`` stands for, with the teacher's trained `model`."""
    return {"embedding_distillation": {**distill, "teacher": str(model)}}


def fit_model(
    teacher: Path,
    embedding: dict[str, Any],
    counts: Path,
    seed: int,
    output: Path,
    fit: Mapping[str, Any],
) -> None:
    """Write a copy of a trained model with an embedding that is fitted to its own.

    This runs ``shared-embeddings compress``, which writes its report to ``fit.json`` beside the copy.

    Args:
        teacher: the trained model, of any host.
        embedding: method and options of the new embedding.
        counts: a word, a tab and its count on every line.
        seed: of what is drawn.
        output: the copy.
        fit: the row's ``fit``: ``fit_steps`` and ``store`` may be left out.

    Raises:
        UserError: the command failed.
        SystemExit: with status 2 when the command has reported a mistake of the user's itself.
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
