"""The public names of `shared_embeddings`, which imports this module when one of them is used."""

from shared_embeddings import accounting
from shared_embeddings.compress.fit import FitReport, fit
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.modules.adaptive import AdaptiveOptions
from shared_embeddings.modules.alone import AloneOptions
from shared_embeddings.modules.compositional_code import CompositionalCodeOptions
from shared_embeddings.modules.define import DefineOptions
from shared_embeddings.modules.funnel import FunnelOptions
from shared_embeddings.modules.group_reduce import GroupReduceOptions
from shared_embeddings.modules.projective import ProjectiveOptions
from shared_embeddings.modules.quantized import QuantizedOptions
from shared_embeddings.modules.standard import StandardOptions
from shared_embeddings.modules.structured import StructuredOptions
from shared_embeddings.modules.tensor_train import TensorTrainOptions
from shared_embeddings.modules.uncle import UncleOptions
from shared_embeddings.nn.layers import set_updates
from shared_embeddings.registry import build, get_method_config, methods, num_parameters
from shared_embeddings.spec import EmbeddingOptions
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
    "accounting",
    "build",
    "fit",
    "methods",
    "num_parameters",
    "get_method_config",
    "set_updates",
]
