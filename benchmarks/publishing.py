"""Publishes the numbers of a benchmark: prints a table, writes a JSON file, updates a README."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.common.errors import UserError
from recipes.common.table import update_readme
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.path_options import PathOption
from shared_embeddings.utils.reading import read_json
from shared_embeddings.utils.results import provenance, write_record

Record = dict[str, Any]


def parser_of(module: str, description: str | None) -> Parser:
    """The parser of a benchmark, with the options for where its numbers go."""
    parser = Parser(
        f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=PathOption.OUTPUT, help="write the numbers to this JSON file")
    parser.add_argument(
        "--readme", type=PathOption.UPDATED, help="put the table between the markers of this file"
    )
    return parser


def read_record(path: Path) -> Record:
    """Read the numbers that an earlier run has written.

    Raises:
        OSError: the file cannot be read.
        UserError: the file holds no JSON object.
    """
    try:
        record = read_json(path)
    except ValueError as error:
        raise UserError(f"{path}: not written by a benchmark ({error})") from error
    if not isinstance(record, dict):
        raise UserError(f"{path}: not written by a benchmark: expected a JSON object")
    return record


def joined(paths: Sequence[Path]) -> Record:
    """The record of the first of several files, with the measurements of all of them.

    Raises:
        OSError, UserError: as `read_record`, or a file has no measurements.
    """
    found = [read_record(path) for path in paths]
    for path, record in zip(paths, found):
        if not isinstance(record.get("measured"), list):
            raise UserError(f"{path}: no list 'measured' in it; pass files that this benchmark has written")
    return {**found[0], "measured": [part for one in found for part in one["measured"]]}


def publish(record: Record, text: str, marker: str, arguments: argparse.Namespace) -> None:
    """Print `text`, and as requested write the record and put the text between the markers of a README.

    Raises:
        UserError: the README lacks the markers.
    """
    print(text)
    if arguments.output:
        write_record(arguments.output, {**provenance(), **record})
    if arguments.readme:
        update_readme(arguments.readme, marker, text)
