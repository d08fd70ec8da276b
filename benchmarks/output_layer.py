"""Time and memory of the output layer of every method, against a plain table and its scores in full.

For each method: forward and backward pass of `cross_entropy`, as a ratio to those of
``F.cross_entropy(hidden @ table.T, targets)``. Times are medians of warm runs taken in turns with the plain
ones; peak memory is what the first pass adds to a fresh process. Prints a table, or JSON with ``--json``.

    OMP_NUM_THREADS=2 python benchmarks/output_layer.py --threads 2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shared_embeddings as se
from recipes.common.table import update_readme

DENSE = "F.cross_entropy(h @ table.T)"
PADDING = 1


class Row(NamedTuple):
    """One embedding to measure."""

    name: str
    method: str
    options: dict[str, Any]


class Sizes(NamedTuple):
    """V, D, N, and how the measurement is run."""

    vocab_size: int
    dim: int
    tokens: int
    threads: int
    repeats: int


class Dense(nn.Module):
    """A plain table whose scores exist in full."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.score_dim = dim
        self.weight = nn.Parameter(torch.randn(vocab_size, dim) * dim**-0.5)

    def cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of hidden ``(N, D)`` and targets ``(N,)``."""
        return F.cross_entropy(hidden @ self.weight.T, targets, ignore_index=PADDING)


def rows(dim: int) -> list[Row]:
    """What is measured: each registered method, at sizes like those of the papers where they have options."""
    narrow, wide = max(1, dim // 8), 8 * dim
    known = {
        "projective": [Row("projective", "projective", {"rank": narrow})],
        "funnel": [Row("funnel", "funnel", {"rank": narrow})],
        "define": [
            Row("define, tied to its map", "define", _define(dim, "map", output_projection=True)),
            Row("define, tied to its table", "define", _define(dim, "table")),
        ],
        "alone": [
            Row(f"alone, {kind}", "alone", {"hidden_dim": wide, "filter": kind})
            for kind in ("real", "binary")
        ],
    }
    return [row for method in se.methods() for row in known.get(method, [Row(method, method, {})])]


def _define(dim: int, output: str, **options: object) -> dict[str, Any]:
    """DeFINE with n = D / 4, k = 2 D and three layers."""
    return {"map_dim": dim // 4, "expand_dim": 2 * dim, "depth": 3, "output": output, **options}


def build(row: Row, sizes: Sizes) -> nn.Module:
    """The module of a row."""
    if row.method == DENSE:
        return Dense(sizes.vocab_size, sizes.dim)
    return se.build(
        row.method,
        num_embeddings=sizes.vocab_size,
        embedding_dim=sizes.dim,
        padding_idx=PADDING,
        **row.options,
    )


def prepared(row: Row, sizes: Sizes) -> Callable[[], None]:
    """A function that runs the forward and the backward pass of a row once."""
    torch.manual_seed(0)
    module: Any = build(row, sizes)
    hidden = torch.randn(sizes.tokens, module.score_dim, requires_grad=True)
    targets = torch.randint(sizes.vocab_size, (sizes.tokens,))
    options = {} if row.method == DENSE else {"ignore_index": PADDING}

    def run() -> None:
        module.cross_entropy(hidden, targets, **options).backward()
        hidden.grad = None
        module.zero_grad(set_to_none=True)

    return run


def median_times(row: Row, sizes: Sizes) -> tuple[float, float]:
    """Median seconds of a row and of the plain table, in turns, after one warm run of each."""
    functions = (prepared(row, sizes), prepared(Row(DENSE, DENSE, {}), sizes))
    taken: tuple[list[float], list[float]] = ([], [])
    for repeat in range(sizes.repeats + 1):
        for function, times in zip(functions, taken, strict=True):
            start = time.perf_counter()
            function()
            if repeat > 0:
                times.append(time.perf_counter() - start)
    return statistics.median(taken[0]), statistics.median(taken[1])


def peak_memory(row: Row, sizes: Sizes) -> int:
    """Bytes that the first forward and backward pass of a row adds to the peak of a fresh process."""
    command = [sys.executable, __file__, "--peak-of", json.dumps(row), "--sizes", json.dumps(sizes)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def added_peak(row: Row, sizes: Sizes) -> int:
    """`peak_memory`, in this process."""
    run = prepared(row, sizes)
    before = _status("VmRSS")
    # Writing 5 makes Linux forget the peak so far.
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    run()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """A size of this process in bytes."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(name))
    return int(line.split()[1]) * 1024


def measure(sizes: Sizes) -> list[dict[str, Any]]:
    """Times and memory of all rows, the plain table first."""
    dense_peak = peak_memory(Row(DENSE, DENSE, {}), sizes)
    results = [_result(DENSE, None, None, dense_peak, dense_peak)]
    for row in rows(sizes.dim):
        print(f"measuring {row.name} ...", file=sys.stderr, flush=True)
        seconds, dense_seconds = median_times(row, sizes)
        results.append(_result(row.name, seconds, dense_seconds, peak_memory(row, sizes), dense_peak))
    return results


def _result(
    name: str, seconds: float | None, dense: float | None, peak: int, dense_peak: int
) -> dict[str, Any]:
    """One line of the table."""
    return {
        "name": name,
        "seconds": seconds,
        "dense_seconds": dense,
        "time_ratio": None if seconds is None or dense is None else seconds / dense,
        "peak_mib": peak / 2**20,
        "peak_ratio": peak / dense_peak,
    }


def as_table(results: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| embedding | time, ratio | peak memory, MiB | peak memory, ratio |",
        "| --- " + "| --: " * 3 + "|",
    ]
    for result in results:
        numbers = [
            "" if result[key] is None else f"{result[key]:.{digits}f}"
            for key, digits in (
                ("time_ratio", 2),
                ("peak_mib", 0),
                ("peak_ratio", 3),
            )
        ]
        lines.append("| " + " | ".join([result["name"], *numbers]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("vocab-size", 37000), ("dim", 512), ("tokens", 4096), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--readme", type=Path, help="put the table between the markers of this file, too")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        sizes = Sizes(*json.loads(arguments.sizes))
        torch.set_num_threads(sizes.threads)
        print(added_peak(Row(*json.loads(arguments.peak_of)), sizes))
        return
    sizes = Sizes(arguments.vocab_size, arguments.dim, arguments.tokens, arguments.threads, arguments.repeats)
    torch.set_num_threads(sizes.threads)
    results = measure(sizes)
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, **sizes._asdict(), "results": results}, indent=2))
        return
    size = f"V = {sizes.vocab_size:,}, D = {sizes.dim}, N = {sizes.tokens:,}"
    text = f"{size}, {sizes.threads} threads, torch {torch.__version__}\n\n{as_table(results)}"
    print(text)
    if arguments.readme:
        update_readme(arguments.readme, "output layer", text)


if __name__ == "__main__":
    main()
