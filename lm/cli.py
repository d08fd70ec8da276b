"""The commands ``lm_prepare``, ``lm_train``, ``lm_eval`` and ``lm_generate``.

See `shared_embeddings.utils.command_line.run` for what they print and return when something goes wrong.
"""

from __future__ import annotations

from shared_embeddings.utils.command_line import explain, run_module
from shared_embeddings.utils.files import first_line
from shared_embeddings.utils.interrupts import RESUME
from shared_embeddings.utils.peers import lost_group


def prepare() -> None:
    """Turn texts into token files and a vocabulary."""
    run_module("lm_prepare", "lm.data.prepare", _explain)


def train() -> None:
    """Train a language model, or resume training it."""
    run_module("lm_train", "lm.train.command", _explain, RESUME)


def evaluate() -> None:
    """Measure the perplexity of a trained model."""
    run_module("lm_eval", "lm.evaluate.command", _explain)


def generate() -> None:
    """Write text with a trained model."""
    run_module("lm_generate", "lm.evaluate.generate", _explain)


def _explain(error: BaseException) -> str | None:
    """What a user reads about an error; None where it is not the user's."""
    line = lost_group(error) or explain(error)
    if line is not None or not isinstance(error, RuntimeError):
        return line
    # Slow to import, and there only when something is compiled.
    from torch._dynamo.exc import BackendCompilerFailed

    if isinstance(error, BackendCompilerFailed):
        reason = first_line(error.inner_exception)
        return f"compile: torch cannot compile here ({reason}); install what it lacks, or leave compile out"
    return None
