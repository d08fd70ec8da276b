"""The commands ``lm_prepare``, ``lm_train``, ``lm_eval`` and ``lm_generate``.

A mistake of the user gives one line on stderr and exit code 2; set ``LM_TRACEBACK=1`` to see where it was
found.
"""

from __future__ import annotations

import importlib
import os
import sys

import torch
import yaml

import shared_embeddings as se
from lm.errors import UserError
from shared_embeddings.command_line import UNREAD, USER_ERROR, complaint, drop_output
from shared_embeddings.download import DownloadError
from shared_embeddings.files import first_line

USER_ERRORS = (UserError, DownloadError, se.OptionError, OSError, yaml.YAMLError)


def prepare() -> None:
    """Turn texts into token files and a vocabulary."""
    _run("lm_prepare", "lm.prepare")


def train() -> None:
    """Train a language model, or go on training it."""
    _run("lm_train", "lm.train")


def evaluate() -> None:
    """Measure the perplexity of a trained model."""
    _run("lm_eval", "lm.evaluate")


def generate() -> None:
    """Write text with a trained model."""
    _run("lm_generate", "lm.generate")


def _run(command: str, module: str) -> None:
    """Call ``main(arguments)`` of a module.

    Exit with 2 after a user's mistake, with 130 when interrupted, with 141 when nobody reads the output.
    """
    try:
        importlib.import_module(module).main(sys.argv[1:])
    except BrokenPipeError:
        drop_output()
        sys.exit(UNREAD)
    except (*USER_ERRORS, MemoryError, RuntimeError, UnicodeEncodeError) as error:
        message = _message(error)
        if message is None or os.environ.get("LM_TRACEBACK"):
            raise
        print(f"{command}: {message}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        print(f"{command}: interrupted; run the same command again to go on", file=sys.stderr)
        sys.exit(130)


def _message(error: Exception) -> str | None:
    """What a user is told about an error; None where it is no mistake of the user's."""
    if isinstance(error, USER_ERRORS):
        return complaint(error)
    if isinstance(error, UnicodeEncodeError):
        odd = error.object[error.start : error.end]
        return f"the output's encoding {error.encoding} has no {odd!r}; set PYTHONIOENCODING=utf-8"
    # On a CPU torch has no class of its own for it.
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        return f"not enough memory ({first_line(error)}); make batches, segments or the model smaller"
    # Slow to import, and there only when something is compiled.
    from torch._dynamo.exc import BackendCompilerFailed

    if isinstance(error, BackendCompilerFailed):
        reason = first_line(error.inner_exception)
        return f"compile: torch cannot compile here ({reason}); install what it lacks, or leave compile out"
    return None
