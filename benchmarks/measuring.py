"""What all benchmarks share: times, memory of this process, and publishing numbers.

A file of results has one JSON object per line, each the record of one benchmark, named by its key
``benchmark``. A table in a README stands between the markers of the same name.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.common.table import update_readme
from shared_embeddings.utils.command_line import Parser, positive
from shared_embeddings.utils.files import write_text
from shared_embeddings.utils.paths import existing_file, output_path
from shared_embeddings.utils.reading import parse_json
from shared_embeddings.utils.results import portable, provenance

Record = dict[str, Any]
Step = Callable[[], object]


def median_clocks(steps: Iterable[Step], repeats: int) -> list[tuple[float, float]]:
    """Return median wall-clock and CPU seconds of `steps`, which alternate after one warm-up run each."""
    functions = list(steps)
    taken: list[list[tuple[float, float]]] = [[] for _ in functions]
    for repeat in range(repeats + 1):
        for function, times in zip(functions, taken, strict=True):
            processor, start = time.process_time(), time.perf_counter()
            function()
            seconds = time.perf_counter() - start
            if repeat > 0:
                times.append((seconds, time.process_time() - processor))
    medians = [[statistics.median(clock) for clock in zip(*times)] for times in taken]
    return [(wall, processor) for wall, processor in medians]


def median_times(steps: Iterable[Step], repeats: int) -> list[float]:
    """Return the wall-clock seconds of `median_clocks`."""
    return [seconds for seconds, _ in median_clocks(steps, repeats)]


def memory(name: str = "VmRSS") -> int:
    """Return the memory of this process in bytes; with ``VmHWM`` the largest so far."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(name))
    return int(line.split()[1]) * 1024


def added_peak(step: Step) -> int:
    """Return the bytes that the first step adds to the peak memory of this process."""
    before = memory()
    # Writing 5 resets the peak in Linux.
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    step()
    return memory("VmHWM") - before


def parser_of(module: str, description: str | None, threads: int = 0) -> Parser:
    """Return the parser of a benchmark, with the options for where its numbers go, and of timed runs."""
    parser = Parser(
        f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=output_path, help="write the numbers to this file of results")
    parser.add_argument("--readme", type=existing_file, help="put the table between the markers of this file")
    if threads:
        parser.add_argument("--repeats", type=positive, default=5, help="measured runs of each (default: 5)")
        parser.add_argument("--threads", type=positive, default=threads)
    return parser


def in_fresh_process(module: str, *arguments: object) -> Any:
    """Return what ``python -m module`` prints as JSON."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1) -> str:
    """Return a Markdown table; columns after the first ones with names are aligned to the right."""
    sides = ["---"] * names + ["--:"] * (len(titles) - names)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, sides, *rows))


def read_records(path: Path) -> dict[str, Record]:
    """Return the records of a file of results by benchmark."""
    lines = [parse_json(line, str(path)) for line in path.read_text(encoding="utf-8").splitlines()]
    return {record.pop("benchmark"): record for record in lines}


def earlier_record(path: Path | None, benchmark: str) -> Record | None:
    """Return the record of one benchmark in its output file, or None if there is none yet."""
    return read_records(path).get(benchmark) if path is not None and path.exists() else None


def save_record(path: Path, benchmark: str, record: Mapping[str, Any]) -> None:
    """Write the record of one benchmark, with date, versions, commit and device, into a file of results."""
    records = read_records(path) if path.exists() else {}
    records[benchmark] = portable({**provenance(), **record})
    lines = (
        json.dumps({"benchmark": name, **records[name]}, ensure_ascii=False, allow_nan=False)
        for name in sorted(records)
    )
    write_text(path, "".join(f"{line}\n" for line in lines))


def publish(record: Record, text: str, benchmark: str, arguments: argparse.Namespace) -> None:
    """Print `text`, and as requested write the record and put the text between the markers of a README."""
    print(text)
    if arguments.output:
        save_record(arguments.output, benchmark, record)
    if arguments.readme:
        update_readme(arguments.readme, benchmark, text)
