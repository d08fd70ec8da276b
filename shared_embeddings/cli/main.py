"""Compress, trim, export and analyze the embeddings of trained models."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from shared_embeddings.cli import catalog, models, words
from shared_embeddings.utils.command_line import Parser, run
from shared_embeddings.utils.errors import UserError, first_line, require
from shared_embeddings.utils.paths import is_hub_id

# What a model's folder on the Hub may have besides safetensors, tokenizer and settings. Folders that belong
# to the model are numbered, as 1_Pooling of sentence encoders is, or called additional_chat_templates.
_FORMATS = "bin ckpt gguf h5 msgpack onnx ot pt pth tflite".split()
_NOT_READ = [f"[!0-9]*.{ending}" for ending in _FORMATS] + ["[!0-9a]*/*", "a[!d]*/*"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status; see `shared_embeddings.utils.command_line.run`."""
    return run("shared-embeddings", _print_result, arguments)


def _print_result(arguments: Sequence[str]) -> None:
    example = "example: shared-embeddings compress --help"
    parser = Parser("shared-embeddings", description=__doc__, epilog=example)
    version = f"%(prog)s {metadata.version('shared-embeddings')}"
    parser.add_argument("--version", action="version", version=version, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str,
        title: str,
        run: Callable[[argparse.Namespace, list[str]], str],
        example: str,
        takes_options: bool = False,
    ) -> argparse.ArgumentParser:
        """Add a command: its function, and the arguments of an example.

        With `takes_options`, remaining arguments are options of a method.
        """
        epilog = f"example: shared-embeddings {name} {example}"
        if takes_options:
            epilog = f"Any option of the method follows as --option value, e.g. --rank 64; {epilog}"
        command = commands.add_parser(name, help=title, description=title, epilog=epilog)
        command.set_defaults(run=run, takes_options=takes_options)
        return command

    for module in (catalog, models, words):
        module.add_commands(add)
    if not arguments:
        parser.print_help()
        return
    known, rest = parser.parse_known_args(arguments)
    if rest and not known.takes_options:
        raise UserError(f"'{rest[0]}' is not an argument of this command; remove it")
    if getattr(known, "model", None) is not None and is_hub_id(known.model):
        known.model = hub_model(str(known.model))
    print(known.run(known, rest), flush=True)


def hub_model(name: str) -> Path:
    """Return the folder of a model in the Hugging Face Hub's cache, downloaded if it is not there."""
    try:
        return Path(require("huggingface_hub").snapshot_download(name, ignore_patterns=_NOT_READ))
    except (OSError, ValueError) as error:
        raise UserError(
            f"model {name}: no such file, and it cannot be downloaded from the Hugging Face Hub "
            f"({first_line(error)}); check the name and the connection, log in with `hf auth login`, or name "
            "a folder"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
