"""Starting from a trained model: fitting an embedding to it, and the option that distills it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.common.tools import run_module

REPORT = "fit.json"


def distillation_options(distill: dict[str, Any], model: Path) -> dict[str, Any]:
    """The option of training that a row's ``distill`` stands for, with the teacher's trained `model`."""
    return {"embedding_distillation": {**distill, "teacher": str(model)}}


def fit_model(
    teacher: Path,
    embedding: dict[str, Any],
    counts: Path,
    seed: int,
    output: Path,
    fit: Mapping[str, Any],
) -> None:
    """Write a copy of a trained model with an embedding that is fitted to its own.

    This runs ``shared-embeddings compress``, which writes its report to ``fit.json`` beside the copy.

    Args:
        teacher: the trained model, of any host.
        embedding: method and options of the new embedding.
        counts: a word, a tab and its count on every line.
        seed: of what is drawn.
        output: the copy.
        fit: the row's ``fit``: ``fit_steps`` and ``store`` may be left out.

    Raises:
        UserError: the command failed.
        SystemExit: with status 2 when the command has reported a mistake of the user's itself.
    """
    arguments: list[str | Path] = ["compress", "--model", teacher, "--method", embedding["method"]]
    arguments += ["--token-counts", counts, "--seed", str(seed), "--force"]
    arguments += ["--output", output, "--report", output.with_name(REPORT)]
    for key, name in (("fit_steps", "--fit-steps"), ("store", "--store")):
        if key in fit:
            arguments += [name, str(fit[key])]
    for name, value in embedding.items():
        if name != "method":
            text = value if isinstance(value, str) else json.dumps(value)
            arguments += ["--embedding-output" if name == "output" else f"--{name}", text]
    run_module("shared_embeddings.cli.main", arguments)
