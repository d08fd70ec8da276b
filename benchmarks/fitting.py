"""How well every method reconstructs a trained table, all at the same size.

The table holds skip-gram vectors of a text (one sentence a line, words apart by spaces), such as the Penn
Treebank's ``ptb.train.txt``. Options are those that `suggest` finds for the number of parameters.

    python -m benchmarks.fitting --text ptb.train.txt --output benchmarks/results/fitting.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shared_embeddings as se
from recipes.common.table import update_readme
from shared_embeddings.command_line import Parser
from shared_embeddings.files import write_text
from shared_embeddings.skipgram import train_word_vectors
from shared_embeddings.suggest import suggest


def trained_table(text: Path, dim: int, epochs: int) -> tuple[Tensor, Tensor]:
    """Vectors ``(V, D)`` of all words of a text, the most frequent first, and their counts ``(V,)``."""
    with text.open(encoding="utf-8") as lines:
        counts = Counter(word for line in lines for word in line.split())
    words = [word for word, _ in counts.most_common()]
    vectors = train_word_vectors([text], words, dim, epochs=epochs)
    return torch.from_numpy(vectors), torch.tensor([counts[word] for word in words])


def measure(table: Tensor, counts: Tensor, budget: int) -> list[dict[str, Any]]:
    """One fit of every method that has options for `budget`, the nearest to the table first."""
    found = []
    for suggestion in suggest(*table.shape, budget):
        if suggestion.options is None:
            continue
        options = _to_be_fitted(suggestion.options)
        print(f"{suggestion.method} {options}", flush=True)
        _, report = se.fit(suggestion.method, table, token_counts=counts, **options)
        found.append(dataclasses.asdict(report))
    return sorted(found, key=lambda report: report["loss"])


def _to_be_fitted(options: Mapping[str, Any]) -> dict[str, Any]:
    """Suggested options, without classes at random: fitting finds better ones."""
    return {name: value for name, value in options.items() if name != "random_classes"}


def as_table(found: list[dict[str, Any]]) -> str:
    """The reports as a Markdown table."""
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


def main() -> None:
    """Read the arguments, fit, print."""
    parser = Parser(
        "python -m benchmarks.fitting",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--dim", type=int, default=400, help="D (default: 400)")
    parser.add_argument("--epochs", type=int, default=10, help="passes of skip-gram (default: 10)")
    parser.add_argument("--compression", type=float, default=8.0, help="(default: 8)")
    parser.add_argument("--output", type=Path, help="write the numbers to this JSON file")
    parser.add_argument("--readme", type=Path, help="put the table between the markers of this file")
    arguments = parser.parse_args()
    table, counts = trained_table(arguments.text, arguments.dim, arguments.epochs)
    found = measure(table, counts, int(table.numel() / arguments.compression))
    text = f"{arguments.text.name}: {table.size(0):,} x {table.size(1)}\n\n{as_table(found)}"
    print(text)
    if arguments.output:
        write_text(
            arguments.output, json.dumps({"text": arguments.text.name, "fits": found}, indent=2) + "\n"
        )
    if arguments.readme:
        update_readme(arguments.readme, "fitting", text)


if __name__ == "__main__":
    main()
