"""The command `export`: trained models, or their embeddings alone, for other runtimes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shared_embeddings.cli.arguments import add, add_flags, add_model
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.path_options import PathOption, check_new_files

_FORMATS = {
    "onnx": "the whole model for ONNX Runtime",
    "onnx-embeddings": "only its embeddings and output layer",
    "vec": "its word vectors in the text format of word2vec and fastText",
    "dense": "a Hugging Face folder with dense tables and the original names, for example for llama.cpp",
}


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
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
