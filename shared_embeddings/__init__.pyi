# Written by `make stubs`; do not edit.
# ruff: noqa
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from torch import Tensor

from shared_embeddings.embedding import SharedEmbedding as SharedEmbedding
from shared_embeddings.fitting.fit import FitReport as FitReport
from shared_embeddings.layers.dropout import set_updates as set_updates
from shared_embeddings.options import STORED as STORED, OptionError as OptionError
from shared_embeddings.registry import file_options as file_options, methods as methods, num_parameters as num_parameters, options as options
from shared_embeddings.sizing import accounting as accounting
from shared_embeddings.methods.adaptive import AdaptiveEmbedding
from shared_embeddings.methods.adaptive import AdaptiveOptions as AdaptiveOptions
from shared_embeddings.methods.alone import AloneEmbedding
from shared_embeddings.methods.alone import AloneOptions as AloneOptions
from shared_embeddings.methods.compositional_code import CompositionalCodeEmbedding
from shared_embeddings.methods.compositional_code import CompositionalCodeOptions as CompositionalCodeOptions
from shared_embeddings.methods.define import DefineEmbedding
from shared_embeddings.methods.define import DefineOptions as DefineOptions
from shared_embeddings.methods.funnel import FunnelEmbedding
from shared_embeddings.methods.funnel import FunnelOptions as FunnelOptions
from shared_embeddings.methods.group_reduce import GroupReduceEmbedding
from shared_embeddings.methods.group_reduce import GroupReduceOptions as GroupReduceOptions
from shared_embeddings.methods.projective import ProjectiveEmbedding
from shared_embeddings.methods.projective import ProjectiveOptions as ProjectiveOptions
from shared_embeddings.methods.quantized import QuantizedEmbedding
from shared_embeddings.methods.quantized import QuantizedOptions as QuantizedOptions
from shared_embeddings.methods.standard import StandardEmbedding
from shared_embeddings.methods.standard import StandardOptions as StandardOptions
from shared_embeddings.methods.structured import StructuredEmbedding
from shared_embeddings.methods.structured import StructuredOptions as StructuredOptions
from shared_embeddings.methods.tensor_train import TensorTrainEmbedding
from shared_embeddings.methods.tensor_train import TensorTrainOptions as TensorTrainOptions
from shared_embeddings.methods.uncle import UncleEmbedding
from shared_embeddings.methods.uncle import UncleOptions as UncleOptions

__version__: str

@overload
def build(
    method: Literal["adaptive"], *, num_embeddings: int, embedding_dim: int, padding_idx: int | None = ...,
    words: Sequence[str] | None = ..., output_bias: bool = ..., cutoffs: Sequence[int], factor: int = ...,
    width: int | None = ..., head_projection: Literal['none', 'input', 'both'] = ...,
    score_dim: int | None = ..., tie: Literal['all', 'tables', 'none'] = ...,
    output: Literal['adaptive', 'none'] = ..., map: str | None = ..., map_options: Mapping[str, Any] = ...,
) -> AdaptiveEmbedding: ...
@overload
def build(
    method: Literal["alone"], *, num_embeddings: int, embedding_dim: int, padding_idx: int | None = ...,
    words: Sequence[str] | None = ..., output_bias: bool = ..., hidden_dim: int,
    filter: Literal['real', 'binary'] = ..., base_dim: int | None = ..., codebooks: int = ...,
    codebook_size: int = ..., zero_probability: float | None = ..., train_base: bool = ...,
    relu_dropout: float = ..., relu_dropout_steps: int | None = ..., seed: int = ...,
) -> AloneEmbedding: ...
@overload
def build(
    method: Literal["compositional_code"], *, num_embeddings: int, embedding_dim: int,
    padding_idx: int | None = ..., words: Sequence[str] | None = ..., output_bias: bool = ...,
    num_codebooks: int = ..., codebook_size: int = ..., seed: int = ...,
) -> CompositionalCodeEmbedding: ...
@overload
def build(
    method: Literal["define"], *, num_embeddings: int, embedding_dim: int, padding_idx: int | None = ...,
    words: Sequence[str] | None = ..., output_bias: bool = ..., map_dim: int, expand_dim: int, depth: int,
    unit: Literal['paper', 'delight'] = ..., max_groups: int | None = ...,
    transform: Literal['hgt', 'glt', 'linear'] = ..., shuffle: bool = ...,
    connection: Literal['mixer', 'skip', 'residual', 'none'] = ..., reduce: bool = ..., map: str = ...,
    output: Literal['map', 'table', 'none'] = ..., output_projection: bool = ...,
    map_options: Mapping[str, Any] = ...,
) -> DefineEmbedding: ...
@overload
def build(
    method: Literal["funnel"], *, num_embeddings: int, embedding_dim: int, padding_idx: int | None = ...,
    words: Sequence[str] | None = ..., output_bias: bool = ..., rank: int,
    activation: Literal['relu', 'gelu', 'tanh'] = ...,
) -> FunnelEmbedding: ...
@overload
def build(
    method: Literal["group_reduce"], *, num_embeddings: int, embedding_dim: int,
    padding_idx: int | None = ..., words: Sequence[str] | None = ..., output_bias: bool = ...,
    num_groups: int | None = ..., min_rank: int | None = ..., max_rank: int | None = ...,
    num_parameters: int | None = ..., activation: Literal['relu', 'gelu', 'tanh'] | None = ...,
    group_sizes: Sequence[int] | None = ..., ranks: Sequence[int] | None = ...,
) -> GroupReduceEmbedding: ...
@overload
def build(
    method: Literal["projective"], *, num_embeddings: int, embedding_dim: int,
    padding_idx: int | None = ..., words: Sequence[str] | None = ..., output_bias: bool = ..., rank: int,
) -> ProjectiveEmbedding: ...
@overload
def build(
    method: Literal["quantized"], *, num_embeddings: int, embedding_dim: int, padding_idx: int | None = ...,
    words: Sequence[str] | None = ..., output_bias: bool = ..., bits: float,
    codec: Literal['uniform', 'lloyd_max', 'residual', 'trellis', 'principal', 'spectral'] = ...,
    group_size: int = ..., count_exponent: float = ..., seed: int = ...,
    words_per_width: Sequence[int] = ..., directions: Sequence[int] = ...,
) -> QuantizedEmbedding: ...
@overload
def build(
    method: Literal["standard"], *, num_embeddings: int, embedding_dim: int, padding_idx: int | None = ...,
    words: Sequence[str] | None = ..., output_bias: bool = ...,
) -> StandardEmbedding: ...
@overload
def build(
    method: Literal["structured"], *, num_embeddings: int, embedding_dim: int,
    padding_idx: int | None = ..., words: Sequence[str] | None = ..., output_bias: bool = ...,
    num_groups: int, num_clusters: int, seed: int = ...,
) -> StructuredEmbedding: ...
@overload
def build(
    method: Literal["tensor_train"], *, num_embeddings: int, embedding_dim: int,
    padding_idx: int | None = ..., words: Sequence[str] | None = ..., output_bias: bool = ...,
    vocab_shape: Sequence[int], dim_shape: Sequence[int], rank: int | Sequence[int],
) -> TensorTrainEmbedding: ...
@overload
def build(
    method: Literal["uncle"], *, num_embeddings: int, embedding_dim: int, padding_idx: int | None = ...,
    words: Sequence[str] | None = ..., output_bias: bool = ..., unique_dim: int,
    num_classes: int | Sequence[int] | None = ...,
    classes: str | Sequence[int] | Sequence[str | Sequence[int]] | None = ..., random_classes: bool = ...,
    seed: int = ..., class_dims: Sequence[int] | None = ...,
) -> UncleEmbedding: ...
@overload
def build(
    method: str, *, num_embeddings: int, embedding_dim: int, padding_idx: int | None = ...,
    words: Sequence[str] | None = ..., **options: object,
) -> SharedEmbedding: ...

@overload
def fit(
    method: Literal["adaptive"], teacher: Tensor, *, token_counts: Tensor | None = ...,
    padding_idx: int | None = ..., words: Sequence[str] | None = ..., seed: int = ...,
    steps: int | None = ..., learning_rate: float = ..., progress: bool = ..., output_bias: bool = ...,
    cutoffs: Sequence[int], factor: int = ..., width: int | None = ...,
    head_projection: Literal['none', 'input', 'both'] = ..., score_dim: int | None = ...,
    tie: Literal['all', 'tables', 'none'] = ..., output: Literal['adaptive', 'none'] = ...,
    map: str | None = ..., map_options: Mapping[str, Any] = ...,
) -> tuple[AdaptiveEmbedding, FitReport]: ...
@overload
def fit(
    method: Literal["alone"], teacher: Tensor, *, token_counts: Tensor | None = ...,
    padding_idx: int | None = ..., words: Sequence[str] | None = ..., seed: int = ...,
    steps: int | None = ..., learning_rate: float = ..., progress: bool = ..., output_bias: bool = ...,
    hidden_dim: int, filter: Literal['real', 'binary'] = ..., base_dim: int | None = ...,
    codebooks: int = ..., codebook_size: int = ..., zero_probability: float | None = ...,
    train_base: bool = ..., relu_dropout: float = ..., relu_dropout_steps: int | None = ...,
) -> tuple[AloneEmbedding, FitReport]: ...
@overload
def fit(
    method: Literal["compositional_code"], teacher: Tensor, *, token_counts: Tensor | None = ...,
    padding_idx: int | None = ..., words: Sequence[str] | None = ..., seed: int = ...,
    steps: int | None = ..., learning_rate: float = ..., progress: bool = ..., output_bias: bool = ...,
    num_codebooks: int = ..., codebook_size: int = ...,
) -> tuple[CompositionalCodeEmbedding, FitReport]: ...
@overload
def fit(
    method: Literal["define"], teacher: Tensor, *, token_counts: Tensor | None = ...,
    padding_idx: int | None = ..., words: Sequence[str] | None = ..., seed: int = ...,
    steps: int | None = ..., learning_rate: float = ..., progress: bool = ..., output_bias: bool = ...,
    map_dim: int, expand_dim: int, depth: int, unit: Literal['paper', 'delight'] = ...,
    max_groups: int | None = ..., transform: Literal['hgt', 'glt', 'linear'] = ..., shuffle: bool = ...,
    connection: Literal['mixer', 'skip', 'residual', 'none'] = ..., reduce: bool = ..., map: str = ...,
    output: Literal['map', 'table', 'none'] = ..., output_projection: bool = ...,
    map_options: Mapping[str, Any] = ...,
) -> tuple[DefineEmbedding, FitReport]: ...
@overload
def fit(
    method: Literal["funnel"], teacher: Tensor, *, token_counts: Tensor | None = ...,
    padding_idx: int | None = ..., words: Sequence[str] | None = ..., seed: int = ...,
    steps: int | None = ..., learning_rate: float = ..., progress: bool = ..., output_bias: bool = ...,
    rank: int, activation: Literal['relu', 'gelu', 'tanh'] = ...,
) -> tuple[FunnelEmbedding, FitReport]: ...
@overload
def fit(
    method: Literal["group_reduce"], teacher: Tensor, *, token_counts: Tensor | None = ...,
    padding_idx: int | None = ..., words: Sequence[str] | None = ..., seed: int = ...,
    steps: int | None = ..., learning_rate: float = ..., progress: bool = ..., output_bias: bool = ...,
    num_groups: int | None = ..., min_rank: int | None = ..., max_rank: int | None = ...,
    num_parameters: int | None = ..., activation: Literal['relu', 'gelu', 'tanh'] | None = ...,
    group_sizes: Sequence[int] | None = ..., ranks: Sequence[int] | None = ...,
) -> tuple[GroupReduceEmbedding, FitReport]: ...
@overload
def fit(
    method: Literal["projective"], teacher: Tensor, *, token_counts: Tensor | None = ...,
    padding_idx: int | None = ..., words: Sequence[str] | None = ..., seed: int = ...,
    steps: int | None = ..., learning_rate: float = ..., progress: bool = ..., output_bias: bool = ...,
    rank: int,
) -> tuple[ProjectiveEmbedding, FitReport]: ...
@overload
def fit(
    method: Literal["quantized"], teacher: Tensor, *, token_counts: Tensor | None = ...,
    padding_idx: int | None = ..., words: Sequence[str] | None = ..., seed: int = ...,
    steps: int | None = ..., learning_rate: float = ..., progress: bool = ..., output_bias: bool = ...,
    bits: float,
    codec: Literal['uniform', 'lloyd_max', 'residual', 'trellis', 'principal', 'spectral'] = ...,
    group_size: int = ..., count_exponent: float = ..., words_per_width: Sequence[int] = ...,
    directions: Sequence[int] = ...,
) -> tuple[QuantizedEmbedding, FitReport]: ...
@overload
def fit(
    method: Literal["standard"], teacher: Tensor, *, token_counts: Tensor | None = ...,
    padding_idx: int | None = ..., words: Sequence[str] | None = ..., seed: int = ...,
    steps: int | None = ..., learning_rate: float = ..., progress: bool = ..., output_bias: bool = ...,
) -> tuple[StandardEmbedding, FitReport]: ...
@overload
def fit(
    method: Literal["structured"], teacher: Tensor, *, token_counts: Tensor | None = ...,
    padding_idx: int | None = ..., words: Sequence[str] | None = ..., seed: int = ...,
    steps: int | None = ..., learning_rate: float = ..., progress: bool = ..., output_bias: bool = ...,
    num_groups: int, num_clusters: int,
) -> tuple[StructuredEmbedding, FitReport]: ...
@overload
def fit(
    method: Literal["tensor_train"], teacher: Tensor, *, token_counts: Tensor | None = ...,
    padding_idx: int | None = ..., words: Sequence[str] | None = ..., seed: int = ...,
    steps: int | None = ..., learning_rate: float = ..., progress: bool = ..., output_bias: bool = ...,
    vocab_shape: Sequence[int], dim_shape: Sequence[int], rank: int | Sequence[int],
) -> tuple[TensorTrainEmbedding, FitReport]: ...
@overload
def fit(
    method: Literal["uncle"], teacher: Tensor, *, token_counts: Tensor | None = ...,
    padding_idx: int | None = ..., words: Sequence[str] | None = ..., seed: int = ...,
    steps: int | None = ..., learning_rate: float = ..., progress: bool = ..., output_bias: bool = ...,
    unique_dim: int, num_classes: int | Sequence[int] | None = ...,
    classes: str | Sequence[int] | Sequence[str | Sequence[int]] | None = ..., random_classes: bool = ...,
    class_dims: Sequence[int] | None = ...,
) -> tuple[UncleEmbedding, FitReport]: ...
@overload
def fit(
    method: str, teacher: Tensor, *, token_counts: Tensor | None = ..., padding_idx: int | None = ...,
    words: Sequence[str] | None = ..., seed: int = ..., steps: int | None = ..., learning_rate: float = ...,
    progress: bool = ..., **options: object,
) -> tuple[SharedEmbedding, FitReport]: ...
