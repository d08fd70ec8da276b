"""The commands ``lm_prepare``, ``lm_train``, ``lm_eval`` and ``lm_generate``.

A mistake of the user gives one line on stderr and exit code 2; set ``LM_TRACEBACK=1`` to see where it was
found.
"""

from __future__ import annotations

import importlib
import os
import sys

import yaml

import shared_embeddings as se
from lm.errors import UserError
from shared_embeddings.download import DownloadError

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
    """Call ``main(arguments)`` of a module; exit with 2 after a user's mistake, with 130 when interrupted."""
    try:
        importlib.import_module(module).main(sys.argv[1:])
    except USER_ERRORS as error:
        if os.environ.get("LM_TRACEBACK"):
            raise
        print(f"{command}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{command}: interrupted; run the same command again to go on", file=sys.stderr)
        sys.exit(130)
