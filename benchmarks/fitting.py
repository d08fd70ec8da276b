"""Measures how well every method reconstructs a trained table, all at the same size.

The table holds skip-gram vectors of a text (one sentence per line, words separated by spaces), such as the
Penn Treebank's ``ptb.train.txt``. Options are those that `suggest` finds for the number of parameters. Fits
that the ``--output`` file already has are skipped, so an interrupted command can be run again to resume.

    python -m benchmarks.fitting --text ptb.train.txt --output benchmarks/results.jsonl

With ``--size`` it measures the time and the memory of fits to a drawn table of this size instead, each fit in
a process of its own.

    python -m benchmarks.fitting --size 262144x640 --output benchmarks/results.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shared_embeddings as se
from benchmarks.large_fits import NAMES, Size, fit_apart, fit_one
from benchmarks.large_fits import as_table as as_large_table
from benchmarks.measuring import Record, earlier_record, parser_of, publish, save_record
from recipes.common.tools import run_main
from shared_embeddings.classes.making import train_word_vectors
from shared_embeddings.errors import UserError
from shared_embeddings.sizing.suggest import suggest
from shared_embeddings.utils.command_line import positive
from shared_embeddings.utils.files import sha256
from shared_embeddings.utils.path_options import PathOption


def trained_table(text: Path, dim: int, epochs: int) -> tuple[Tensor, Tensor]:
    """Train vectors ``(V, D)`` for all words of a text, most frequent first; also returns counts ``(V,)``."""
    with text.open(encoding="utf-8") as lines:
        counts = Counter(word for line in lines for word in line.split())
    words = [word for word, _ in counts.most_common()]
    vectors = train_word_vectors([text], words, dim, epochs=epochs)
    return torch.from_numpy(vectors), torch.tensor([counts[word] for word in words])


def suggested(table: Tensor, budget: int, methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Find options of `methods` within a parameter budget; names the methods that cannot meet it."""
    found: dict[str, dict[str, Any]] = {}
    for each in suggest(table.size(0), table.size(1), budget):
        if each.method not in methods:
            continue
        if each.options is None:
            print(f"{each.method} is skipped: {each.remark}", file=sys.stderr, flush=True)
            continue
        # Fitting finds better classes than random ones.
        found[each.method] = {key: value for key, value in each.options.items() if key != "random_classes"}
    return found


def measure(method: str, options: dict[str, Any], table: Tensor, counts: Tensor) -> dict[str, Any]:
    """Fit one method; returns the report."""
    print(f"{method} {options}", file=sys.stderr, flush=True)
    _, report = se.fit(method, table, token_counts=counts, **options)
    return dataclasses.asdict(report)


def kept(path: Path | None, benchmark: str, asked: Record) -> list[dict[str, Any]]:
    """Read the fits that an earlier run with the same text and sizes has written.

    Raises:
        UserError: the file is not one of results, or an earlier run had other settings.
    """
    record = earlier_record(path, benchmark)
    if record is None:
        return []
    for name, value in asked.items():
        if record.get(name) != value:
            raise UserError(
                f"{path}: {name} is {record.get(name)!r} in this file but {value!r} now; "
                f"remove the file or pass another --output"
            )
    return list(record["fits"])


def as_table(found: list[dict[str, Any]]) -> str:
    """Format the reports as a Markdown table."""
    lines = [
        "| method | parameters | KiB stored | mean L2 loss | relative error | weighted error | seconds |",
        "| --- " + "| --: " * 6 + "|",
    ]
    lines += [
        f"| {report['method']} | {report['parameters']:,} | {report['stored_bits'] / 8192:,.0f} "
        f"| {report['loss']:.3f} | {report['relative_error']:.3f} | {report['weighted_error']:.3f} "
        f"| {report['seconds']:.0f} |"
        for report in found
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Measure what the output file does not have yet, and publish.

    Raises:
        OSError, UserError: the text or the output cannot be used, or the README lacks the markers.
    """
    parser = parser_of("benchmarks.fitting", __doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=PathOption.FILE)
    source.add_argument("--size", type=Size.parse, metavar="VxD", help="measure time and memory")
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
    asked = {
        "size": list(options.size),
        "compression": options.compression,
        "threads": torch.get_num_threads(),
    }
    fits = kept(options.output, "large fits", asked)
    for method in options.methods or NAMES:
        if method not in {fit["method"] for fit in fits}:
            if found := fit_apart(method, options.size, options.compression):
                fits.append(found)
            if options.output:
                save_record(options.output, "large fits", {**asked, "fits": fits})
    title = (
        f"{options.size.words:,} x {options.size.dim}; threads: {asked['threads']}; torch {torch.__version__}"
    )
    publish({**asked, "fits": fits}, f"{title}\n\n{as_large_table(fits)}", "large fits", options)


def measure_trained(options: argparse.Namespace) -> None:
    """Fit methods to word vectors of a text, as far as the output file does not have them, and publish."""
    asked = {
        "text": options.text.name,
        "sha256": sha256(options.text),
        "dim": options.dim,
        "epochs": options.epochs,
        "compression": options.compression,
    }
    fits = kept(options.output, "fitting", asked)
    table, counts = trained_table(options.text, options.dim, options.epochs)
    budget = table.numel() // options.compression
    for method, chosen in suggested(table, budget, options.methods or se.methods()).items():
        if method in {fit["method"] for fit in fits}:
            continue
        fits = sorted([*fits, measure(method, chosen, table, counts)], key=lambda fit: float(fit["loss"]))
        if options.output:
            save_record(options.output, "fitting", {**asked, "fits": fits})
    title = f"{options.text.name}: {table.size(0):,} x {table.size(1)}, vectors of {options.epochs} passes"
    publish({**asked, "fits": fits}, f"{title}\n\n{as_table(fits)}", "fitting", options)


if __name__ == "__main__":
    raise SystemExit(run_main("fitting", main))
