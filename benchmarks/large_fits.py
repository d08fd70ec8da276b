"""Measures the time and the memory of fits to a large table, each fit in a process of its own.

The table is drawn: normal numbers with a decaying spectrum and rows of different lengths; words have counts
by Zipf's law. Options of `quantized` are in the name of a fit, those of other methods are found by
`compress --target-ratio`. `benchmarks.fitting --size` runs this.

Axes: ``V`` words, ``D`` dimensions.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import shared_embeddings as se
from benchmarks.measuring import added_peak
from shared_embeddings.options import OptionError
from shared_embeddings.registry import method_class
from shared_embeddings.sizing.targets import options_within

_QUANTIZED = "quantized"
_CODECS = {
    "uniform": (4,),
    "lloyd_max": (4,),
    "residual": (4, 2, 1),
    "trellis": (4, 2, 1),
    "spectral": (4, 2, 1),
    "principal": (2,),
}
# What is fitted: methods with their default options, and `quantized` with a codec and a number of bits.
NAMES = [
    *(method for method in se.methods() if method != _QUANTIZED),
    *(f"{_QUANTIZED}, {codec}, {bits} bits" for codec, widths in _CODECS.items() for bits in widths),
]
_BLOCK = 8192
_DECAY = 0.35


class Size(NamedTuple):
    """V and D."""

    words: int
    dim: int

    @classmethod
    def parse(cls, text: str) -> Size:
        """Read a size such as 262144x640.

        Raises:
            ValueError: the text is not two whole numbers with an x between them.
        """
        words, dim = map(int, text.split("x"))
        if words < 1 or dim < 1:
            raise ValueError("both numbers must be at least 1")
        return cls(words, dim)


def drawn_table(size: Size) -> tuple[Tensor, Tensor]:
    """A table ``(V, D)``, and counts ``(V,)``."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.linalg.qr(torch.randn(size.dim, size.dim, generator=generator)).Q
    directions *= torch.arange(1.0, size.dim + 1).unsqueeze(1) ** -_DECAY
    table = torch.empty(size)
    for rows in table.split(_BLOCK):
        codes = torch.randn(rows.shape, generator=generator)
        torch.mm(codes * (0.5 + torch.rand(len(rows), 1, generator=generator)), directions, out=rows)
    return table, 1e6 / torch.arange(1.0, size.words + 1)


def fit_one(name: str, size: Size, compression: int) -> dict[str, Any]:
    """Fit one of `NAMES` in this process; returns its sizes, times, memory and errors."""
    started = time.perf_counter()
    method, options = _options(name, size, compression)
    found: dict[str, Any] = {"method": name, "search_seconds": time.perf_counter() - started}
    # Fitting finds better classes than random ones.
    options.pop("random_classes", None)
    table, counts = drawn_table(size)

    def fit() -> None:
        busy = time.process_time()
        _, report = se.fit(method, table, token_counts=counts, **options)
        found.update(
            options=options,
            seconds=report.seconds,
            cpu_seconds=time.process_time() - busy,
            compression=32 * table.numel() / report.stored_bits,
            relative_error=report.relative_error,
            weighted_error=report.weighted_error,
        )

    found["peak_tables"] = added_peak(fit) / table.nbytes
    return found


def _options(name: str, size: Size, compression: int) -> tuple[str, dict[str, Any]]:
    """The method and its options: those in its name, or those at a size in bytes, in its own storage.

    Raises:
        OptionError: the method is impossible at this size.
    """
    method, *named = name.split(", ")
    if named:
        return method, {"codec": named[0], "bits": float(named[1].removesuffix(" bits"))}
    limit = 4 * size.words * size.dim // compression
    return method, dict(options_within(method, *size, limit, method_class(method).default_store))


def fit_apart(name: str, size: Size, compression: int) -> dict[str, Any] | None:
    """`fit_one` in a new process; None if the method is impossible at this size."""
    try:
        _options(name, size, compression)
    except OptionError as error:
        print(f"{name} is skipped: {error}", file=sys.stderr, flush=True)
        return None
    print(f"{name} {size.words} x {size.dim}", file=sys.stderr, flush=True)
    asked = ["--size", f"{size.words}x{size.dim}", "--compression", str(compression), "--one", name]
    command = [sys.executable, "-m", "benchmarks.fitting", *asked]
    return dict(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


def as_table(found: Sequence[dict[str, Any]]) -> str:
    """Format the measurements as a Markdown table."""
    lines = [
        "| method | smaller | relative error | weighted error | seconds to find options | seconds to fit "
        "| with the report, CPU seconds | memory, tables |",
        "| --- " + "| --: " * 7 + "|",
    ]
    lines += [
        f"| {fit['method']} | {fit['compression']:.1f}x | {fit['relative_error']:.3f} "
        f"| {fit['weighted_error']:.3f} | {fit['search_seconds']:.1f} | {fit['seconds']:.0f} "
        f"| {fit['cpu_seconds']:.0f} | {fit['peak_tables']:.1f} |"
        for fit in sorted(found, key=lambda fit: float(fit["relative_error"]))
    ]
    return "\n".join(lines)
