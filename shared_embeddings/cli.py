"""The command `shared-embeddings`: what methods there are, and what an embedding would hold."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import typing
from collections.abc import Sequence
from typing import NoReturn

import torch

from shared_embeddings.options import OptionError, describe_type
from shared_embeddings.registry import build, expected_count, methods, options

USER_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when it worked, 2 with one line on stderr for a mistake in the arguments."""
    parser = _parser()
    known, rest = parser.parse_known_args(arguments)
    try:
        if known.command == "methods":
            _refuse(rest)
            print(describe_methods())
        else:
            given = _read_options(rest)
            print(describe_parameters(known.method, known.vocab_size, known.dim, given, as_json=known.json))
    except (OptionError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:
        sys.stderr.close()
    return 0


def describe_methods() -> str:
    """Every registered method with its options, their types and defaults, one option a line."""
    lines = []
    for method in methods():
        lines.append(method)
        option_class = options(method)
        hints = typing.get_type_hints(option_class)
        for field in dataclasses.fields(option_class):
            lines.append(f"  {field.name}: {describe_type(hints[field.name])}{_default(field)}")
    return "\n".join(lines)


def describe_parameters(
    method: str, num_embeddings: int, embedding_dim: int, given: dict[str, object], as_json: bool = False
) -> str:
    """What an embedding of V words in D dimensions would hold, beside a plain table; allocates no weights.

    Raises:
        OptionError: the method, an option or a size cannot be.
    """
    sizes = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
    with torch.device("meta"):
        counts = build(method, **sizes, **given).counts()  # type: ignore[arg-type]
    dense = expected_count("standard", **sizes)
    rows = {**counts, "dense": dense, "compression": round(dense / max(counts["total"], 1), 2)}
    if as_json:
        return json.dumps({"method": method, **sizes, "options": given, **rows})
    titles = {
        "input": "input only",
        "output": "output only",
        "shared": "input and output",
        "total": "total parameters",
        "stored_bits": "stored bits",
        "dense": "plain table",
        "compression": "compression",
    }
    return "\n".join(f"{titles[name]:<18}{value:>16,}" for name, value in rows.items())


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and leave with the exit code for mistakes of the user."""
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(USER_ERROR)


def _parser() -> argparse.ArgumentParser:
    """The arguments of the two commands; options of methods are read from what is left."""
    parser = _Parser(prog="shared-embeddings", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("methods", help="list the methods and their options", allow_abbrev=False)
    parameters = commands.add_parser(
        "params",
        help="count the parameters of an embedding",
        allow_abbrev=False,
        epilog="Any option of the method follows as --option value, e.g. --rank 64.",
    )
    parameters.add_argument("--method", required=True, help="a method, see 'shared-embeddings methods'")
    parameters.add_argument("--vocab-size", required=True, type=int, help="V, the number of words")
    parameters.add_argument("--dim", required=True, type=int, help="D, the dimension of the model")
    parameters.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _default(field: dataclasses.Field[object]) -> str:
    """The default of an option, for the list of options."""
    if field.default is not dataclasses.MISSING:
        return " (default: none)" if field.default is None else f" (default: {_as_yaml(field.default)})"
    return "" if field.default_factory is not dataclasses.MISSING else " (required)"


def _as_yaml(value: object) -> str:
    """A default value as it is written in a configuration."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _refuse(rest: list[str]) -> None:
    """Raise ValueError for arguments that the command does not take."""
    if rest:
        raise ValueError(f"'{rest[0]}' is not an argument of this command; leave it out")


def _read_options(rest: list[str]) -> dict[str, object]:
    """Method options from ``--name value`` and ``--name=value``; dashes in a name stand for underscores."""
    given: dict[str, object] = {}
    words = iter(rest)
    for word in words:
        if not word.startswith("--"):
            raise ValueError(f"'{word}' belongs to no option; write --option value")
        name, separator, text = word[2:].partition("=")
        value = text if separator else next(words, None)
        if value is None:
            raise ValueError(f"option '--{name}' has no value; write --{name} value")
        given[name.replace("-", "_")] = _read_value(value)
    return given


def _read_value(text: str) -> object:
    """A value from the command line: JSON where it is, a list of numbers such as 100,200, or plain text."""
    for candidate in (text, f"[{text}]" if "," in text else text):
        try:
            return json.loads(candidate)
        except json.JSONDecodeError:
            continue
    return text


if __name__ == "__main__":
    sys.exit(main())
