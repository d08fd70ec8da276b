"""Word embeddings with few parameters, for the input and the output of a model, behind one interface.

The options dataclass of every method is here by its name, such as ``FunnelOptions``. ``__init__.pyi``
describes all names to editors and type checkers; ``make stubs`` writes it.
"""

import shared_embeddings.utils.early_signals  # noqa: F401  # before all that takes seconds to import

# isort: split
import shared_embeddings.methods  # noqa: F401  # before the function of the same name below
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.fitting.fit import FitReport, fit
from shared_embeddings.layers.dropout import set_updates
from shared_embeddings.options import STORED, OptionError
from shared_embeddings.registry import build, file_options, methods, num_parameters, options
from shared_embeddings.sizing import accounting

__all__ = [
    "STORED",
    "FitReport",
    "OptionError",
    "SharedEmbedding",
    "__version__",
    "accounting",
    "build",
    "num_parameters",
    "file_options",
    "fit",
    "methods",
    "options",
    "set_updates",
]


def __getattr__(name: str) -> object:
    """The version, or the options dataclass of a method."""
    if name == "__version__":
        from importlib.metadata import version

        return version("shared-embeddings")
    for option_class in map(options, methods()):
        if option_class.__name__ == name:
            return option_class
    raise AttributeError(f"module 'shared_embeddings' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, without the modules that Python adds when they are imported."""
    return sorted([*__all__, *(options(method).__name__ for method in methods())])
