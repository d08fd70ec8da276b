"""Compress, trim, export and analyze the embeddings of trained models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata

from shared_embeddings.cli import catalog, models, words
from shared_embeddings.utils.command_line import Parser, run
from shared_embeddings.utils.download import hub_model
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.paths import is_hub_id


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status; see `shared_embeddings.utils.command_line.run`."""

    def print_result(arguments: Sequence[str]) -> None:
        parser = Parser(
            prog="shared-embeddings", description=__doc__, epilog="example: shared-embeddings compress --help"
        )
        version = f"%(prog)s {metadata.version('shared-embeddings')}"
        parser.add_argument("--version", action="version", version=version, help="print the version and exit")
        commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
        for module in (catalog, models, words):
            module.add_commands(commands)
        if not arguments:
            parser.print_help()
            return
        known, rest = parser.parse_known_args(arguments)
        if rest and not known.takes_options:
            raise UserError(f"'{rest[0]}' is not an argument of this command; remove it")
        if getattr(known, "model", None) is not None and is_hub_id(known.model):
            known.model = hub_model(str(known.model))
        print(known.run(known, rest), flush=True)

    return run("shared-embeddings", print_result, arguments)


if __name__ == "__main__":
    sys.exit(main())
