"""Everything that has to be measured on a GPU, in slices of a few minutes, most valuable first.

Every slice has cases. Results are written after each case, and a new run continues where the last one ended.
A case that runs out of memory, or fails, does not stop the others.

    python -m benchmarks.gpu                                  # all slices, 8 minutes each at most
    python -m benchmarks.gpu --slices output input --minutes 20
    python -m benchmarks.gpu --publish                        # results into benchmarks/README.md
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import gpu_cases
from benchmarks.measuring import earlier_record, markdown, save_record
from recipes.common.results import REPOSITORY
from recipes.common.table import NOT_RUN, update_readme
from recipes.common.tools import python_path, run_main
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError, first_line
from shared_embeddings.utils.files import write_text
from shared_embeddings.utils.reading import parse_json
from shared_embeddings.utils.results import portable, provenance

Measured = dict[str, Any]
Case = tuple[str, Callable[[float], Measured]]
BENCHMARK = "gpu"
FILE = "results.jsonl"
RESULTS, README = REPOSITORY / "benchmarks" / "results.jsonl", REPOSITORY / "benchmarks" / "README.md"
NO_MEMORY = "out of memory"
# A case is not started with fewer seconds left, and a slice is ended this long after its time.
_LEAST, _GRACE = 15.0, 120.0
_MEMORY_COLUMNS = {"mib": ("peak, MiB", 0), "mib/": ("peak, ratio", 3)}
_LAYER_COLUMNS = {"ms": ("ms", 2), "ms/": ("time, ratio", 2), **_MEMORY_COLUMNS}
_STEP_COLUMNS = {"tokens_per_second": ("tokens/s", 0), "tokens_per_second/": ("ratio", 2), **_MEMORY_COLUMNS}


class Slice(NamedTuple):
    """A part of the measurements, which is a table in the README.

    Attributes:
        title: of the table.
        cases: gives the cases for the options of the command.
        columns: by the key of a number: title and digits; with a slash behind the key, the number is divided
            by that of the first case.
    """

    title: str
    cases: Callable[[argparse.Namespace], Iterator[Case]]
    columns: dict[str, tuple[str, int]]


def _limited(name: str, run: Callable[[], Measured]) -> Case:
    """A case that runs for some seconds at most."""

    def within(seconds: float) -> Measured:
        with gpu_cases.time_limit(seconds):
            return run()

    return name, within


def _measured(cases: Callable[[bool], Iterator[tuple[str, Callable[[], Measured]]]]) -> Any:
    """Cases in this process."""
    return lambda options: (_limited(*case) for case in cases(options.tiny))


def _layers(side: str, vocabulary: int) -> Slice:
    title = f"{side.capitalize()} layer in bf16, V = {vocabulary:,}, D = 512, N = 4,096"
    cases = _measured(functools.partial(gpu_cases.layer_cases, side, vocabulary))
    return Slice(title, cases, _LAYER_COLUMNS)


def _apart(name: str, run: Callable[[Path, bool], Measured]) -> Any:
    """One case in other processes."""
    return lambda options: iter([_limited(name, functools.partial(run, options.folder, options.tiny))])


SLICES = {
    "tests": Slice(
        "Tests",
        _apart("pytest -m gpu", gpu_cases.run_tests),
        {name: (name, 0) for name in ("passed", "failures", "errors", "skipped", "seconds")},
    ),
    "output": _layers("output", 37_000),
    "output_large": _layers("output", gpu_cases.LARGE),
    "input": _layers("input", 37_000),
    "input_large": _layers("input", gpu_cases.LARGE),
    "transformer": Slice(
        "Training the Transformer base of OpenNMT-py, V = 37,000, 25,600 tokens in a batch",
        _measured(gpu_cases.translator_cases),
        _STEP_COLUMNS,
    ),
    "transformer_xl": Slice(
        "Training Transformer-XL (WikiText-103, base), 60 x 150 tokens, adaptive",
        _measured(gpu_cases.xl_cases),
        _STEP_COLUMNS,
    ),
    "processes": Slice(
        "Two processes on one device, compared with one that has both batches",
        _apart("AWD-LSTM over gloo", gpu_cases.train_shared),
        {"loss_of_one": ("loss of one", 4), "loss_of_two": ("of two", 4), "difference": ("difference", 6)},
    ),
}


# Of this process: its results have the date of its start.
_origin = functools.cache(provenance)


class Results:
    """The results of all cases, in a file of JSON lines that is rewritten after each case."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        records = [parse_json(line, f"{path}: line {number}") for number, line in enumerate(lines, start=1)]
        self.records = {(record["slice"], record["case"]): record for record in records}

    def add(self, name: str, case: str, **measured: Any) -> None:
        """Replace the result of a case."""
        record = {"slice": name, "case": case, **_origin(), **measured}
        self.records[name, case] = portable(record)
        lines = (json.dumps(each, ensure_ascii=False, allow_nan=False) for each in self.records.values())
        write_text(self.path, "".join(f"{line}\n" for line in lines))

    def pending(self, name: str, cases: Sequence[Case]) -> list[Case]:
        """The cases without a final result, those that were tried before last."""
        found = [(self.records.get((name, case)), (case, run)) for case, run in cases]
        open_cases = [(record is not None, case) for record, case in found if not (record or {}).get("done")]
        return [case for _, case in sorted(open_cases, key=lambda pair: pair[0])]


def run_slice(name: str, options: argparse.Namespace, results: Results) -> None:
    """Run the pending cases of a slice while there is time."""
    deadline = time.monotonic() + 60 * options.minutes
    pending = results.pending(name, list(SLICES[name].cases(options)))
    for case, run in pending:
        left = deadline - time.monotonic()
        if left < _LEAST:
            break
        print(f"{name}: {case} ...", file=sys.stderr, flush=True)
        # What stays if the process dies.
        results.add(name, case, failed="interrupted", done=False)
        results.add(name, case, **outcome(run, left))


def outcome(run: Callable[[float], Measured], seconds: float) -> dict[str, Any]:
    """The numbers of a case, or why there are none; a case that is not done is tried again."""
    try:
        return {"measured": run(seconds), "done": True}
    except gpu_cases.OutOfTime:
        return {"failed": "not finished", "done": False}
    except torch.OutOfMemoryError:
        return {"failed": NO_MEMORY, "done": True}
    except torch.AcceleratorError:
        raise
    except (Exception, SystemExit) as error:
        message = first_line(error) if isinstance(error, Exception) else f"ended with status {error.code}"
        return {"failed": f"{type(error).__name__}: {message}", "done": False}
    finally:
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def run_apart(name: str, options: argparse.Namespace) -> None:
    """Run a slice in a new process; if it crashes, another one continues with the remaining cases."""
    deadline = time.monotonic() + 60 * options.minutes
    while (left := deadline - time.monotonic()) > _LEAST:
        asked = ["--slices", name, "--minutes", f"{left / 60:.2f}", "--folder", str(options.folder), "--here"]
        with subprocess.Popen([sys.executable, "-m", "benchmarks.gpu", *asked], cwd=REPOSITORY) as process:
            try:
                process.wait(left + _GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
        if not process.returncode:
            return
        print(f"{name}: ended with status {process.returncode}", file=sys.stderr, flush=True)
        tried = Results(options.folder / FILE).records
        if all((name, case) in tried for case, _ in SLICES[name].cases(options)):
            return


def as_text(records: dict[tuple[str, str], Measured]) -> str:
    """A table for each slice with results, a line with its other cases, and a list of the other slices."""
    options = argparse.Namespace(tiny=False, folder=Path())
    has_results = {name for name, _ in records}
    parts = []
    for name, part in SLICES.items():
        if name not in has_results:
            continue
        cases = [case for case, _ in part.cases(options)]
        found = {case: records[name, case] for case in cases if (name, case) in records}
        first = found.get(cases[0], {}).get("measured") or {}
        rows = [[case, *_cells(part, record, first)] for case, record in found.items()]
        table = markdown(["", *(title for title, _ in part.columns.values())], rows)
        idle = "; ".join(case for case in cases if case not in found)
        parts.append(f"{part.title}\n\n{table}" + (f"\n\nNot run: {idle}." if idle else ""))
    devices = sorted({record["device"] for record in records.values()})
    versions = sorted({record["versions"]["torch"] for record in records.values()})
    if records:
        parts.insert(0, f"Measured on {', '.join(devices)}; torch {', '.join(versions)}.")
    if missing := [f"- {part.title}: {NOT_RUN}" for name, part in SLICES.items() if name not in has_results]:
        parts.append("\n".join(missing))
    return "\n\n".join(parts)


def _cells(part: Slice, record: Measured, first: Measured) -> list[str]:
    """The cells of a case; `first` has the numbers that ratios are to."""
    numbers = record.get("measured")
    if not numbers:
        return [record["failed"], *["–"] * (len(part.columns) - 1)]
    cells = []
    for key, (_, digits) in part.columns.items():
        value, base = numbers.get(key.rstrip("/")), first.get(key.rstrip("/"))
        if key.endswith("/"):
            value = value / base if value is not None and base else None
        cells.append("–" if value is None else f"{value:,.{digits}f}")
    return cells


def publish(results: Results) -> None:
    """Put the results of a GPU into the benchmarks' file of results and README, with those of before."""
    cases = list(results.records.values())
    before = (earlier_record(RESULTS, BENCHMARK) or {}).get("cases", [])
    records = {(case["slice"], case["case"]): case for case in [*before, *cases]}
    if cases:
        save_record(RESULTS, BENCHMARK, {"cases": list(records.values())})
    update_readme(README, BENCHMARK, as_text(records))


def main(arguments: Sequence[str]) -> None:
    """Run, list or publish."""
    parser = Parser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slices", nargs="+", choices=SLICES, default=list(SLICES), metavar="NAME")
    parser.add_argument("--minutes", type=float, default=8.0, help="limit of each slice (default: 8)")
    parser.add_argument("--tiny", action="store_true", help="try everything on the CPU, with tiny sizes")
    parser.add_argument("--list", action="store_true", help="list the slices and how far they are")
    parser.add_argument("--publish", action="store_true", help="put the results into benchmarks/README.md")
    parser.add_argument("--folder", type=Path, help="of results (default: runs/gpu)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    runs = Path(os.environ.get("RUNS") or REPOSITORY / "runs")
    options.folder = (options.folder or runs / ("gpu_tiny" if options.tiny else "gpu")).absolute()
    results = Results(options.folder / FILE)
    if options.publish:
        if options.tiny:
            raise UserError("--publish is for the results of a GPU; remove --tiny")
        publish(results)
        return
    if not options.list:
        if not options.tiny and not torch.cuda.is_available():
            raise UserError("torch finds no CUDA device; --tiny tries everything on the CPU")
        os.environ["RUNS"] = str(options.folder)
        os.environ["PYTHONPATH"] = python_path()
        for name in options.slices:
            run_slice(name, options, results) if options.tiny or options.here else run_apart(name, options)
    results = Results(options.folder / FILE)
    for name in options.slices:
        cases = list(SLICES[name].cases(options))
        print(f"{name}: {len(cases) - len(results.pending(name, cases))} of {len(cases)} done")


if __name__ == "__main__":
    raise SystemExit(run_main("gpu", main))
