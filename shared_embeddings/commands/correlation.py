"""The command `correlation`: how the dimensions of a model's embeddings depend on each other."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from shared_embeddings.command_line import Parser
from shared_embeddings.commands.arguments import add

SUMMARY = "correlation.json"


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = add(
        commands, "correlation", "draw the correlation between dimensions, layer by layer", _correlation
    )
    command.add_argument("--model", required=True, type=Path, help="a trained model of any host")
    command.add_argument("--output", required=True, type=Path, help=f"folder for the PNG files and {SUMMARY}")


def _correlation(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.compression_hosts import find_host
    from shared_embeddings.correlation import draw_map, layer_correlations
    from shared_embeddings.files import write_text

    if known.output.exists() and not known.output.is_dir():
        raise ValueError(f"output {known.output}: is a file; name a folder")
    host = find_host(known.model)[1]
    embeddings = host.read(known.model).embeddings()
    layers = [layer for embedding in embeddings for layer in layer_correlations(embedding)]
    summaries = []
    for layer in layers:
        for found in (layer, *layer.by_group()):
            draw_map(found, known.output / found.file_name())
            summaries.append({**found.summary(), "picture": found.file_name()})
    record = {"model": str(known.model), "layers": summaries}
    write_text(known.output / SUMMARY, json.dumps(record, indent=1) + "\n")
    return f"{_as_table(summaries)}\nwrote {len(summaries)} pictures and {SUMMARY} to {known.output}"


def _as_table(summaries: list[dict[str, Any]]) -> str:
    """The numbers of all layers, one a line."""
    width = max(len(f"{row['embedding']}: {row['layer']}") for row in summaries)
    titles = ("words", "width", "constant", "mean |r|", "between groups")
    lines = [" " * width + "".join(f"{title:>16}" for title in titles)]
    for row in summaries:
        numbers = [f"{row[name]:>16,}" for name in ("words", "width", "constant")]
        numbers += [_as_number(row[name]) for name in ("mean_correlation", "between_groups")]
        lines.append(f"{row['embedding']}: {row['layer']}".ljust(width) + "".join(numbers))
    return "\n".join(lines)


def _as_number(value: float | None) -> str:
    """A correlation, or that there is none."""
    return f"{'–' if value is None else f'{value:.4f}':>16}"
