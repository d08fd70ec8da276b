"""Compress, trim, export and analyze the word embeddings of trained models."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shared_embeddings as se
from shared_embeddings.compress import SIDES, SUBWORDS
from shared_embeddings.quant import STORES
from shared_embeddings.utils.command_line import Parser, align, decimal_number, run
from shared_embeddings.utils.download import hub_model
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_text
from shared_embeddings.utils.options import OptionError, describe_type, parse_words, require_at_least
from shared_embeddings.utils.path_options import PathOption, check_new_files, is_hub_name

# Modules that import torch are imported by the commands, so that help comes at once.
if TYPE_CHECKING:
    from torch import Tensor

    from shared_embeddings.compress.recovery import Plan
    from shared_embeddings.compress.report import CompressionReport
    from shared_embeddings.compress.session import Choice, MaxLoss, Settings

Command = Callable[[argparse.Namespace, list[str]], str]


def add(
    commands: argparse._SubParsersAction[Parser],
    name: str,
    title: str,
    run: Command,
    example: str,
    takes_options: bool = False,
) -> argparse.ArgumentParser:
    """Add a command with its function and the arguments of an example.

    With `takes_options`, remaining arguments are options of a method.
    """
    epilog = f"example: shared-embeddings {name} {example}"
    if takes_options:
        epilog = f"Any option of the method follows as --option value, e.g. --rank 64; {epilog}"
    command = commands.add_parser(name, help=title, description=title, epilog=epilog)
    command.set_defaults(run=run, takes_options=takes_options)
    return command


def add_model(command: argparse._ActionsContainer, required: bool = True) -> None:
    """Add the option ``--model``; it cannot be required in a group of options."""
    command.add_argument(
        "--model",
        required=required,
        type=PathOption.MODEL,
        help="a trained model of any host, file or folder, or the name of one on the Hugging Face Hub",
    )


def add_flags(command: argparse.ArgumentParser, *names: str) -> None:
    """Add the flags ``--json`` and ``--force``, or one of them."""
    texts = {"json": "print one JSON object", "force": "overwrite existing files"}
    for name in names:
        command.add_argument(f"--{name}", action="store_true", help=texts[name])


def percentage(text: str) -> float:
    """A fraction from a text such as 1% or 0.01."""
    number, sign, rest = text.partition("%")
    value = decimal_number(number)
    if rest or value is None or not 0.0 <= (value := value / (100 if sign else 1)) <= 1.0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a percentage; write 1% or 0.01")
    return value


def largest_loss(text: str) -> MaxLoss:
    """The largest loss from a text such as 1% or 0.02nats."""
    from shared_embeddings.compress.session import MaxLoss

    number, unit, rest = text.partition("nats")
    if not unit:
        return MaxLoss(percentage(text))
    value = decimal_number(number)
    if rest or value is None or value < 0:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a divergence; write 0.02nats, or a loss such as 1%"
        )
    return MaxLoss(value, in_nats=True)


REQUIRED = "required"


def _add_catalog(commands: argparse._SubParsersAction[Parser]) -> None:
    command = add(commands, "methods", "list the methods, their papers and their options", _methods, "")
    command.add_argument("--format", choices=("text", "markdown"), default="text")

    example = "--method define --vocab-size 50000 --dim 512 --map-dim 128"
    title = "count the parameters and bytes of an embedding"
    command = add(commands, "params", title, _params, example, takes_options=True)
    command.add_argument("--method", required=True, help="a method, see 'shared-embeddings methods'")
    command.add_argument("--vocab-size", required=True, type=int, help="V, the number of words")
    command.add_argument("--dim", required=True, type=int, help="D, the dimension of the model")
    add_flags(command, "json")

    command = add(
        commands,
        "suggest",
        "suggest options within a budget",
        _suggest,
        "--vocab-size 37000 --dim 512 --budget 2M",
    )
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
    if known.format == "markdown":
        return methods_table()
    lines = []
    for method in se.methods():
        found = se.get_method_config(method)
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
    options_class = se.get_method_config(method)
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
    lines += [
        f"| `{name}` | {se.get_method_config(name).paper} | {se.get_method_config(name).summary} |"
        for name in se.methods()
    ]
    return "\n".join(lines)


def _params(known: argparse.Namespace, rest: list[str]) -> str:
    """The size of an embedding of V words in D dimensions, beside a plain table; allocates no weights."""
    given: dict[str, typing.Any] = parse_words(rest)
    for name in ("num_embeddings", "embedding_dim", "words"):
        if name in given:
            raise OptionError(
                f"'{name}' is not an option of a method; remove it (--vocab-size and --dim set the size)"
            )
    sizes = {"num_embeddings": known.vocab_size, "embedding_dim": known.dim}
    import torch

    with torch.device("meta"):
        embedding = se.build(known.method, **sizes, **given)
    counts, dense = embedding.counts(), se.num_parameters("standard", **sizes)
    # A plain table in 32 bits over what is stored.
    rows = {**counts, "dense": dense, "compression": round(32 * dense / counts["stored_bits"], 2)}
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
    cells = [["part", "shape", "numbers", *(f"bytes {name}" for name in STORES), "compression"]]
    for part in storage_breakdown(embedding):
        shape = " x ".join(map(str, part.shape))
        factor = "" if part.compression is None else f"{part.compression:.2f}x"
        cells.append([part.name, shape, *(f"{one:,}" for one in (part.count, *part.bytes.values())), factor])
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
    """Every parameter and persistent buffer of `embedding` once, then their total, then the plain table.

    The bytes of floating-point tensors depend on the storage dtype; those of others, such as word codes, do
    not (`SharedEmbedding.buffer_bits`). Works on the meta device.
    """
    import torch

    from shared_embeddings.quant.storage import packed_bytes

    def part(name: str, kind: str, tensor: Tensor, bits: int) -> Part:
        sizes = dict.fromkeys(STORES, math.ceil(bits / 8))
        if tensor.is_floating_point():
            sizes = {store: packed_bytes(tensor, store, name) for store in STORES}
        return Part(name, kind, tuple(tensor.shape), tensor.numel(), sizes)

    parts = [part(name, "parameter", tensor, 0) for name, tensor in embedding.named_parameters()]
    parts += [
        part(name, "buffer", tensor, bits) for name, tensor, bits in se.accounting.stored_buffers(embedding)
    ]
    trained = sum(part.count for part in parts if part.kind == "parameter")
    total = {store: sum(part.bytes[store] for part in parts) for store in STORES}
    plain = part(
        "plain table", "sum", torch.empty(embedding.num_embeddings, embedding.embedding_dim, device="meta"), 0
    )
    factor = plain.bytes["fp32"] / total["fp32"]
    return [
        *parts,
        Part("total", "sum", (), trained, total, factor),
        dataclasses.replace(plain, shape=(), compression=1.0),
    ]


def _suggest(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.compress.sizing import describe_suggestions, suggestion_page

    if known.html is not None:
        if known.json:
            raise UserError("--json and --html exclude each other; remove one of them")
        write_text(known.html, suggestion_page(known.vocab_size, known.dim, known.budget))
        return str(known.html)
    if known.force:
        raise UserError("--force has no effect without --html; remove it")
    if known.budget is None:
        raise UserError("--budget is missing; give a number of parameters such as 2M, or --html FILE")
    for name, values in (("--vocab-size", known.vocab_size), ("--dim", known.dim)):
        if len(values) > 1:
            raise UserError(f"{name} has {len(values)} values; give one, or --html FILE for a page of all")
    return describe_suggestions(known.vocab_size[0], known.dim[0], known.budget, as_json=known.json)


# Files of the command trim.
_FILES = {
    "text": "texts whose words to keep: raw for Hugging Face models, otherwise tokenized as in training",
    "source-text": "the same for the source of a translation model",
    "target-text": "the same for the target of a translation model",
    "held-out": "held-out texts: report how many of their lines round-trip",
    "keep": "more words to keep, one per line",
}
# Formats of the command export.
_FORMATS = {
    "onnx": "the whole model for ONNX Runtime",
    "onnx-embeddings": "only its embeddings and output layer",
    "vec": "its word vectors in the text format of word2vec and fastText",
    "dense": "a Hugging Face folder with dense tables and the original names",
    "gguf": "a copy of a GGUF file of the same model with the tables of this one, for llama.cpp",
}


def _add_compress(commands: argparse._SubParsersAction[Parser]) -> None:
    title = "replace the embeddings of a trained model"
    example = "--model MODEL --target-ratio 8 --text train.txt --output SMALL"
    command = add(commands, "compress", title, _compress, example, takes_options=True)
    add_model(command)
    argument = command.add_argument
    argument("--output", action="append", type=PathOption.NEW, help="output path, in the format of --model")
    argument("--compare", action="store_true", help="only compare the candidates; writes no model")
    add_flags(command, "force")

    argument = command.add_argument_group("size, one of these or --bits N").add_argument
    argument("--target-ratio", type=float, help="reduce the bytes of the embeddings by this factor")
    argument("--target-bytes", type=int, help="maximum bytes of the embeddings")
    argument(
        "--max-loss",
        type=largest_loss,
        help="choose the smallest size with at most this loss of the quality, or else of the perplexity of "
        "the text or the predictions, such as 1%%; or this divergence of the predictions, such as 0.02nats",
    )

    argument = command.add_argument_group("method").add_argument
    argument("--method", help="see 'shared-embeddings methods' (default: try several and keep the best)")
    argument("--embedding-output", help="the option 'output' of a method, such as table")
    argument("--store", choices=STORES, help="storage dtype (default: depends on the method)")
    argument("--fit-steps", type=int, help="steps of gradient descent, for methods that use it")
    argument("--seed", type=int, default=0, help="(default: 0)")

    argument = command.add_argument_group("texts and calibration").add_argument
    argument(
        "--text",
        nargs="+",
        type=PathOption.FILE,
        help="text in all languages of the vocabulary, raw for Hugging Face models, otherwise tokenized as "
        "in training: to count words, to calibrate and to compare predictions",
    )
    argument("--token-counts", type=PathOption.FILE, help="file with a word, a tab and its count per line")
    argument(
        "--calibrate",
        choices=SIDES,
        help="measure what errors count for input and output, or for the output alone, which needs no "
        "gradients, on --text or else on what the model generates (default: both with --text, else none)",
    )
    argument(
        "--calibration",
        type=PathOption.OUTPUT,
        metavar="FILE",
        help="read what was measured from this file instead, or write it if there is none",
    )
    argument(
        "--trim-to",
        nargs="+",
        type=PathOption.FILE,
        metavar="TEXT",
        help="first trim the vocabulary to these texts, like trim; ratios are relative to the result",
    )

    argument = command.add_argument_group("training after the fit").add_argument
    argument(
        "--recover",
        type=float,
        metavar="MINUTES",
        help="then train the model for this long on --text, or on what the original generates, to bring its "
        "predictions closer to the original's; after an interruption, the same command resumes",
    )
    argument("--recover-steps", type=int, metavar="N", help="the same for N steps, with a repeatable result")

    argument = command.add_argument_group("measuring and reporting").add_argument
    argument("--validation", type=PathOption.SOURCE, help="text for the perplexity of a language model")
    argument(
        "--validation-source",
        type=PathOption.FILE,
        help="tokenized source text for the BLEU of a translation model",
    )
    argument("--validation-target", type=PathOption.FILE, help="its reference translation")
    argument(
        "--validation-subwords",
        choices=SUBWORDS,
        default="none",
        help="subwords to join before computing BLEU (default: none, BLEU of tokens)",
    )
    argument(
        "--no-check",
        action="store_true",
        help="with --method: do not run the model, which saves memory; the quality is not measured",
    )
    argument("--report", type=PathOption.NEW_FILE, help="also write the report to this JSON file")
    argument("--verbose", action="store_true", help="also print all sizes, errors and speeds")


def _compress(known: argparse.Namespace, rest: list[str]) -> str:
    from shared_embeddings.compress.measure import Validation
    from shared_embeddings.compress.session import Choice, Settings
    from shared_embeddings.words.token_counts import read_counts

    if known.token_counts is not None and known.text is not None:
        raise UserError("--token-counts and --text both provide word counts; remove one of them")
    if len(known.output or ()) > 1:
        raise UserError("--output is repeated; the option 'output' of a method is --embedding-output")
    if known.compare == bool(known.output):
        raise UserError("give either --output or --compare")
    for name in ("force", "report"):
        if known.compare and getattr(known, name):
            raise UserError(
                f"--{name} has no effect with --compare, which writes no files; remove one of them"
            )
    require_at_least("seed", known.seed, 0)
    plan = _recovery(known)
    validation = None
    sides = (known.validation_source, known.validation_target)
    if known.validation is not None or sides != (None, None) or known.validation_subwords != "none":
        validation = Validation(known.validation, *sides, known.validation_subwords)
    settings = Settings(
        counts=read_counts(known.token_counts) if known.token_counts is not None else None,
        texts=known.text,
        calibrate=known.calibrate,
        calibration=known.calibration,
        validation=validation,
        recovery=plan,
        seed=known.seed,
        force=known.force,
        report_file=known.report,
    )
    output = None if known.compare else Path(known.output[0])
    run = _choose if known.method is None else _compress_with
    if known.trim_to is None:
        found = run(known, rest, known.model, output, settings)
    else:
        from shared_embeddings.compress.trim import trimmed_copy

        with trimmed_copy(known.model, output, known.trim_to, settings) as (small, inner):
            found = run(known, rest, small, output, inner)
    report = found.report if isinstance(found, Choice) else found
    details = [report.described(), ""] if known.verbose and report is not None else []
    return "\n".join([*details, found.summary()])


def _recovery(known: argparse.Namespace) -> Plan | None:
    """How long the model is trained."""
    from shared_embeddings.compress.recovery import Plan

    if known.recover is None and known.recover_steps is None:
        return None
    if known.recover is not None and known.recover_steps is not None:
        raise UserError("--recover and --recover-steps exclude each other; remove one of them")
    name = "recover" if known.recover is not None else "recover-steps"
    if known.compare:
        raise UserError(f"--{name} trains the model that is written; give --output instead of --compare")
    if known.no_check:
        raise UserError(f"--{name} runs the model; remove --no-check")
    return Plan(known.recover, known.recover_steps)


def _compress_with(
    known: argparse.Namespace, rest: list[str], model: Path, output: Path | None, settings: Settings
) -> CompressionReport:
    from shared_embeddings.compress.session import compress
    from shared_embeddings.compress.sizing import Target

    for name in ("compare", "max_loss"):
        if getattr(known, name):
            raise UserError(f"--{name.replace('_', '-')} compares methods; remove --method")
    if known.no_check and settings.validation is not None:
        raise UserError("--no-check does not run the model; remove the --validation options")
    assert output is not None
    options = parse_words(rest)
    if known.embedding_output is not None:
        options["output"] = known.embedding_output
    has_target = known.target_ratio is not None or known.target_bytes is not None
    return compress(
        model,
        known.method,
        output,
        options=options,
        target=Target(known.target_ratio, known.target_bytes) if has_target else None,
        store=known.store,
        steps=known.fit_steps,
        check=not known.no_check,
        settings=settings,
    )


def _choose(
    known: argparse.Namespace, rest: list[str], model: Path, output: Path | None, settings: Settings
) -> Choice:
    from shared_embeddings.compress.session import choose
    from shared_embeddings.compress.sizing import Target

    for name in ("store", "fit_steps", "embedding_output"):
        if getattr(known, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} needs --method")
    if known.no_check:
        raise UserError("--no-check needs --method: methods are compared by running the model")
    options = parse_words(rest)
    bits = options.pop("bits", None)
    if options:
        raise UserError(f"--{next(iter(options))} is an option of a method; also give --method")
    sizes = [known.target_ratio, known.target_bytes, bits]
    if sum(size is not None for size in (*sizes, known.max_loss)) != 1:
        raise UserError(
            "give exactly one of --target-ratio, --target-bytes, --bits and --max-loss, or a --method"
        )
    if bits is not None and (isinstance(bits, bool) or not isinstance(bits, int | float)):
        raise UserError(f"--bits is {bits}, but it must be a number above 0 and below 32")
    target = Target(*sizes) if known.max_loss is None else None
    return choose(model, output, target, known.max_loss, settings)


def _add_export(commands: argparse._SubParsersAction[Parser]) -> None:
    command = add(
        commands,
        "export",
        "write a trained model for other runtimes",
        _export,
        "--model MODEL --output m.onnx",
    )
    add_model(command)
    command.add_argument(
        "--output",
        required=True,
        type=PathOption.NEW,
        help="output file, or folder for dense; models with several embeddings get one file each for "
        "onnx-embeddings and vec",
    )
    formats = "; ".join(f"{name}: {text}" for name, text in _FORMATS.items())
    command.add_argument("--format", choices=[*_FORMATS], default="onnx", help=f"{formats} (default: onnx)")
    command.add_argument("--gguf", type=PathOption.FILE, metavar="FILE", help="the GGUF file to copy")
    add_flags(command, "force")


def _export(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.compress.host import find_host
    from shared_embeddings.export.onnx import export_embedding, export_model
    from shared_embeddings.words.vectors import WordVectors, write_vectors

    host, adapter = find_host(known.model)
    if known.format in ("dense", "gguf") and host != "hf":
        raise UserError(
            f"--format {known.format}: takes Hugging Face models, but {known.model} is of the host '{host}'"
        )
    if (known.format == "gguf") != (known.gguf is not None):
        raise UserError(
            "--format gguf takes --gguf FILE, a GGUF file of the same model, and no other format does"
        )
    model: Any = adapter.read(known.model)
    output = Path(known.output)
    if known.format == "dense":
        written = model.write_dense(output, known.force)
        return f"wrote {output}: dense tables, {written:,} bytes of weights"
    if known.format == "gguf":
        check_new_files([output], known.force, known.model)
        return str(model.write_gguf(known.gguf, output))
    if known.format == "onnx":
        if not hasattr(model, "onnx_body"):
            raise UserError(
                f"--format onnx: whole models of the host '{host}' are not exported to ONNX; use --format "
                "onnx-embeddings"
            )
        check_new_files([output], known.force, known.model)
        return export_model(model.onnx_body(), output).described()
    embeddings = model.embeddings()
    outputs = [
        output if len(embeddings) == 1 else output.with_name(f"{output.stem}.{one.name}{output.suffix}")
        for one in embeddings
    ]
    check_new_files(outputs, known.force, known.model)
    lines = []
    for embedding, path in zip(embeddings, outputs):
        if known.format == "onnx-embeddings":
            lines.append(export_embedding(embedding, path).described())
            continue
        table = embedding.table().numpy()
        write_vectors(path, WordVectors(list(embedding.words), table))
        lines.append(f"{path}: {table.shape[0]:,} words in {table.shape[1]:,} dimensions as text")
    return "\n".join(lines)


def _add_trim(commands: argparse._SubParsersAction[Parser]) -> None:
    command = add(
        commands,
        "trim",
        "remove the words that given texts do not use",
        _trim,
        "--model MODEL --text train.txt --output SMALL",
    )
    add_model(command)
    argument = command.add_argument
    for name, description in _FILES.items():
        argument(f"--{name}", nargs="+", default=[], type=PathOption.FILE, metavar="FILE", help=description)
    argument("--output", type=PathOption.NEW, help="output path, in the format of --model")
    argument(
        "--dry-run", action="store_true", help="only report the words to keep and the size; writes no model"
    )
    argument("--keep-first", type=int, default=0, metavar="N", help="also keep the first N words")
    argument(
        "--min-count",
        type=int,
        default=1,
        metavar="N",
        help="remove words that are less frequent in the texts (default: 1)",
    )
    argument("--top-k", type=int, metavar="N", help="keep the N most frequent words of the texts")
    argument(
        "--coverage",
        type=percentage,
        help="keep the most frequent words that cover this fraction of the texts, such as 99.9%%",
    )
    argument(
        "--drop-characters",
        action="store_true",
        help="also remove unused single characters; other texts may then contain unknown words",
    )
    add_flags(command, "force")


def _trim(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.compress.trim import Keep, Texts, read_words, trim

    if known.dry_run == bool(known.output):
        raise UserError("give either --output or --dry-run")
    if known.dry_run and known.force:
        raise UserError("--force has no effect with --dry-run; remove one of them")
    keep = Keep(
        min_count=known.min_count,
        words=[word for path in known.keep for word in read_words(path)],
        first=known.keep_first,
        top=known.top_k,
        coverage=known.coverage,
        characters=not known.drop_characters,
    )
    texts = Texts(known.text, known.source_text, known.target_text, known.held_out)
    return trim(known.model, texts, known.output, keep, known.force).described()


SUMMARY = "correlation.json"
# Options for training word vectors.
_SKIP_GRAM = {
    "dim": "width of the word vectors (with --text; default: 100)",
    "window": "words of context each side (with --text; default: 5)",
    "epochs": "passes over the text (with --text; default: 5)",
}


def _add_words(commands: argparse._SubParsersAction[Parser]) -> None:
    title = "cluster the words of a vocabulary into semantic classes"
    example = "--text train.txt --vocab vocab.txt --num-classes 1000 --output classes.npz"
    command = add(commands, "classes", title, _classes, example)
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", nargs="+", type=PathOption.FILE, help="tokenized text files")
    source.add_argument(
        "--vectors-of",
        type=PathOption.FILE,
        metavar="CLASSES",
        help="cluster the word vectors in this class file (.npz) again",
    )
    command.add_argument("--vocab", type=PathOption.FILE, help="vocabulary, one word per line (with --text)")
    command.add_argument(
        "--num-classes", required=True, type=int, help="number of classes, such as a twelfth of V"
    )
    command.add_argument("--output", required=True, type=PathOption.NEW_FILE, help="output file (.npz)")
    for name, description in _SKIP_GRAM.items():
        command.add_argument(f"--{name}", type=int, help=description)
    command.add_argument("--seed", type=int, default=0, help="(default: 0)")
    command.add_argument("--figure", type=PathOption.NEW_FILE, help="plot the class sizes to this PNG file")
    add_flags(command, "force")

    title = "plot the correlation between the dimensions of each layer"
    command = add(commands, "correlation", title, _correlation, "--model MODEL --output pictures")
    add_model(command)
    command.add_argument(
        "--output", required=True, type=PathOption.FOLDER, help=f"folder for the PNG files and {SUMMARY}"
    )
    add_flags(command, "force")

    title = "print the cosines of words in each layer of an embedding"
    command = add(commands, "cosines", title, _cosines, "--model MODEL --words year month dog")
    add_model(command)
    command.add_argument("--words", required=True, nargs="+", metavar="WORD", help="two or more words")
    add_flags(command, "json")

    title = "evaluate word vectors on word similarity"
    command = add(commands, "similarity", title, _similarity, "--model MODEL --pairs pairs.txt")
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--vectors", type=PathOption.FILE, help="vectors of GloVe, word2vec or fastText, text or binary"
    )
    add_model(source, required=False)
    command.add_argument(
        "--pairs",
        required=True,
        nargs="+",
        type=PathOption.FILE,
        help="word similarity data: files with two words and a score per line",
    )
    command.add_argument("--limit", type=int, help="read only this many words of --vectors")
    add_flags(command, "json")


def _classes(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.words.classes import make_classes, regroup

    given = {
        name: getattr(known, name) for name in ("vocab", *_SKIP_GRAM) if getattr(known, name) is not None
    }
    if known.vectors_of is not None:
        if given:
            raise UserError(
                f"--{next(iter(given))} has no effect with --vectors-of, which provides the word vectors; "
                "remove it"
            )
        return regroup(
            known.vectors_of, known.num_classes, known.output, known.seed, known.figure, known.force
        )
    if known.vocab is None:
        raise UserError("--text needs --vocab")
    vocabulary = given.pop("vocab")
    return make_classes(
        known.text,
        vocabulary,
        known.num_classes,
        known.output,
        seed=known.seed,
        figure=known.figure,
        force=known.force,
        **given,
    )


def _correlation(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.analysis import draw_map, layer_correlations
    from shared_embeddings.compress.host import find_host
    from shared_embeddings.utils.files import staged, write_text

    check_new_files([known.output / SUMMARY], known.force)
    embeddings = find_host(known.model)[1].read(known.model).embeddings()
    layers = [layer for embedding in embeddings for layer in layer_correlations(embedding)]
    drawn = [found for layer in layers for found in (layer, *layer.by_group())]
    outputs = [known.output / name for name in (SUMMARY, *(found.file_name() for found in drawn))]
    check_new_files(outputs, known.force)
    summaries = [{**found.summary(), "picture": found.file_name()} for found in drawn]
    record = {"model": str(known.model), "layers": summaries}
    with staged(outputs) as places:
        write_text(places[0], json.dumps(record, indent=1) + "\n")
        for found, place in zip(drawn, places[1:]):
            draw_map(found, place)
    rows = [["", "words", "width", "constant", "mean |r|", "between groups"]]
    for row in summaries:
        numbers = [f"{row[name]:,}" for name in ("words", "width", "constant")]
        numbers += [_as_number(row[name]) for name in ("mean_correlation", "between_groups")]
        rows.append([f"{row['embedding']}: {row['layer']}", *numbers])
    written = f"wrote {len(summaries)} pictures and {SUMMARY} to {known.output}"
    return "\n".join([*align(rows), written])


def _cosines(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.analysis import layer_cosines
    from shared_embeddings.compress.host import find_host

    embeddings = find_host(known.model)[1].read(known.model).embeddings()
    found = {one.name: layer_cosines(one, known.words) for one in embeddings}
    if known.json:
        rows = {name: [pair._asdict() for pair in pairs] for name, pairs in found.items()}
        return json.dumps({"embeddings": rows}, indent=1, ensure_ascii=False)
    lines: list[str] = []
    for name, pairs in found.items():
        layers = list(dict.fromkeys(layer for pair in pairs for layer in pair.cosines))
        cells = [[_as_number(pair.cosines.get(layer)) for layer in layers] for pair in pairs]
        words = [f"{pair.first}, {pair.second}" for pair in pairs]
        lines += [name, *align([["", *layers], *([pair, *numbers] for pair, numbers in zip(words, cells))])]
    return "\n".join(lines)


def _as_number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _similarity(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.analysis import read_pairs, word_similarity
    from shared_embeddings.compress.host import find_host
    from shared_embeddings.words.vectors import WordVectors, read_vectors

    if known.limit is not None and known.vectors is None:
        raise UserError("--limit has no effect without --vectors; remove it")
    tests = [read_pairs(path) for path in known.pairs]
    if known.vectors is not None:
        tables = {known.vectors.name: read_vectors(known.vectors, known.limit)}
    else:
        embeddings = find_host(known.model)[1].read(known.model).embeddings()
        tables = {one.name: WordVectors(list(one.words), one.table().numpy()) for one in embeddings}
    found = {
        name: [word_similarity(table.words, table.vectors, test) for test in tests]
        for name, table in tables.items()
    }
    if not any(result.known for results in found.values() for result in results):
        raise UserError(
            f"pairs {', '.join(map(str, known.pairs))}: no pair has vectors for both words in "
            f"{known.vectors or known.model}; use pairs of the same language, or other vectors"
        )
    rows, lines = {}, []
    for name, results in found.items():
        words, dim = tables[name].vectors.shape
        sets = [{**dataclasses.asdict(result), "coverage": result.coverage} for result in results]
        rows[name] = {"words": words, "dimensions": dim, "sets": sets}
        cells = [["", "Spearman's rho", "known pairs"]]
        for result in results:
            rho = "undefined" if result.rho is None else f"{result.rho:.4f}"
            note = f", {result.lower_cased} in lower case" if result.lower_cased else ""
            share = f"{result.known} of {result.pairs} ({result.coverage:.0%}){note}"
            cells.append([f"  {result.name}", rho, share])
        lines += [f"{name}: {words:,} words in {dim:,} dimensions", *align(cells)]
    return json.dumps({"tables": rows}, indent=1) if known.json else "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status; see `shared_embeddings.utils.command_line.run`."""

    def print_result(arguments: Sequence[str]) -> None:
        parser = Parser(
            prog="shared-embeddings", description=__doc__, epilog="example: shared-embeddings compress --help"
        )
        version = f"%(prog)s {metadata.version('shared-embeddings')}"
        parser.add_argument("--version", action="version", version=version, help="print the version and exit")
        commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
        for add_commands in (_add_catalog, _add_compress, _add_export, _add_trim, _add_words):
            add_commands(commands)
        if not arguments:
            parser.print_help()
            return
        known, rest = parser.parse_known_args(arguments)
        if rest and not known.takes_options:
            raise UserError(f"'{rest[0]}' is not an argument of this command; remove it")
        if getattr(known, "model", None) is not None and is_hub_name(known.model):
            known.model = hub_model(str(known.model))
        print(known.run(known, rest), flush=True)

    return run("shared-embeddings", print_result, arguments)


if __name__ == "__main__":
    sys.exit(main())
