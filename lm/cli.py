"""The commands ``lm_prepare``, ``lm_train``, ``lm_eval`` and ``lm_generate``.

See `shared_embeddings.utils.command_line.run` for what they print and return when something goes wrong.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from shared_embeddings.utils import command_line
from shared_embeddings.utils.files import first_line
from shared_embeddings.utils.interrupts import RESUME
from shared_embeddings.utils.peers import lost_group


def prepare() -> None:
    """Turn texts into token files and a vocabulary."""
    _run("lm_prepare", "lm.data.prepare")


def train() -> None:
    """Train a language model, or resume training it."""
    _run("lm_train", "lm.train.command")


def evaluate() -> None:
    """Measure the perplexity of a trained model."""
    _run("lm_eval", "lm.evaluate.command")


def generate() -> None:
    """Write text with a trained model."""
    _run("lm_generate", "lm.evaluate.generate")


def _run(command: str, module: str) -> None:
    """Call ``main(arguments)`` of a module, which is imported when interrupts are handled already."""

    def main(arguments: Sequence[str]) -> None:
        importlib.import_module(module).main(arguments)

    advice = RESUME if command == "lm_train" else command_line.NO_PARTIAL_FILES
    command_line.exit_with(command_line.run(command, main, explain=_explain, advice=advice))


def _explain(error: BaseException) -> str | None:
    """What a user reads about an error; None where it is not the user's."""
    line = lost_group(error) or command_line.explain(error)
    if line is not None or not isinstance(error, RuntimeError):
        return line
    # Slow to import, and there only when something is compiled.
    from torch._dynamo.exc import BackendCompilerFailed

    if isinstance(error, BackendCompilerFailed):
        reason = first_line(error.inner_exception)
        return f"compile: torch cannot compile here ({reason}); install what it lacks, or leave compile out"
    return None
