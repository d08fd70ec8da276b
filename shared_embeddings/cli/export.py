"""The command `export`: trained models, or their embeddings alone, for other runtimes."""

from __future__ import annotations

import argparse
from pathlib import Path

from shared_embeddings.cli.arguments import add
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.path_options import PathOption, check_paths

_FORMATS = {
    "onnx": "the whole model for ONNX Runtime",
    "onnx-embeddings": "its embeddings and output layer alone",
}


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = add(commands, "export", "write a trained model for other runtimes", _export)
    command.add_argument("--model", required=True, type=PathOption.SOURCE, help="a trained model of any host")
    command.add_argument(
        "--output",
        required=True,
        type=PathOption.NEW_FILE,
        help="ONNX file; with onnx-embeddings, models with several embeddings get one each, named after it",
    )
    formats = "; ".join(f"{name}: {text}" for name, text in _FORMATS.items())
    command.add_argument("--format", choices=[*_FORMATS], default="onnx", help=f"{formats} (default: onnx)")
    command.add_argument("--force", action="store_true", help="replace files that are there already")


def _export(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.checkpoints.adapter import find_host
    from shared_embeddings.checkpoints.onnx_file import export_embedding, export_model

    model = find_host(known.model)[1].read(known.model)
    output = Path(known.output)
    if known.format == "onnx":
        return export_model(model.onnx_body(), output).described()
    embeddings = model.embeddings()
    outputs = [
        output if len(embeddings) == 1 else output.with_name(f"{output.stem}.{one.name}{output.suffix}")
        for one in embeddings
    ]
    table = {f"--output ({path.name})": (PathOption.NEW_FILE, path) for path in outputs}
    check_paths({"--model": (PathOption.SOURCE, known.model), **table}, known.force)
    return "\n".join(
        export_embedding(embedding, path).described() for embedding, path in zip(embeddings, outputs)
    )
