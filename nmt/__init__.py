"""OpenNMT-py with shared embeddings: translation and summarization under OpenNMT's own commands."""

from __future__ import annotations

import warnings

import shared_embeddings  # noqa: F401  # first: it reports signals while the rest is imported
from nmt.data.vocabulary import provide_missing_packages

# Upstream uses names that newer torch releases call differently; nobody but upstream can act on that.
warnings.filterwarnings("ignore", category=FutureWarning, module="onmt")
warnings.filterwarnings("ignore", message=".*nested tensor.*", module="torch")

provide_missing_packages()  # before anything imports onmt, in every process

from nmt.checkpoint.checkpoint import describe_checkpoint  # noqa: E402
from shared_embeddings.errors import UserError  # noqa: E402

__all__ = ["UserError", "describe_checkpoint"]
