"""Everything that has to be measured on a GPU, in slices of a few minutes, most valuable first.

Every slice has cases. Results are written after each case, and a new run continues where the last one ended.
A case that runs out of memory, or fails, does not stop the others, unless it breaks the device.

    python -m benchmarks.gpu                                  # all slices, about 8 minutes each
    python -m benchmarks.gpu --slices output input --minutes 20
    python -m benchmarks.gpu --publish                        # results into benchmarks/README.md
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import gpu_cases
from benchmarks.gpu_cases import Cases
from benchmarks.measuring import Record, earlier_record, markdown, read_records, save_record
from recipes.common.results import REPOSITORY
from recipes.common.table import NOT_RUN, update_readme
from recipes.common.tools import python_path, run_main
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError, first_line

BENCHMARK = "gpu"
FILE = "results.jsonl"
RESULTS, README = REPOSITORY / "benchmarks" / "results.jsonl", REPOSITORY / "benchmarks" / "README.md"
# A case is not started with fewer seconds left.
_LEAST = 15.0
_MEMORY_COLUMNS = {"mib": ("peak, MiB", 0), "mib/": ("peak, ratio", 3)}
_LAYER_COLUMNS = {"ms": ("ms", 2), "ms/": ("time, ratio", 2), **_MEMORY_COLUMNS}
_STEP_COLUMNS = {"tokens_per_second": ("tokens/s", 0), "tokens_per_second/": ("ratio", 2), **_MEMORY_COLUMNS}
# By slice and case.
Results = Mapping[tuple[str, str], Record]


class Slice(NamedTuple):
    """A part of the measurements, which is a table in the README.

    Attributes:
        title: of the table.
        cases: gives the cases for a folder, with tiny sizes or not.
        columns: by the key of a number: title and digits; with a slash behind the key, the number is divided
            by that of the first case.
    """

    title: str
    cases: Callable[[Path, bool], Cases]
    columns: dict[str, tuple[str, int]]


SLICES = {
    "tests": Slice(
        "Tests",
        lambda folder, tiny: iter([("pytest -m gpu", partial(gpu_cases.run_tests, folder))]),
        {name: (name, 0) for name in ("passed", "failures", "errors", "skipped", "seconds")},
    ),
    **{
        f"{side}{name}": Slice(
            f"{side.capitalize()} layer in bf16, V = {vocabulary:,}, D = 512, N = 4,096",
            partial(gpu_cases.layer_cases, side, vocabulary),
            _LAYER_COLUMNS,
        )
        for side in ("output", "input")
        for name, vocabulary in (("", 37_000), ("_large", gpu_cases.LARGE))
    },
    "transformer": Slice(
        "Training the Transformer base of OpenNMT-py, V = 37,000, 25,600 tokens in a batch",
        gpu_cases.translator_cases,
        _STEP_COLUMNS,
    ),
    "transformer_xl": Slice(
        "Training Transformer-XL (WikiText-103, base), 60 x 150 tokens, adaptive",
        gpu_cases.xl_cases,
        _STEP_COLUMNS,
    ),
    "processes": Slice(
        "Two processes on one device, compared with one that has both batches",
        lambda folder, tiny: iter([("AWD-LSTM over gloo", partial(gpu_cases.train_shared, folder, tiny))]),
        {"loss_of_one": ("loss of one", 4), "loss_of_two": ("of two", 4), "difference": ("difference", 6)},
    ),
}


def read_results(folder: Path) -> dict[tuple[str, str], Record]:
    """Return the results of all cases in a folder."""
    path = folder / FILE
    records = read_records(path).values() if path.exists() else ()
    return {(record["slice"], record["case"]): record for record in records}


def pending_cases(name: str, options: argparse.Namespace) -> Cases:
    """Yield the cases of a slice without a final result, those that were tried before last."""
    results = read_results(options.folder)
    cases = list(SLICES[name].cases(options.folder, options.tiny))
    for was_tried in (False, True):
        for case, run in cases:
            record = results.get((name, case))
            if (record is not None) == was_tried and not (record or {}).get("done"):
                yield case, run


def run_slice(name: str, options: argparse.Namespace) -> None:
    """Run the pending cases of a slice while there is time; a case that is not done is tried again."""
    deadline = time.monotonic() + 60 * options.minutes
    for case, run in list(pending_cases(name, options)):
        if deadline - time.monotonic() < _LEAST:
            break
        print(f"{name}: {case} ...", file=sys.stderr, flush=True)
        result: dict[str, Any] = {"failed": "interrupted", "done": False}  # what stays if the process dies
        record = partial(save_record, options.folder / FILE, f"{name}: {case}")
        record({"slice": name, "case": case, **result})
        try:
            result = {"measured": run(), "done": True}
        except torch.OutOfMemoryError:
            result = {"failed": "out of memory", "done": True}
        except torch.AcceleratorError:  # nothing else runs in this process
            raise
        except (Exception, SystemExit) as error:
            result = {"failed": f"{type(error).__name__}: {first_line(error)}", "done": False}
        record({"slice": name, "case": case, **result})
        torch.compiler.reset()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def as_text(results: Results) -> str:
    """Return a table for each slice with results, with its other cases below, and the other slices."""
    parts, missing = [], []
    for name, part in SLICES.items():
        cases = [case for case, _ in part.cases(Path(), False)]
        records = {case: results[name, case] for case in cases if (name, case) in results}
        if not records:
            missing.append(f"- {part.title}: {NOT_RUN}")
            continue
        first = records.get(cases[0], {}).get("measured") or {}
        rows = []
        for case, record in records.items():
            numbers: dict[str, Any] = record.get("measured") or {}
            cells = [] if numbers else [record["failed"], *["–"] * (len(part.columns) - 1)]
            for key, (_, digits) in part.columns.items() if numbers else ():
                value, base = (measured.get(key.rstrip("/")) for measured in (numbers, first))
                if key.endswith("/"):
                    value = value / base if value is not None and base else None
                cells.append("–" if value is None else f"{value:,.{digits}f}")
            rows.append([case, *cells])
        table = markdown(["", *(title for title, _ in part.columns.values())], rows)
        idle = "; ".join(case for case in cases if case not in records)
        parts.append(f"{part.title}\n\n{table}" + (f"\n\nNot run: {idle}." if idle else ""))
    if results:
        devices = sorted({record["device"] for record in results.values()})
        versions = sorted({record["versions"]["torch"] for record in results.values()})
        parts.insert(0, f"Measured on {', '.join(devices)}; torch {', '.join(versions)}.")
    return "\n\n".join([*parts, *(["\n".join(missing)] if missing else [])])


def main(arguments: Sequence[str]) -> None:
    """Run, list or publish."""
    parser = Parser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slices", nargs="+", choices=SLICES, default=list(SLICES), metavar="NAME")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="no case of a slice starts after them (default: 8)"
    )
    parser.add_argument("--tiny", action="store_true", help="try everything on the CPU, with tiny sizes")
    parser.add_argument("--list", action="store_true", help="list the slices and how far they are")
    parser.add_argument("--publish", action="store_true", help="put the results into benchmarks/README.md")
    parser.add_argument("--folder", type=Path, help="of results (default: runs/gpu)")
    options = parser.parse_args(arguments)
    runs = Path(os.environ.get("RUNS") or REPOSITORY / "runs")
    options.folder = (options.folder or runs / ("gpu_tiny" if options.tiny else "gpu")).absolute()
    if options.publish:
        if options.tiny:
            raise UserError("--publish is for the results of a GPU; remove --tiny")
        results = read_results(options.folder)
        before = (earlier_record(RESULTS, BENCHMARK) or {}).get("cases", [])
        records = {(case["slice"], case["case"]): case for case in [*before, *results.values()]}
        if results:
            save_record(RESULTS, BENCHMARK, {"cases": list(records.values())})
        update_readme(README, BENCHMARK, as_text(records))
        return
    if not options.list:
        if not options.tiny and not torch.cuda.is_available():
            raise UserError("torch finds no CUDA device; --tiny tries everything on the CPU")
        os.environ |= {"RUNS": str(options.folder), "PYTHONPATH": python_path()}
        for name in options.slices:
            run_slice(name, options)
    for name in options.slices:
        total = len(list(SLICES[name].cases(options.folder, options.tiny)))
        print(f"{name}: {total - len(list(pending_cases(name, options)))} of {total} done")


if __name__ == "__main__":
    raise SystemExit(run_main("gpu", main))
