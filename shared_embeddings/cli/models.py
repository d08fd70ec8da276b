"""The commands `compress`, `export` and `trim`: trained models."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_embeddings.cli.arguments import add, add_flags, add_model, percentage, read_options
from shared_embeddings.compress.measure import SUBWORDS, Validation
from shared_embeddings.quant.storage import STORES
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import require_seed
from shared_embeddings.utils.path_options import PathOption, check_new_files

if TYPE_CHECKING:
    from shared_embeddings.compress.report import CompressionReport
    from shared_embeddings.compress.session import Choice, Settings

# Files of the command trim.
_FILES = {
    "text": "texts whose words to keep, preprocessed like the training data",
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
    "dense": "a Hugging Face folder with dense tables and the original names, for example for llama.cpp",
}


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the commands."""
    _add_compress(commands)
    _add_export(commands)
    _add_trim(commands)


def _add_compress(commands: argparse._SubParsersAction[Parser]) -> None:
    title = "replace the embeddings of a trained model"
    command = add(commands, "compress", title, _compress, takes_options=True)
    add_model(command)
    argument = command.add_argument
    argument("--method", help="see 'shared-embeddings methods' (default: try several and keep the best)")
    argument("--output", action="append", type=PathOption.NEW, help="output path, in the format of --model")
    argument(
        "--trim-to",
        nargs="+",
        type=PathOption.FILE,
        metavar="TEXT",
        help="first trim the vocabulary to these texts, like trim; ratios are relative to the result",
    )
    argument("--compare", action="store_true", help="only compare the candidates; writes no model")
    argument("--embedding-output", help="the option 'output' of a method, such as table")
    argument("--token-counts", type=PathOption.FILE, help="file with a word, a tab and its count per line")
    argument(
        "--text",
        nargs="+",
        type=PathOption.FILE,
        help="tokenized text (all languages of the vocabulary), to count words and compare predictions",
    )
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
    argument("--target-ratio", type=float, help="reduce the bytes of the embeddings by this factor")
    argument("--target-bytes", type=int, help="maximum bytes of the embeddings")
    argument(
        "--max-loss",
        type=percentage,
        help="choose the smallest size with at most this loss of quality, such as 1%%",
    )
    argument(
        "--store", choices=STORES, help="storage dtype; int4 loses quality (default: depends on the method)"
    )
    argument(
        "--no-check",
        action="store_true",
        help="with --method: do not run the model, which saves memory; the quality is not measured",
    )
    argument("--fit-steps", type=int, help="steps of gradient descent, for methods that use it")
    argument("--seed", type=int, default=0, help="(default: 0)")
    argument("--report", type=PathOption.NEW_FILE, help="also write the report to this JSON file")
    add_flags(command, "force")


def _compress(known: argparse.Namespace, rest: list[str]) -> str:
    from shared_embeddings.compress.session import Settings
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
    require_seed(known.seed)
    validation = None
    sides = (known.validation_source, known.validation_target)
    if known.validation is not None or sides != (None, None) or known.validation_subwords != "none":
        validation = Validation(known.validation, *sides, known.validation_subwords)
    settings = Settings(
        counts=read_counts(known.token_counts) if known.token_counts is not None else None,
        texts=known.text,
        validation=validation,
        seed=known.seed,
        force=known.force,
        report_file=known.report,
    )
    output = None if known.compare else Path(known.output[0])
    run = _choose if known.method is None else _compress_with
    if known.trim_to is None:
        return run(known, rest, known.model, output, settings).described()
    from shared_embeddings.compress.trim import trimmed_copy

    with trimmed_copy(known.model, output, known.trim_to, settings) as (small, inner):
        return run(known, rest, small, output, inner).described()


def _compress_with(
    known: argparse.Namespace, rest: list[str], model: Path, output: Path | None, settings: Settings
) -> CompressionReport:
    """Compress with the given method."""
    from shared_embeddings.compress.session import compress
    from shared_embeddings.compress.sizing import Target

    for name in ("compare", "max_loss"):
        if getattr(known, name):
            raise UserError(f"--{name.replace('_', '-')} compares methods; remove --method")
    if known.no_check and settings.validation is not None:
        raise UserError("--no-check does not run the model; remove the --validation options")
    assert output is not None
    options = read_options(rest)
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
    """Compress with the best of the candidates."""
    from shared_embeddings.compress.session import choose
    from shared_embeddings.compress.sizing import Target

    for name in ("store", "fit_steps", "embedding_output"):
        if getattr(known, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} needs --method")
    if known.no_check:
        raise UserError("--no-check needs --method: methods are compared by running the model")
    options = read_options(rest)
    bits = options.pop("bits", None)
    if options:
        raise UserError(f"--{next(iter(options))} is an option of a method; also give --method")
    ratio = known.target_ratio
    sizes = [ratio, known.target_bytes, bits, known.max_loss]
    if sum(size is not None for size in sizes) != 1:
        raise UserError(
            "give exactly one of --target-ratio, --target-bytes, --bits and --max-loss, or a --method"
        )
    if bits is not None:
        if isinstance(bits, bool) or not isinstance(bits, int | float) or not 0 < bits < 32:
            raise UserError(f"--bits is {bits}, but it must be a number above 0 and below 32")
        ratio = 32 / bits
    target = Target(ratio, known.target_bytes) if known.max_loss is None else None
    return choose(model, output, target, known.max_loss, settings)


def _add_export(commands: argparse._SubParsersAction[Parser]) -> None:
    command = add(commands, "export", "write a trained model for other runtimes", _export)
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
    add_flags(command, "force")


def _export(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.compress.host import find_host
    from shared_embeddings.export.onnx_file import export_embedding, export_model
    from shared_embeddings.words.vectors import WordVectors, write_vectors

    host, adapter = find_host(known.model)
    if known.format == "dense" and host != "hf":
        raise UserError(
            f"--format dense: writes Hugging Face models, but {known.model} is of the host '{host}'"
        )
    model: Any = adapter.read(known.model)
    output = Path(known.output)
    if known.format == "dense":
        written = model.write_dense(output, known.force)
        return f"wrote {output}: dense tables, {written:,} bytes of weights"
    if known.format == "onnx":
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
    command = add(commands, "trim", "remove the words that given texts do not use", _trim)
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
