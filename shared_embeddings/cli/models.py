"""The commands ``compress``, ``join``, ``trim``, ``export`` and ``verify``."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from shared_embeddings.compress.options import MODEL, CompressOptions, TrimOptions, check_runtime
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import bytes_on_disk
from shared_embeddings.utils.options import add_options, parse_options, parse_words
from shared_embeddings.utils.paths import check_outputs, existing_path, model_path, new_path
from shared_embeddings.utils.reading import parse_yaml

# Data types of tables for model2vec.
DTYPES = ("float32", "float16", "int8")
# Formats of the command export.
_FORMATS = {
    "onnx": "the whole model for ONNX Runtime",
    "onnx-embeddings": "only its embeddings and output layer",
    "vec": "its word vectors in the text format of word2vec and fastText",
    "dense": "a Hugging Face folder with dense tables and the original names",
    "model2vec": "a static model for model2vec and sentence-transformers, in the data type of --dtype",
}


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands; for `add`, see `shared_embeddings.cli.main`."""
    title = "replace the embeddings of a trained model"
    example = "--model MODEL --bits 4 --text train.txt --output SMALL"
    command = add("compress", title, _compress, example, takes_options=True)
    add_options(command, CompressOptions)
    command.add_argument("--verbose", action="store_true", help="also print all sizes, errors and speeds")

    title = "remove the tokens that given texts do not use"
    example = "--model MODEL --text train.txt --output SMALL"
    add_options(add("trim", title, _trim, example), TrimOptions)

    title = "write a trained model for other runtimes"
    command = add("export", title, _export, "--model MODEL --output m.onnx")
    command.add_argument("--model", required=True, type=model_path, help=MODEL)
    command.add_argument(
        "--output",
        required=True,
        type=new_path,
        help="output file, or folder for dense; models with several embeddings get one file each for "
        "onnx-embeddings and vec",
    )
    formats = "; ".join(f"{name}: {text}" for name, text in _FORMATS.items())
    command.add_argument("--format", choices=[*_FORMATS], help=f"{formats} (default: onnx, or the runtime's)")
    command.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float16",
        help="for model2vec (default: float16)",
    )
    add_options(command, CompressOptions, ("runtime", "bits", "grid", "gguf"))
    command.add_argument("--force", action="store_true", help="overwrite existing files")

    title = "complete a large table whose parts were compressed by several processes"
    add("join", title, _join, "SMALL").add_argument(
        "path", type=existing_path, help="the output of compress --table"
    )

    title = "compare the files of a model with the checksums that were written with them"
    command = add("verify", title, _verify, "SMALL")
    command.add_argument("path", type=existing_path, help="a model, file or folder")


def _options(options_class: Any, known: argparse.Namespace) -> Any:
    names = [field.name for field in dataclasses.fields(options_class)]
    values = {name: value for name, value in vars(known).items() if name in names}
    return parse_options(known.command, options_class, values)


def _compress(known: argparse.Namespace, rest: list[str]) -> str:
    from shared_embeddings.compress.command import compare, compress

    method_options = parse_words(rest)
    if getattr(known, "method", "").startswith("{"):
        settings = parse_yaml(known.method, "--method")
        known.method = settings.pop("method", "")
        method_options |= settings
    options: CompressOptions = _options(CompressOptions, known)
    if options.table is not None:
        from shared_embeddings.large.coding import compress_table

        return compress_table(options, **cast(dict[str, Any], method_options)).summary()
    if options.compare:
        for name in method_options:
            raise UserError(f"{name} is an option of a method; compare takes none")
        return compare(options).summary()
    report, search = compress(options, **method_options)
    parts = [report.described()] if known.verbose else []
    parts += [] if search is None else [search.summary()]
    return "\n\n".join([*parts, report.summary()])


def _trim(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.compress.trim import trim

    return trim(_options(TrimOptions, known)).described()


def _export(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.compress.host import find_host
    from shared_embeddings.export.onnx import export_embedding, export_model
    from shared_embeddings.words.vectors import WordVectors, write_vectors

    host, adapter = find_host(known.model)
    output: Path = known.output
    runtime = getattr(known, "runtime", None)
    if runtime is not None and known.format is not None:
        raise UserError(f"--format {known.format}: has no effect with --for {runtime}; remove one of them")
    form = "runtime" if runtime not in (None, "onnx") else known.format or "onnx"
    for name in ("bits", "grid", "gguf") if form != "runtime" else ():
        if hasattr(known, name):
            raise UserError(f"--{name}: has no effect on {form}; remove it, or name another runtime (--for)")
    takes = {"dense": "hf", "runtime": "hf", "model2vec": "static"}.get(form, host)
    if host != takes:
        what = f"--for {runtime}" if form == "runtime" else f"--format {form}"
        raise UserError(f"{what}: takes models of the host '{takes}', but {known.model} is of '{host}'")
    model: Any = adapter.read(known.model)
    embeddings = [] if form not in ("onnx-embeddings", "vec") else model.embeddings()
    outputs = [output]
    if len(embeddings) > 1:
        outputs = [output.with_name(f"{output.stem}.{part.name}{output.suffix}") for part in embeddings]
    gguf = getattr(known, "gguf", None)
    check_outputs(outputs, filter(None, [known.model, gguf]), known.force)
    if form == "dense":
        written = model.write_dense(output, known.force)
        return f"wrote {output}: dense tables, {written:,} bytes of weights"
    if form == "model2vec":
        return str(model.write_model2vec(output, known.dtype))
    if runtime is not None and form == "runtime":
        chosen = check_runtime(runtime, gguf)
        asked = getattr(known, "bits", None), getattr(known, "grid", None)
        name, is_exact = model.find_grid(chosen, *asked)
        model.write_for(chosen, name, output, gguf, "")
        codes = "the codes of the model" if is_exact else "rounded to the nearest codes"
        return f"wrote {output}: {name} for {runtime}, {codes}, {bytes_on_disk(output):,} bytes"
    if form == "onnx":
        if not hasattr(model, "onnx_body"):
            raise UserError(
                f"--format onnx: whole models of the host '{host}' are not exported to ONNX; use --format "
                "onnx-embeddings"
            )
        return export_model(model.onnx_body(), output).described()
    lines = []
    for embedding, path in zip(embeddings, outputs):
        if form == "onnx-embeddings":
            lines.append(export_embedding(embedding, path).described())
            continue
        table = embedding.table().numpy()
        write_vectors(path, WordVectors(list(embedding.words), table))
        lines.append(f"{path}: {table.shape[0]:,} words in {table.shape[1]:,} dimensions as text")
    return "\n".join(lines)


def _join(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.large.coding import join

    return f"{known.path}: all {len(join(known.path))} shards are there"


def _verify(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.checkpoints import verify

    return "\n".join(f"{file}: matches its checksum" for file in verify(known.path))
