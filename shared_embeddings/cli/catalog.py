"""The commands ``methods``, ``params`` and ``suggest``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
import typing
from collections.abc import Callable, Iterator

import shared_embeddings as se
from shared_embeddings.quant import STORES
from shared_embeddings.utils.command_line import align
from shared_embeddings.utils.options import OptionError, describe_type, parse_words

REQUIRED = "required"


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands; for `add`, see `shared_embeddings.cli.main`."""
    command = add("methods", "list the methods, their papers and their options", _methods, "")
    command.add_argument("method", nargs="?", metavar="METHOD", help="only this method")

    title, example = "count the parameters and bytes of an embedding", "--vocab-size 50000 --dim 512"
    params = add("params", title, _params, f"--method define {example} --map-dim 128", takes_options=True)
    params.add_argument("--method", required=True, help="a method, see 'shared-embeddings methods'")

    title, example = "suggest options within a budget", "--vocab-size 37000 --dim 512 --budget 2M"
    suggest = add("suggest", title, _suggest, example)
    suggest.add_argument("--budget", required=True, help="number of parameters, such as 2M or 500k")

    for command in (params, suggest):
        command.add_argument("--vocab-size", required=True, type=_size, help="V, the number of tokens")
        command.add_argument("--dim", required=True, type=_size, help="D, the dimension of the model")
        command.add_argument("--json", action="store_true", help="print one JSON object")


def _size(text: str) -> int:
    """Return a number of tokens or dimensions; an argparse type."""
    number = int(text)
    if not 1 <= number < 2**31:
        raise argparse.ArgumentTypeError(f"{number} is not from 1 to {2**31 - 1:,}; change it")
    return number


def _methods(known: argparse.Namespace, _: list[str]) -> str:
    lines = []
    for method in se.methods() if known.method is None else [known.method]:
        config = se.get_method_config(method)
        lines.append(f"{method}: {config.summary} ({config.paper})")
        if config.fullgraph_limit is not None:
            lines.append(f"  no torch.compile(fullgraph=True) in training: {config.fullgraph_limit}")
        for name, accepted, default, description in options_of(method):
            note = f" ({'' if default == REQUIRED else 'default: '}{default})"
            lines.append(f"  {name}: {accepted}{'' if default is None else note}")
            lines += textwrap.wrap(description, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def options_of(method: str) -> Iterator[tuple[str, str, str | None, str]]:
    """Yield the options of a method: name, accepted values, default as in YAML, and description.

    The default is `REQUIRED` for required options, and None if it depends on other options.
    """
    config = se.get_method_config(method)
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        default = REQUIRED if field.default_factory is dataclasses.MISSING else None
        if field.default is not dataclasses.MISSING:
            default = field.default if isinstance(field.default, str) else json.dumps(field.default)
        described = field.metadata["description"]
        description = described() if callable(described) else described
        yield field.name, describe_type(hints[field.name]), default, description


def methods_table() -> str:
    """Return the registered methods as a Markdown table."""
    lines = ["| method | paper | the table becomes |", "| --- | --- | --- |"]
    configs = {name: se.get_method_config(name) for name in se.methods()}
    return "\n".join(lines + [f"| `{name}` | {c.paper} | {c.summary} |" for name, c in configs.items()])


def _params(known: argparse.Namespace, rest: list[str]) -> str:
    """Print the size of an embedding of V tokens in D dimensions, beside a plain table, without weights."""
    options: dict[str, typing.Any] = parse_words(rest)
    for name in ("num_embeddings", "embedding_dim", "words"):
        if name in options:
            raise OptionError(
                f"'{name}' is not an option of a method; remove it (--vocab-size and --dim set the size)"
            )
    sizes = {"num_embeddings": known.vocab_size, "embedding_dim": known.dim}
    import torch

    with torch.device("meta"):
        embedding = se.build(known.method, **sizes, **options)
    counts, dense = embedding.counts(), se.num_parameters("standard", **sizes)
    # A plain table in 32 bits over what is stored.
    rows = {**counts, "dense": dense, "compression": round(32 * dense / counts["stored_bits"], 2)}
    parts = storage_breakdown(embedding)
    if known.json:
        content = {"method": known.method, **sizes, "options": options, **rows}
        return json.dumps({**content, "parts": [dataclasses.asdict(part) for part in parts]})
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
    cells = [["part", "shape", "numbers", *(f"bytes {name}" for name in STORES), "compression"]]
    for part in parts:
        shape = " x ".join(map(str, part.shape))
        factor = "" if part.compression is None else f"{part.compression:.2f}x"
        numbers = [f"{number:,}" for number in (part.count, *part.bytes.values())]
        cells.append([part.name, shape, *numbers, factor])
    return "\n".join([*lines, "", *align(cells, texts=2)])


@dataclasses.dataclass(frozen=True)
class Part:
    """A stored tensor of the embedding, or the sum of all."""

    name: str  # the tensor's name; "total", or "plain table" for the table that the embedding replaces
    kind: str  # "parameter", "buffer" or "sum"
    shape: tuple[int, ...]  # its shape; empty for sums and for single numbers
    count: int  # its number of elements; for sums, the number of parameters
    bytes: dict[str, int]  # its size by storage dtype
    # Bytes of the plain table over those of the embedding, in 32 bits; only for sums.
    compression: float | None = None


def storage_breakdown(embedding: se.SharedEmbedding) -> list[Part]:
    """Return every parameter and persistent buffer of `embedding`, then their total, then the plain table.

    The bytes of floating-point tensors depend on the storage dtype; those of others, such as codes, do not
    (`SharedEmbedding.buffer_bits`). Works on the meta device.
    """
    import torch

    from shared_embeddings.quant.storage import packed_bytes

    def part(name: str, kind: str, tensor: torch.Tensor, bits: int) -> Part:
        sizes = dict.fromkeys(STORES, -(-bits // 8))
        if tensor.is_floating_point():
            sizes = {store: packed_bytes(tensor, store, name) for store in STORES}
        return Part(name, kind, tuple(tensor.shape), tensor.numel(), sizes)

    parts = [part(name, "parameter", tensor, 0) for name, tensor in embedding.named_parameters()]
    parts += [
        part(name, "buffer", tensor, bits) for name, tensor, bits in se.accounting.stored_buffers(embedding)
    ]
    trained = sum(part.count for part in parts if part.kind == "parameter")
    total = {store: sum(part.bytes[store] for part in parts) for store in STORES}
    table = torch.empty(embedding.num_embeddings, embedding.embedding_dim, device="meta")
    plain = part("plain table", "sum", table, 0)
    return [
        *parts,
        Part("total", "sum", (), trained, total, plain.bytes["fp32"] / total["fp32"]),
        dataclasses.replace(plain, shape=(), compression=1.0),
    ]


def _suggest(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.compress.sizing import describe_suggestions

    return describe_suggestions(known.vocab_size, known.dim, known.budget, as_json=known.json)
