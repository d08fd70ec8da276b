"""The commands ``lm_prepare``, ``lm_train``, ``lm_evaluate`` and ``lm_generate``.

See `shared_embeddings.utils.command_line.run` for their errors and exit statuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared_embeddings.utils.command_line import RESUME, explain, run
from shared_embeddings.utils.errors import UserError, first_line

if TYPE_CHECKING:
    import torch


def prepare() -> int:
    """Convert texts to token files and a vocabulary."""
    return run("lm_prepare", "lm.data.prepare:main")


def train() -> int:
    """Train a language model, or resume its training."""
    return run("lm_train", "lm.train.command:main", explain=_explain, advice=RESUME)


def evaluate() -> int:
    """Compute the perplexity of a trained model."""
    return run("lm_evaluate", "lm.evaluation:main")


def generate() -> int:
    """Generate text with a trained model."""
    return run("lm_generate", "lm.generation:main")


def _explain(error: BaseException) -> str | None:
    """Return the one-line message of a user error; None for other errors."""
    line = explain(error)
    if line is None and isinstance(error, RuntimeError):
        from torch._dynamo.exc import BackendCompilerFailed  # slow to import

        if isinstance(error, BackendCompilerFailed):
            reason = first_line(error.inner_exception)
            return f"compile: torch cannot compile here ({reason}); install what is missing or remove compile"
    return line


def chosen_device(name: str, rank: int = 0) -> torch.device:
    """Resolve ``auto`` (CUDA if available), ``cpu`` or ``cuda`` for the process of a rank on this machine.

    Raises:
        UserError: there is no such CUDA device.
    """
    import torch  # slow to import

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    if rank >= available:
        raise UserError(
            f"device is {name}, but torch finds {available} CUDA devices for local rank {rank}; set it to cpu"
            + (" or start fewer processes" if available else "")
        )
    return torch.device("cuda", rank)
