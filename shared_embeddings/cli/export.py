"""The command `export`: trained models, or their embeddings alone, for other runtimes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_embeddings.cli.arguments import add
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.path_options import PathOption, check_paths

if TYPE_CHECKING:
    from shared_embeddings.embedding import WordEmbedding

_FORMATS = {
    "onnx": "the whole model for ONNX Runtime",
    "onnx-embeddings": "only its embeddings and output layer",
    "vec": "its word vectors in the text format of word2vec and fastText",
    "dense": "a Hugging Face folder with dense tables and the original names, for example for llama.cpp",
}


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = add(commands, "export", "write a trained model for other runtimes", _export)
    command.add_argument("--model", required=True, type=PathOption.SOURCE, help="a trained model of any host")
    command.add_argument(
        "--output",
        required=True,
        type=PathOption.NEW,
        help="output file, or folder for dense; models with several embeddings get one file each for "
        "onnx-embeddings and vec",
    )
    formats = "; ".join(f"{name}: {text}" for name, text in _FORMATS.items())
    command.add_argument("--format", choices=[*_FORMATS], default="onnx", help=f"{formats} (default: onnx)")
    command.add_argument("--force", action="store_true", help="overwrite existing files")


def _check(known: argparse.Namespace, outputs: Sequence[Path]) -> None:
    """Raise UserError unless the ONNX files can be written."""
    table = {f"--output ({path.name})": (PathOption.NEW_FILE, path) for path in outputs}
    check_paths({"--model": (PathOption.SOURCE, known.model), **table}, known.force)


def _export(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.compress.host import find_host
    from shared_embeddings.export.onnx_file import export_embedding, export_model

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
        _check(known, [output])
        return export_model(model.onnx_body(), output).described()
    embeddings = model.embeddings()
    outputs = [
        output if len(embeddings) == 1 else output.with_name(f"{output.stem}.{one.name}{output.suffix}")
        for one in embeddings
    ]
    _check(known, outputs)
    if known.format == "vec":
        return "\n".join(_write_text(embedding, path) for embedding, path in zip(embeddings, outputs))
    return "\n".join(
        export_embedding(embedding, path).described() for embedding, path in zip(embeddings, outputs)
    )


def _write_text(embedding: WordEmbedding, path: Path) -> str:
    """Write an embedding in word2vec's text format; returns a line to print."""
    from shared_embeddings.words.vectors import WordVectors, write_vectors

    table = embedding.table().numpy()
    write_vectors(path, WordVectors(list(embedding.words), table))
    return f"{path}: {table.shape[0]:,} words in {table.shape[1]:,} dimensions as text"
