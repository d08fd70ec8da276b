"""OpenNMT-py with shared embeddings: translation and summarization under OpenNMT-py's own commands.

All functions raise `UserError` for what a user can put right; docstrings name other errors only.
"""

from __future__ import annotations

import warnings

import shared_embeddings  # noqa: F401  # first: it handles signals while the rest is imported
from nmt.vocabulary import provide_missing_packages

# OpenNMT-py calls functions that newer releases of torch deprecate.
warnings.filterwarnings("ignore", category=FutureWarning, module="onmt")
warnings.filterwarnings("ignore", message=".*nested tensor.*", module="torch")
warnings.filterwarnings("ignore", message=".*sdp_kernel", category=FutureWarning)

provide_missing_packages()  # in every process, before anything imports onmt
