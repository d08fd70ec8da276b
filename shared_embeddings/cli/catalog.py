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
from shared_embeddings.cli.arguments import add, add_flags, read_options
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.registry import build, methods, num_parameters
from shared_embeddings.registry import options as find_spec
from shared_embeddings.utils.command_line import Parser, align
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_text
from shared_embeddings.utils.options import OptionError, describe_type
from shared_embeddings.utils.path_options import PathOption

REQUIRED = "required"
# The bits of a value by storage dtype. int4 has a 16-bit scale for every 32 values. The scales of int8, one
# for each row, are ignored.
_BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4.5}


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the commands."""
    command = add(commands, "methods", "list the methods, their papers and their options", _methods)
    command.add_argument("--format", choices=("text", "markdown"), default="text")

    command = add(commands, "params", "count the parameters and bytes of an embedding", _params, True)
    command.add_argument("--method", required=True, help="a method, see 'shared-embeddings methods'")
    command.add_argument("--vocab-size", required=True, type=int, help="V, the number of words")
    command.add_argument("--dim", required=True, type=int, help="D, the dimension of the model")
    add_flags(command, "json")

    command = add(commands, "suggest", "suggest options within a budget", _suggest)
    command.add_argument("--vocab-size", required=True, type=int, nargs="+", help="V, the number of words")
    command.add_argument("--dim", required=True, type=int, nargs="+", help="D, the dimension of the model")
    command.add_argument("--budget", help="number of parameters, such as 2M or 500k (optional with --html)")
    command.add_argument(
        "--html",
        type=PathOption.NEW_FILE,
        metavar="FILE",
        help="write a page that shows what fits into any budget, in parameters or stored bytes, for all "
        "combinations of the given V and D",
    )
    add_flags(command, "json", "force")


def _methods(known: argparse.Namespace, _: list[str]) -> str:
    """Every registered method with its paper and its options: their types, defaults and descriptions."""
    if known.format == "markdown":
        return methods_table()
    lines = []
    for method in methods():
        found = find_spec(method)
        lines.append(f"{method}: {found.summary} ({found.paper})")
        if found.fullgraph_limit is not None:
            lines.append(f"  no torch.compile(fullgraph=True) in training: {found.fullgraph_limit}")
        for name, accepted, default, description in options_of(method):
            note = f" ({'' if default == REQUIRED else 'default: '}{default})"
            lines.append(f"  {name}: {accepted}{'' if default is None else note}")
            lines += textwrap.wrap(description, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def options_of(method: str) -> Iterator[tuple[str, str, str | None, str]]:
    """The options of a method: name, accepted values, default as in YAML, and description.

    The default is `REQUIRED` for required options, and None if it depends on other options.
    """
    options_class = find_spec(method)
    hints = typing.get_type_hints(options_class)
    for field in dataclasses.fields(options_class):
        default = REQUIRED if field.default_factory is dataclasses.MISSING else None
        if field.default is not dataclasses.MISSING:
            text = str(field.default)
            default = text.lower() if text in ("None", "True", "False") else text
        described = field.metadata["description"]
        description = described() if callable(described) else described
        yield field.name, describe_type(hints[field.name]), default, description


def methods_table() -> str:
    """The registered methods as a Markdown table."""
    lines = ["| method | paper | the table becomes |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {find_spec(name).paper} | {find_spec(name).summary} |" for name in methods()]
    return "\n".join(lines)


def _params(known: argparse.Namespace, rest: list[str]) -> str:
    """The size of an embedding of V words in D dimensions, beside a plain table; allocates no weights."""
    given: dict[str, typing.Any] = read_options(rest)
    for name in ("num_embeddings", "embedding_dim", "words"):
        if name in given:
            raise OptionError(
                f"'{name}' is not an option of a method; remove it (--vocab-size and --dim set the size)"
            )
    sizes = {"num_embeddings": known.vocab_size, "embedding_dim": known.dim}
    with torch.device("meta"):
        embedding = build(known.method, **sizes, **given)
    counts, dense = embedding.counts(), num_parameters("standard", **sizes)
    rows = {**counts, "dense": dense, "compression": round(dense / max(counts["total"], 1), 2)}
    if known.json:
        parts = [dataclasses.asdict(part) for part in storage_breakdown(embedding)]
        return json.dumps({"method": known.method, **sizes, "options": given, **rows, "parts": parts})
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

    def sizes_of(values: int) -> dict[str, int]:
        return {name: math.ceil(values * bits / 8) for name, bits in _BITS.items()}

    def part(name: str, kind: str, tensor: Tensor, bits: int) -> Part:
        fixed = dict.fromkeys(_BITS, math.ceil(bits / 8))
        sizes = sizes_of(tensor.numel()) if tensor.is_floating_point() else fixed
        return Part(name, kind, tuple(tensor.shape), tensor.numel(), sizes)

    parts = [part(name, "parameter", tensor, 0) for name, tensor in embedding.named_parameters()]
    parts += [part(name, "buffer", tensor, bits) for name, tensor, bits in stored_buffers(embedding)]
    dense = embedding.num_embeddings * embedding.embedding_dim
    trained = sum(part.count for part in parts if part.kind == "parameter")
    total = {name: sum(part.bytes[name] for part in parts) for name in _BITS}
    return [
        *parts,
        Part("total", "sum", (), trained, total, dense / max(trained, 1)),
        Part("plain table", "sum", (), dense, sizes_of(dense), 1.0),
    ]


def describe_storage(embedding: SharedEmbedding) -> str:
    """The breakdown as columns."""
    rows = [["part", "shape", "numbers", *(f"bytes {name}" for name in _BITS), "compression"]]
    for part in storage_breakdown(embedding):
        shape = " x ".join(map(str, part.shape))
        factor = "" if part.compression is None else f"{part.compression:.2f}x"
        rows.append([part.name, shape, *(f"{one:,}" for one in (part.count, *part.bytes.values())), factor])
    return "\n".join(align(rows, texts=2))


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
