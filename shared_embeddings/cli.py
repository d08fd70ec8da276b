"""The command `shared-embeddings`: methods, what embeddings hold, classes of words, smaller models."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from shared_embeddings.options import describe_type
from shared_embeddings.registry import build, expected_count, method_class, methods, options

USER_ERROR = 2
Command = Callable[[argparse.Namespace, list[str]], str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when it worked, 2 with one line on stderr for a mistake of the user."""
    parser = _parser()
    known, rest = parser.parse_known_args(arguments)
    try:
        if not known.takes_options:
            _refuse(rest)
        print(known.run(known, rest))
    except (ValueError, ImportError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            sys.stderr.close()
            return 0
        print(f"{parser.prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted; nothing was left half-written", file=sys.stderr)
        return 130
    return 0


def describe_methods() -> str:
    """Every registered method with its paper and its options, their types and defaults, one option a line."""
    lines = []
    for method in methods():
        lines.append(f"{method}: {method_class(method).idea} ({method_class(method).paper})")
        option_class = options(method)
        hints = typing.get_type_hints(option_class)
        for field in dataclasses.fields(option_class):
            lines.append(f"  {field.name}: {describe_type(hints[field.name])}{_default(field)}")
    return "\n".join(lines)


def methods_table() -> str:
    """The registered methods as a Markdown table."""
    lines = ["| method | paper | the table becomes |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {method_class(name).paper} | {method_class(name).idea} |" for name in methods()]
    return "\n".join(lines)


def describe_parameters(
    method: str, num_embeddings: int, embedding_dim: int, given: dict[str, object], as_json: bool = False
) -> str:
    """What an embedding of V words in D dimensions would hold, beside a plain table; allocates no weights.

    Raises:
        OptionError: the method, an option or a size cannot be.
    """
    from shared_embeddings.breakdown import describe_storage, storage_breakdown

    sizes = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
    with torch.device("meta"):
        embedding = build(method, **sizes, **given)  # type: ignore[arg-type]
    dense = expected_count("standard", **sizes)
    counts = embedding.counts()
    rows = {**counts, "dense": dense, "compression": round(dense / max(counts["total"], 1), 2)}
    if as_json:
        parts = [dataclasses.asdict(part) for part in storage_breakdown(embedding)]
        return json.dumps({"method": method, **sizes, "options": given, **rows, "parts": parts})
    titles = {
        "input": "input only",
        "output": "output only",
        "shared": "input and output",
        "total": "total parameters",
        "stored_bits": "stored bits",
        "dense": "plain table",
        "compression": "compression",
    }
    lines = [f"{titles[name]:<18}{value:>16,}" for name, value in rows.items()]
    return "\n".join([*lines, "", describe_storage(embedding)])


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and leave with the exit code for mistakes of the user."""
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(USER_ERROR)


def _parser() -> argparse.ArgumentParser:
    """The arguments of all commands; options of methods are read from what is left."""
    parser = _Parser(prog="shared-embeddings", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = _add(commands, "methods", "list the methods, their papers and their options", _methods)
    command.add_argument("--format", choices=("text", "markdown"), default="text")

    command = _add(
        commands, "params", "count the parameters and bytes of an embedding", _params, takes_options=True
    )
    command.epilog = "Any option of the method follows as --option value, e.g. --rank 64."
    command.add_argument("--method", required=True, help="a method, see 'shared-embeddings methods'")
    _add_sizes(command)
    command.add_argument("--json", action="store_true", help="print one JSON object")

    command = _add(commands, "suggest", "propose options that meet a parameter budget", _suggest)
    _add_sizes(command)
    command.add_argument("--budget", required=True, help="number of parameters, such as 2M or 500k")
    command.add_argument("--json", action="store_true", help="print one JSON object")

    command = _add(commands, "ledger", "count what the papers' tables count, and compare", _ledger)
    command.add_argument("--format", choices=("markdown", "json"), default="markdown")

    command = _add(commands, "classes", "group the words of a vocabulary into semantic classes", _classes)
    command.add_argument("--text", required=True, nargs="+", type=Path, help="tokenised text files")
    command.add_argument("--vocab", required=True, type=Path, help="vocabulary, one word a line")
    command.add_argument("--num-classes", required=True, type=int, help="a bit less than a tenth of V")
    command.add_argument("--output", required=True, type=Path, help="the .npz file to write")
    command.add_argument("--dim", type=int, default=100, help="width of the word vectors (default: 100)")
    command.add_argument("--window", type=int, default=5, help="words of context each side (default: 5)")
    command.add_argument("--epochs", type=int, default=5, help="passes over the text (default: 5)")
    command.add_argument("--seed", type=int, default=0, help="(default: 0)")
    command.add_argument("--figure", type=Path, help="draw the sizes of the classes into this PNG file")

    command = _add(
        commands, "compress", "replace the embeddings of a trained model", _compress, takes_options=True
    )
    command.epilog = "Any option of the method follows as --option value, e.g. --rank 64."
    command.add_argument("--model", required=True, type=Path, help="a trained model of any host")
    command.add_argument("--method", required=True, help="a method, see 'shared-embeddings methods'")
    command.add_argument("--output", required=True, action="append", help="the model to write, as it was")
    command.add_argument("--embedding-output", help="the option 'output' of a method, such as table")
    command.add_argument("--token-counts", type=Path, help="a word, a tab and its count on every line")
    command.add_argument("--text", nargs="+", type=Path, help="tokenised text, to count words in instead")
    command.add_argument("--target-ratio", type=float, help="times fewer bytes for the embeddings")
    command.add_argument("--target-bytes", type=int, help="bytes for the embeddings")
    command.add_argument("--fit-steps", type=int, help="steps of methods fitted by gradient descent")
    command.add_argument("--seed", type=int, default=0, help="(default: 0)")
    command.add_argument("--report", type=Path, help="write the report into this JSON file, too")
    command.add_argument("--force", action="store_true", help="replace files that are there already")
    return parser


def _add(
    commands: argparse._SubParsersAction[_Parser],
    name: str,
    title: str,
    run: Command,
    takes_options: bool = False,
) -> argparse.ArgumentParser:
    """A command that `run` carries out; with `takes_options`, what is left over is a method's options."""
    command = commands.add_parser(name, help=title, description=title, allow_abbrev=False)
    command.set_defaults(run=run, takes_options=takes_options)
    return command


def _add_sizes(command: argparse.ArgumentParser) -> None:
    """The arguments for V and D."""
    command.add_argument("--vocab-size", required=True, type=int, help="V, the number of words")
    command.add_argument("--dim", required=True, type=int, help="D, the dimension of the model")


def _methods(known: argparse.Namespace, _: list[str]) -> str:
    return methods_table() if known.format == "markdown" else describe_methods()


def _params(known: argparse.Namespace, rest: list[str]) -> str:
    given = _read_options(rest)
    return describe_parameters(known.method, known.vocab_size, known.dim, given, as_json=known.json)


def _suggest(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.suggest import describe_suggestions

    return describe_suggestions(known.vocab_size, known.dim, known.budget, as_json=known.json)


def _ledger(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.ledger import describe_ledger

    return describe_ledger(known.format)


def _classes(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.classes import make_classes

    return make_classes(
        known.text,
        known.vocab,
        known.num_classes,
        known.output,
        dim=known.dim,
        window=known.window,
        epochs=known.epochs,
        seed=known.seed,
        figure=known.figure,
    )


def _compress(known: argparse.Namespace, rest: list[str]) -> str:
    from shared_embeddings.compression import Target, compress
    from shared_embeddings.token_counts import count_words, read_counts

    if known.token_counts is not None and known.text is not None:
        raise ValueError("--token-counts and --text both say how often words occur; leave one of them out")
    if len(known.output) > 1:
        raise ValueError("--output is given twice; a method's option 'output' is --embedding-output here")
    options = _read_options(rest)
    if known.embedding_output is not None:
        options["output"] = known.embedding_output
    counts = read_counts(known.token_counts) if known.token_counts is not None else None
    has_target = known.target_ratio is not None or known.target_bytes is not None
    return compress(
        known.model,
        known.method,
        Path(known.output[0]),
        options=options,
        target=Target(known.target_ratio, known.target_bytes) if has_target else None,
        counts=counts if known.text is None else count_words(known.text),
        seed=known.seed,
        steps=known.fit_steps,
        force=known.force,
        report_file=known.report,
    ).described()


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
