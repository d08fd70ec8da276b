"""The commands ``lm_prepare``, ``lm_train``, ``lm_evaluate`` and ``lm_generate``.

See `shared_embeddings.utils.command_line.run` for their errors and exit statuses.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shared_embeddings.utils.command_line import explain, lost_group, run_module
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import first_line
from shared_embeddings.utils.interrupts import RESUME

if TYPE_CHECKING:
    import torch

HELPS = Path(__file__).with_name("help")  # written by ``make readme``


def prepare() -> None:
    """Convert texts to token files and a vocabulary."""
    run_module("lm_prepare", "lm.data.prepare:main", HELPS, _explain)


def train() -> None:
    """Train a language model, or resume its training."""
    run_module("lm_train", "lm.train.command:main", HELPS, _explain, RESUME)


def evaluate() -> None:
    """Compute the perplexity of a trained model."""
    run_module("lm_evaluate", "lm.evaluate.command:main", HELPS, _explain)


def generate() -> None:
    """Generate text with a trained model."""
    run_module("lm_generate", "lm.evaluate.generate:main", HELPS, _explain)


def _explain(error: BaseException) -> str | None:
    """The one-line message of a user error; None for other errors."""
    line = lost_group(error) or explain(error)
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


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option -device, see `chosen_device`."""
    parser.add_argument(
        "-device", choices=("auto", "cpu", "cuda"), default="auto", help="device (default: auto)"
    )
