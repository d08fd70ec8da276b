"""Measures times next to the plain layer, memory of a fresh process, and the cost of matrix products."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import shared_embeddings as se
from benchmarks.embeddings import DENSE, PUBLISHED, SETTINGS, Row, Setting, rows
from benchmarks.publishing import joined, parser_of, publish
from shared_embeddings.utils.command_line import positive
from shared_embeddings.utils.path_options import PathOption

Step = Callable[[], object]
Prepare = Callable[[Row, Setting], Step]
PLAIN = Row(DENSE, DENSE, {})
# Times of the plain layer within this factor are noise of the machine.
_STEADY = 2.0
COLUMNS = {
    "time_ratio": ("time, ratio", 2),
    "limit_ratio": ("products alone, ratio", 2),
    "peak_mib": ("peak memory, MiB", 0),
    "peak_ratio": ("peak memory, ratio", 3),
}


def median_times(steps: Iterable[Step], repeats: int) -> list[float]:
    """Median seconds of each of `steps`, which alternate after one warm-up run each."""
    functions = list(steps)
    taken: list[list[float]] = [[] for _ in functions]
    for repeat in range(repeats + 1):
        for function, times in zip(functions, taken, strict=True):
            start = time.perf_counter()
            function()
            if repeat > 0:
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken]


def product_speed(size: int = 2048, repeats: int = 5) -> float:
    """Floating-point operations per second of a large matrix product into an allocated buffer."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    result = torch.empty(size, size)

    def multiply() -> None:
        torch.mm(left, right, out=result)

    (seconds,) = median_times([multiply], repeats)
    return 2.0 * size**3 / seconds


def operations(step: Step) -> int:
    """Floating-point operations of the matrix products in a step."""
    # The counter lacks the in-place product.
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _addmm_operations})
    with counter:
        step()
    return counter.get_total_flops()


def _addmm_operations(total: torch.Size, left: torch.Size, right: torch.Size, **_: Any) -> int:
    """Floating-point operations of ``total += left @ right``."""
    return 2 * left[0] * left[1] * right[1]


def added_peak(step: Step) -> int:
    """Bytes that the first step adds to the peak memory of this process."""
    before = resident()
    # Writing 5 resets the peak in Linux.
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    step()
    return _status("VmHWM") - before


def resident() -> int:
    """The memory of this process in bytes."""
    return _status("VmRSS")


def _status(name: str) -> int:
    """A size of this process in bytes."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(name))
    return int(line.split()[1]) * 1024


def _peak_in_fresh_process(module: str, row: Row, setting: Setting, threads: int) -> int:
    """`added_peak` of a row, measured in a new process."""
    asked = ["--peak-of", json.dumps(row), "--settings", setting.name, "--threads", str(threads)]
    command = [sys.executable, "-m", module, *asked]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(
    module: str, prepare: Prepare, setting: Setting, methods: Sequence[str], threads: int, repeats: int
) -> dict[str, Any]:
    """Measure times and memory of the plain layer and of the rows of `methods` in one setting."""
    speed = product_speed()
    results = []
    for row in [PLAIN, *rows(setting, methods)]:
        print(f"{setting.name}: measuring {row.name} ...", file=sys.stderr, flush=True)
        steps = prepare(row, setting), prepare(PLAIN, setting)
        needed = operations(steps[0]) / speed
        seconds, plain_seconds = median_times(steps, repeats)
        results.append(
            {
                "name": row.name,
                "options": row.options,
                "seconds": seconds,
                "plain_seconds": plain_seconds,
                "needed_seconds": needed,
                "peak_bytes": _peak_in_fresh_process(module, row, setting, threads),
            }
        )
    return {"setting": setting._asdict(), "product_speed": speed, "results": results}


def with_ratios(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Add to the results of one setting their ratios to the plain layer.

    Every row is compared with the plain layer that alternated with it. If that layer's time varies a lot,
    because the memory of its gradient is not always at hand, its median over all rows is used instead.
    """
    results = measured["results"]
    taken = [result["plain_seconds"] for result in results]
    median = statistics.median(taken) if max(taken) > _STEADY * min(taken) else None
    plain_peak = next(result["peak_bytes"] for result in results if result["name"] == DENSE)
    return [
        {
            **result,
            "time_ratio": result["seconds"] / (median or result["plain_seconds"]),
            "limit_ratio": result["needed_seconds"] / (median or result["plain_seconds"]),
            "peak_mib": result["peak_bytes"] / 2**20,
            "peak_ratio": result["peak_bytes"] / plain_peak,
        }
        for result in results
    ]


def as_table(measured: dict[str, Any]) -> str:
    """Format one setting as a Markdown table, with its sizes and the plain layer's times."""
    sizes, results = measured["setting"], measured["results"]
    taken = sorted(1000 * result["plain_seconds"] for result in results)
    lines = [
        f"V = {sizes['vocab_size']:,}, D = {sizes['dim']}, N = {sizes['tokens']:,}",
        "",
        "| embedding | " + " | ".join(title for title, _ in COLUMNS.values()) + " |",
        "| --- " + "| --: " * len(COLUMNS) + "|",
    ]
    for result in with_ratios(measured):
        cells = [f"{result[key]:.{digits}f}" for key, (_, digits) in COLUMNS.items()]
        lines.append("| " + " | ".join([result["name"], *cells]) + " |")
    median = statistics.median(taken)
    times = f"{median:,.0f} ms ({taken[0]:,.0f} to {taken[-1]:,.0f} across the rows)"
    return "\n".join([*lines, "", f"The plain layer took {times}."])


def measure_layers(
    module: str, marker: str, description: str | None, prepare: Prepare, arguments: Sequence[str]
) -> None:
    """Run a benchmark of layers: parse the arguments, measure, publish.

    Args:
        module: the benchmark, which fresh processes run again to measure their memory.
        marker: name of the markers in a README.
        description: text of ``--help``.
        prepare: makes the step of a row.
        arguments: the command line.

    Raises:
        OSError, UserError: a file of ``--input`` cannot be read, or the README lacks the markers.
    """
    parser = parser_of(module, description)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=PUBLISHED)
    parser.add_argument("--methods", nargs="+", choices=se.methods(), default=se.methods())
    parser.add_argument("--repeats", type=positive, default=5, help="measured runs of each (default: 5)")
    parser.add_argument("--threads", type=positive, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--input",
        type=PathOption.FILE,
        nargs="+",
        help="print the numbers of these JSON files",
    )
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.peak_of:
        (name,) = options.settings
        print(added_peak(prepare(Row(*json.loads(options.peak_of)), SETTINGS[name])))
        return
    if options.input:
        record = joined(options.input)
    else:
        how = options.methods, options.threads, options.repeats
        measured = [measure(module, prepare, SETTINGS[name], *how) for name in options.settings]
        record = {"threads": options.threads, "repeats": options.repeats, "torch": torch.__version__}
        record["measured"] = measured
    text = "\n\n".join(as_table(part) for part in record["measured"])
    publish(record, f"{text}\n\nThreads: {record['threads']}; torch {record['torch']}.", marker, options)
