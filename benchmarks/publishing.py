"""What all benchmarks do with their numbers: print a table, write a JSON file, show them in a README."""

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
    """The parser of a benchmark, with the options that say where its numbers go."""
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
    """The numbers that an earlier run has written.

    Raises:
        OSError: there is no such file.
        UserError: it is no JSON object.
    """
    try:
        record = read_json(path)
    except ValueError as error:
        raise UserError(f"{path}: not a file that a benchmark has written ({error})") from error
    if not isinstance(record, dict):
        raise UserError(f"{path}: not a file that a benchmark has written; it must hold a JSON object")
    return record


def joined(paths: Sequence[Path]) -> Record:
    """The record of the first of several files, with what all of them have measured.

    Raises:
        OSError, UserError: as `read_record`; or a file has nothing measured.
    """
    found = [read_record(path) for path in paths]
    for path, record in zip(paths, found):
        if not isinstance(record.get("measured"), list):
            raise UserError(f"{path}: it has no list 'measured'; give files that this benchmark has written")
    return {**found[0], "measured": [part for one in found for part in one["measured"]]}


def publish(record: Record, text: str, marker: str, arguments: argparse.Namespace) -> None:
    """Print `text`; write the record, and the text between the markers of a README, where asked to.

    Raises:
        UserError: the README lacks the markers.
    """
    print(text)
    if arguments.output:
        write_record(arguments.output, {**provenance(), **record})
    if arguments.readme:
        update_readme(arguments.readme, marker, text)
