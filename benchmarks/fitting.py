"""Measures how well every method reconstructs a trained table, all at the same size.

The table holds skip-gram vectors of a text (one sentence per line, words separated by spaces), such as the
Penn Treebank's ``ptb.train.txt``. Options are those that `suggest` finds for the number of parameters. Fits
that the ``--output`` file already has are skipped, so an interrupted command can be run again to resume.

    python -m benchmarks.fitting --text ptb.train.txt --output benchmarks/results.jsonl

With ``--size`` it measures the time and the memory of fits to a drawn table of this size instead, each fit in
a process of its own. The table has normal numbers with a decaying spectrum and rows of different lengths;
words have counts by Zipf's law. Options of `quantized` are in the name of a fit, those of other methods are
found as by `compress --size`.

    python -m benchmarks.fitting --size 262144x640 --output benchmarks/results.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shared_embeddings as se
from benchmarks.measuring import (
    Record,
    added_peak,
    earlier_record,
    in_fresh_process,
    markdown,
    parser_of,
    publish,
    save_record,
)
from recipes.common.tools import run_main
from shared_embeddings.compress.sizing import options_within, suggest
from shared_embeddings.quant.codec import codecs
from shared_embeddings.utils.command_line import positive
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import sha256
from shared_embeddings.utils.options import OptionError
from shared_embeddings.utils.paths import existing_file
from shared_embeddings.words.classes import train_word_vectors

_QUANTIZED = "quantized"
# What is fitted: methods with their default options, and `quantized` with a codec and a number of bits.
NAMES = [
    *(method for method in se.methods() if method != _QUANTIZED),
    *(f"{_QUANTIZED}, {codec}, {bits} bits" for codec in codecs() for bits in (4, 2, 1)),
]
# Rows of the drawn table at a time, and the decay of its spectrum.
_BLOCK, _DECAY = 8192, 0.35


def suggested(table: Tensor, budget: int, methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Find options of `methods` within a parameter budget; names the methods that cannot meet it."""
    options: dict[str, dict[str, Any]] = {}
    for suggestion in suggest(table.size(0), table.size(1), budget):
        if suggestion.method not in methods:
            continue
        if suggestion.options is None:
            print(f"{suggestion.method} is skipped: {suggestion.remark}", file=sys.stderr, flush=True)
            continue
        chosen = dict(suggestion.options)
        chosen.pop("random_classes", None)  # fitting finds better classes than random ones
        options[suggestion.method] = chosen
    return options


def earlier_fits(path: Path | None, benchmark: str, asked: Record) -> list[dict[str, Any]]:
    """Return the fits that an earlier run with the same text and sizes has written."""
    record = earlier_record(path, benchmark) or asked
    for name, value in asked.items():
        if record.get(name) != value:
            raise UserError(
                f"{path}: {name} is {record.get(name)!r} in this file but {value!r} now; "
                f"remove the file or pass another --output"
            )
    return list(record.get("fits", []))


def as_table(fits: list[dict[str, Any]]) -> str:
    """Format the reports as a Markdown table."""
    titles = "method, parameters, KiB stored, mean L2 loss, relative error, weighted error, seconds"
    rows = [
        [
            *(report["method"], f"{report['parameters']:,}", f"{report['stored_bits'] / 8192:,.0f}"),
            *(f"{report[key]:.3f}" for key in ("loss", "relative_error", "weighted_error")),
            f"{report['seconds']:.0f}",
        ]
        for report in fits
    ]
    return markdown(titles.split(", "), rows)


def parse_size(text: str) -> tuple[int, int]:
    """Read V and D from a size such as 262144x640."""
    words, dim = map(int, text.split("x"))
    return words, dim


def options_of(name: str, size: tuple[int, int], compression: int) -> tuple[str, dict[str, Any]]:
    """Return the method and its options: those in its name, or those at a size in its own storage."""
    method, *named = name.split(", ")
    if named:
        return method, {"codec": named[0], "bits": float(named[1].removesuffix(" bits"))}
    limit = 4 * size[0] * size[1] // compression
    return method, dict(options_within(method, *size, limit, se.get_method_config(method).default_store))


def fit_one(name: str, size: tuple[int, int], compression: int) -> dict[str, Any]:
    """Fit one of `NAMES` to a drawn table in this process; returns its sizes, times, memory and errors."""
    started = time.perf_counter()
    method, options = options_of(name, size, compression)
    result: dict[str, Any] = {"method": name, "search_seconds": time.perf_counter() - started}
    # Fitting finds better classes than random ones.
    options.pop("random_classes", None)
    generator = torch.Generator().manual_seed(0)
    words, dim = size
    directions = torch.linalg.qr(torch.randn(dim, dim, generator=generator)).Q
    directions *= torch.arange(1.0, dim + 1).unsqueeze(1) ** -_DECAY
    table, counts = torch.empty(size), 1e6 / torch.arange(1.0, words + 1)
    for rows in table.split(_BLOCK):
        codes = torch.randn(rows.shape, generator=generator)
        torch.mm(codes * (0.5 + torch.rand(len(rows), 1, generator=generator)), directions, out=rows)

    def fit() -> None:
        busy = time.process_time()
        _, report = se.fit(method, table, token_counts=counts, **options)
        result.update(
            options=options,
            seconds=report.seconds,
            cpu_seconds=time.process_time() - busy,
            compression=32 * table.numel() / report.stored_bits,
            relative_error=report.relative_error,
            weighted_error=report.weighted_error,
        )

    result["peak_tables"] = added_peak(fit) / table.nbytes
    return result


def as_large_table(fits: Sequence[dict[str, Any]], size: Sequence[int]) -> str:
    """Format the measurements as a Markdown table."""
    titles = ["method", "smaller", "relative error", "weighted error", "seconds to find options"]
    titles += ["seconds to fit", "numbers a second", "with the report, CPU seconds", "memory, tables"]
    rows = [
        [
            *(fit["method"], f"{fit['compression']:.1f}x"),
            *(f"{fit[key]:.3f}" for key in ("relative_error", "weighted_error")),
            *(f"{fit['search_seconds']:.1f}", f"{fit['seconds']:.0f}"),
            f"{math.prod(size) / fit['seconds'] / 1e6:.1f} million",
            *(f"{fit['cpu_seconds']:.0f}", f"{fit['peak_tables']:.1f}"),
        ]
        for fit in sorted(fits, key=lambda fit: float(fit["relative_error"]))
    ]
    return markdown(titles, rows)


def main(arguments: Sequence[str]) -> None:
    """Measure what the output file does not have yet, and publish."""
    parser = parser_of("benchmarks.fitting", __doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=existing_file)
    source.add_argument("--size", type=parse_size, metavar="VxD", help="measure time and memory")
    parser.add_argument("--methods", nargs="+", choices=NAMES, metavar="METHOD", help="(default: all)")
    parser.add_argument("--dim", type=positive, default=400, help="D (default: 400)")
    parser.add_argument("--epochs", type=positive, default=10, help="passes of skip-gram (default: 10)")
    parser.add_argument("--compression", type=positive, default=8, help="(default: 8)")
    parser.add_argument("--one", choices=NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(fit_one(options.one, options.size, options.compression)))
    elif options.size:
        measure_large(options)
    else:
        measure_trained(options)


def measure_large(options: argparse.Namespace) -> None:
    """Fit methods to a drawn table, each in its own process, and publish."""
    size, compression = options.size, options.compression
    asked = {"size": list(size), "compression": compression, "threads": torch.get_num_threads()}
    fits = earlier_fits(options.output, "large fits", asked)
    for name in options.methods or NAMES:
        if name in {fit["method"] for fit in fits}:
            continue
        print(f"{name} {size[0]} x {size[1]}", file=sys.stderr, flush=True)
        try:
            options_of(name, size, compression)
        except OptionError as error:
            print(f"{name} is skipped: {error}", file=sys.stderr, flush=True)
            continue
        how = ["--size", f"{size[0]}x{size[1]}", "--compression", compression, "--one", name]
        fits.append(dict(in_fresh_process("benchmarks.fitting", *how)))
        if options.output:
            save_record(options.output, "large fits", {**asked, "fits": fits})
    title = f"{size[0]:,} x {size[1]}; threads: {asked['threads']}; torch {torch.__version__}"
    publish({**asked, "fits": fits}, f"{title}\n\n{as_large_table(fits, size)}", "large fits", options)


def measure_trained(options: argparse.Namespace) -> None:
    """Fit methods to word vectors of a text, as far as the output file does not have them, and publish."""
    asked = {
        "text": options.text.name,
        "sha256": sha256(options.text),
        "dim": options.dim,
        "epochs": options.epochs,
        "compression": options.compression,
    }
    fits = earlier_fits(options.output, "fitting", asked)
    with options.text.open(encoding="utf-8") as lines:
        words = Counter(word for line in lines for word in line.split()).most_common()
    # Vectors (V, D) of all words, most frequent first, and counts (V,).
    vectors = train_word_vectors(
        [options.text], [word for word, _ in words], options.dim, epochs=options.epochs
    )
    table, counts = torch.from_numpy(vectors), torch.tensor([count for _, count in words])
    budget = table.numel() // options.compression
    for method, chosen in suggested(table, budget, options.methods or se.methods()).items():
        if method in {fit["method"] for fit in fits}:
            continue
        print(f"{method} {chosen}", file=sys.stderr, flush=True)
        _, report = se.fit(method, table, token_counts=counts, **chosen)
        fits = sorted([*fits, dataclasses.asdict(report)], key=lambda fit: float(fit["loss"]))
        if options.output:
            save_record(options.output, "fitting", {**asked, "fits": fits})
    title = f"{options.text.name}: {table.size(0):,} x {table.size(1)}, vectors of {options.epochs} passes"
    publish({**asked, "fits": fits}, f"{title}\n\n{as_table(fits)}", "fitting", options)


if __name__ == "__main__":
    raise SystemExit(run_main("fitting", main))
