"""The commands `methods`, `params` and `suggest`: methods with their options and sizes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import textwrap
import typing
from collections.abc import Iterator

import torch
from torch import Tensor

from shared_embeddings.accounting import stored_buffers
from shared_embeddings.cli.arguments import OPTIONS_FOLLOW, add, read_options
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.registry import build, methods, num_parameters
from shared_embeddings.registry import options as find_spec
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_text
from shared_embeddings.utils.options import OptionError, describe_type
from shared_embeddings.utils.path_options import PathOption

_WIDTH, _INDENT = 100, " " * 6
REQUIRED = "required"
# The bits of a value by storage dtype. int4 has a 16-bit scale for every 32 values. The scales of int8, one
# for each row, are ignored.
_BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4.5}
# Arguments of `build` that are not options of a method.
_NO_OPTIONS = ("num_embeddings", "embedding_dim", "words")


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the commands."""
    command = add(commands, "methods", "list the methods, their papers and their options", _methods)
    command.add_argument("--format", choices=("text", "markdown"), default="text")

    command = add(
        commands, "params", "count the parameters and bytes of an embedding", _params, takes_options=True
    )
    command.epilog = OPTIONS_FOLLOW
    command.add_argument("--method", required=True, help="a method, see 'shared-embeddings methods'")
    _add_sizes(command)
    command.add_argument("--json", action="store_true", help="print one JSON object")

    command = add(commands, "suggest", "suggest options within a budget", _suggest)
    _add_sizes(command, nargs="+")
    command.add_argument("--budget", help="number of parameters, such as 2M or 500k (optional with --html)")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.add_argument(
        "--html",
        type=PathOption.NEW_FILE,
        metavar="FILE",
        help="write a page that shows what fits into any budget, in parameters or stored bytes, for all "
        "combinations of the given V and D",
    )
    command.add_argument("--force", action="store_true", help="overwrite an existing --html")


def describe_methods() -> str:
    """Every registered method with its paper and its options: their types, defaults and descriptions."""
    lines = []
    for method in methods():
        found = find_spec(method)
        lines.append(f"{method}: {found.summary} ({found.paper})")
        if found.fullgraph_limit is not None:
            lines.append(f"  no torch.compile(fullgraph=True) in training: {found.fullgraph_limit}")
        for name, accepted, default, description in options_of(method):
            note = (
                "" if default is None else f" ({default if default == REQUIRED else f'default: {default}'})"
            )
            lines.append(f"  {name}: {accepted}{note}")
            lines += textwrap.wrap(description, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return "\n".join(lines)


def options_of(method: str) -> Iterator[tuple[str, str, str | None, str]]:
    """The options of a method: name, accepted values, default as in YAML (or `REQUIRED`), description."""
    options_class = find_spec(method)
    hints = typing.get_type_hints(options_class)
    for field in dataclasses.fields(options_class):
        description = field.metadata["description"]
        text = description() if callable(description) else description
        yield field.name, describe_type(hints[field.name]), _default(field), text


def methods_table() -> str:
    """The registered methods as a Markdown table."""
    lines = ["| method | paper | the table becomes |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {find_spec(name).paper} | {find_spec(name).summary} |" for name in methods()]
    return "\n".join(lines)


def describe_parameters(
    method: str, num_embeddings: int, embedding_dim: int, given: dict[str, typing.Any], as_json: bool = False
) -> str:
    """The size of an embedding of V words in D dimensions, compared with a plain table; allocates no weights.

    Raises:
        OptionError: the method, an option or a size is invalid.
    """
    for name in _NO_OPTIONS:
        if name in given:
            raise OptionError(
                f"'{name}' is not an option of a method; remove it (--vocab-size and --dim set the size)"
            )
    with torch.device("meta"):
        embedding = build(method, num_embeddings=num_embeddings, embedding_dim=embedding_dim, **given)
    dense = num_parameters("standard", num_embeddings=num_embeddings, embedding_dim=embedding_dim)
    counts = embedding.counts()
    rows = {**counts, "dense": dense, "compression": round(dense / max(counts["total"], 1), 2)}
    if as_json:
        parts = [dataclasses.asdict(part) for part in storage_breakdown(embedding)]
        return json.dumps(
            {
                "method": method,
                "num_embeddings": num_embeddings,
                "embedding_dim": embedding_dim,
                "options": given,
                **rows,
                "parts": parts,
            }
        )
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


@dataclasses.dataclass(frozen=True)
class Part:
    """A stored tensor of the embedding, or the sum of all."""

    name: str  # the tensor's name; "total", or "plain table" for the table that the embedding replaces
    kind: str  # "parameter", "buffer" or "sum"
    shape: tuple[int, ...]  # its shape; empty for sums and for single numbers
    count: int  # its number of elements; for sums, the number of parameters
    bytes: dict[str, int]  # its size by storage dtype
    # Parameters of the plain table over those of the embedding; only for sums.
    compression: float | None = None


def storage_breakdown(embedding: SharedEmbedding) -> list[Part]:
    """Every parameter and persistent buffer of `embedding` once, then their total, then the plain table.

    Floating-point tensors take the bits of the storage dtype; the bits of others, such as word codes, do not
    depend on it (`SharedEmbedding.buffer_bits`). Works on the meta device.
    """

    def part(name: str, kind: str, tensor: Tensor, bits: int) -> Part:
        is_float = tensor.is_floating_point()
        size = _bytes_of_values(tensor.numel()) if is_float else dict.fromkeys(_BITS, math.ceil(bits / 8))
        return Part(name, kind, tuple(tensor.shape), tensor.numel(), size)

    parts = [part(name, "parameter", tensor, 0) for name, tensor in embedding.named_parameters()]
    parts += [part(name, "buffer", tensor, bits) for name, tensor, bits in stored_buffers(embedding)]
    dense = embedding.num_embeddings * embedding.embedding_dim
    trained = sum(part.count for part in parts if part.kind == "parameter")
    total = {name: sum(part.bytes[name] for part in parts) for name in _BITS}
    return [
        *parts,
        Part("total", "sum", (), trained, total, dense / max(trained, 1)),
        Part("plain table", "sum", (), dense, _bytes_of_values(dense), 1.0),
    ]


def describe_storage(embedding: SharedEmbedding) -> str:
    """The breakdown as columns, texts aligned to the left and numbers to the right."""
    rows = [["part", "shape", "numbers", *(f"bytes {name}" for name in _BITS), "compression"]]
    for part in storage_breakdown(embedding):
        shape = " x ".join(str(size) for size in part.shape)
        sizes = [f"{part.bytes[name]:,}" for name in _BITS]
        factor = "" if part.compression is None else f"{part.compression:.2f}x"
        rows.append([part.name, shape, f"{part.count:,}", *sizes, factor])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:2], widths)]
        cells += [cell.rjust(width) for cell, width in zip(row[2:], widths[2:])]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _bytes_of_values(count: int) -> dict[str, int]:
    """The bytes of `count` floating-point values by storage dtype."""
    return {name: math.ceil(count * bits / 8) for name, bits in _BITS.items()}


def _add_sizes(command: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """The arguments for V and D."""
    for name, text in (
        ("--vocab-size", "V, the number of words"),
        ("--dim", "D, the dimension of the model"),
    ):
        command.add_argument(name, required=True, type=int, nargs=nargs, help=text)


def _methods(known: argparse.Namespace, _: list[str]) -> str:
    return methods_table() if known.format == "markdown" else describe_methods()


def _params(known: argparse.Namespace, rest: list[str]) -> str:
    given = read_options(rest)
    return describe_parameters(known.method, known.vocab_size, known.dim, given, as_json=known.json)


def _suggest(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.compress.sizing import describe_suggestions, suggestion_page

    if known.html is not None:
        if known.json:
            raise UserError("--json and --html exclude each other; remove one of them")
        write_text(known.html, suggestion_page(known.vocab_size, known.dim, known.budget))
        return str(known.html)
    if known.budget is None:
        raise UserError("--budget is missing; give a number of parameters such as 2M, or --html FILE")
    for name, values in (("--vocab-size", known.vocab_size), ("--dim", known.dim)):
        if len(values) > 1:
            raise UserError(f"{name} has {len(values)} values; give one, or --html FILE for a page of all")
    return describe_suggestions(known.vocab_size[0], known.dim[0], known.budget, as_json=known.json)


def _default(field: dataclasses.Field[object]) -> str | None:
    """The default of an option, `REQUIRED`, or None for a default that depends on other options."""
    if field.default is not dataclasses.MISSING:
        return "none" if field.default is None else _as_yaml(field.default)
    return REQUIRED if field.default_factory is dataclasses.MISSING else None


def _as_yaml(value: object) -> str:
    """A default value as YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)
