"""Word embeddings with few parameters, for the input and the output of a model, behind one interface.

The options dataclass of every method is here by its name, such as ``FunnelOptions``.
"""

import shared_embeddings.utils.interrupts  # noqa: F401  # before all that takes seconds to import

# isort: split
import shared_embeddings.methods  # noqa: F401  # before the function of the same name below
from shared_embeddings import accounting
from shared_embeddings.compress.fit import FitReport, fit
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.methods.adaptive import AdaptiveOptions
from shared_embeddings.methods.alone import AloneOptions
from shared_embeddings.methods.compositional_code import CompositionalCodeOptions
from shared_embeddings.methods.define import DefineOptions
from shared_embeddings.methods.funnel import FunnelOptions
from shared_embeddings.methods.group_reduce import GroupReduceOptions
from shared_embeddings.methods.projective import ProjectiveOptions
from shared_embeddings.methods.quantized import QuantizedOptions
from shared_embeddings.methods.standard import StandardOptions
from shared_embeddings.methods.structured import StructuredOptions
from shared_embeddings.methods.tensor_train import TensorTrainOptions
from shared_embeddings.methods.uncle import UncleOptions
from shared_embeddings.registry import build, methods, num_parameters, options
from shared_embeddings.spec import EmbeddingOptions
from shared_embeddings.utils.layers import set_updates
from shared_embeddings.utils.options import STORED, OptionError

__all__ = [
    "STORED",
    "AdaptiveOptions",
    "AloneOptions",
    "CompositionalCodeOptions",
    "DefineOptions",
    "EmbeddingOptions",
    "FitReport",
    "FunnelOptions",
    "GroupReduceOptions",
    "OptionError",
    "ProjectiveOptions",
    "QuantizedOptions",
    "SharedEmbedding",
    "StandardOptions",
    "StructuredOptions",
    "TensorTrainOptions",
    "UncleOptions",
    "__version__",
    "accounting",
    "build",
    "fit",
    "methods",
    "num_parameters",
    "options",
    "set_updates",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("shared-embeddings")
    raise AttributeError(f"module 'shared_embeddings' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, without the modules that Python adds when they are imported."""
    return sorted(__all__)
