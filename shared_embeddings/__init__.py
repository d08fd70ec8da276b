"""Word embeddings with few parameters, for the input and the output of a model, behind one interface."""

import shared_embeddings.early_signals  # noqa: F401  # before all that takes seconds to import
import shared_embeddings.methods  # noqa: F401  # first, so that the function below keeps the name
from shared_embeddings import accounting
from shared_embeddings.dropout import set_updates
from shared_embeddings.fitting import FitReport, fit
from shared_embeddings.interface import SharedEmbedding
from shared_embeddings.options import STORED, OptionError
from shared_embeddings.registry import build, expected_count, file_options, methods, options

__all__ = [
    "STORED",
    "FitReport",
    "OptionError",
    "SharedEmbedding",
    "accounting",
    "build",
    "expected_count",
    "file_options",
    "fit",
    "methods",
    "options",
    "set_updates",
]
