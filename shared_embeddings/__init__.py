"""Word embeddings with few parameters, for the input and the output of a model, behind one interface."""

import shared_embeddings.utils.early_signals  # noqa: F401  # before all that takes seconds to import

# isort: split
import shared_embeddings.methods  # noqa: F401  # before the function of the same name below
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.fitting.fit import FitReport, fit
from shared_embeddings.layers.dropout import set_updates
from shared_embeddings.options import STORED, OptionError
from shared_embeddings.registry import build, expected_count, file_options, methods, options
from shared_embeddings.sizing import accounting

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
