"""The commands ``lm_prepare``, ``lm_train``, ``lm_eval`` and ``lm_generate``.

See `shared_embeddings.utils.command_line.run` for their errors and exit statuses.
"""

from __future__ import annotations

from shared_embeddings.utils.command_line import explain, run_module
from shared_embeddings.utils.files import first_line
from shared_embeddings.utils.interrupts import RESUME
from shared_embeddings.utils.peers import lost_group


def prepare() -> None:
    """Convert texts to token files and a vocabulary."""
    run_module("lm_prepare", "lm.data.prepare", _explain)


def train() -> None:
    """Train a language model, or resume its training."""
    run_module("lm_train", "lm.train.command", _explain, RESUME)


def evaluate() -> None:
    """Compute the perplexity of a trained model."""
    run_module("lm_eval", "lm.evaluate.command", _explain)


def generate() -> None:
    """Generate text with a trained model."""
    run_module("lm_generate", "lm.evaluate.generate", _explain)


def _explain(error: BaseException) -> str | None:
    """The one-line message of a user error; None for other errors."""
    line = lost_group(error) or explain(error)
    if line is not None or not isinstance(error, RuntimeError):
        return line
    # Slow to import.
    from torch._dynamo.exc import BackendCompilerFailed

    if isinstance(error, BackendCompilerFailed):
        reason = first_line(error.inner_exception)
        return f"compile: torch cannot compile here ({reason}); install what is missing or remove compile"
    return None
