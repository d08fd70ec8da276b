"""OpenNMT-py with shared embeddings: translation and summarization under OpenNMT's own commands."""

from __future__ import annotations

from nmt.vocabulary import provide_missing_packages

provide_missing_packages()  # before anything imports onmt, in every process

from nmt.checkpoint import describe_checkpoint  # noqa: E402
from nmt.errors import UserError  # noqa: E402

__all__ = ["UserError", "describe_checkpoint"]
