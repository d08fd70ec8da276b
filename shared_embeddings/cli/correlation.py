"""The command `correlation`: how the dimensions of a model's embeddings depend on each other."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared_embeddings.cli.arguments import add
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.path_options import PathOption, check_paths

SUMMARY = "correlation.json"


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = add(
        commands, "correlation", "draw the correlation between dimensions, layer by layer", _correlation
    )
    command.add_argument("--model", required=True, type=PathOption.SOURCE, help="a trained model of any host")
    command.add_argument(
        "--output", required=True, type=PathOption.FOLDER, help=f"folder for the PNG files and {SUMMARY}"
    )
    command.add_argument("--force", action="store_true", help="replace files that are there already")


def _correlation(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.analysis.correlation import draw_map, layer_correlations
    from shared_embeddings.checkpoints.adapter import find_host
    from shared_embeddings.utils.files import staged, write_text

    _check_free([known.output / SUMMARY], known.force)
    embeddings = find_host(known.model)[1].read(known.model).embeddings()
    layers = [layer for embedding in embeddings for layer in layer_correlations(embedding)]
    drawn = [found for layer in layers for found in (layer, *layer.by_group())]
    outputs = [known.output / name for name in (SUMMARY, *(found.file_name() for found in drawn))]
    _check_free(outputs, known.force)
    summaries = [{**found.summary(), "picture": found.file_name()} for found in drawn]
    record = {"model": str(known.model), "layers": summaries}
    with staged(outputs) as places:
        write_text(places[0], json.dumps(record, indent=1) + "\n")
        for found, place in zip(drawn, places[1:]):
            draw_map(found, place)
    return f"{_as_table(summaries)}\nwrote {len(summaries)} pictures and {SUMMARY} to {known.output}"


def _check_free(outputs: Sequence[Path], force: bool) -> None:
    """Check that files can be written, and are not there already unless `force`."""
    check_paths({f"--output ({path.name})": (PathOption.NEW_FILE, path) for path in outputs}, force)


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
