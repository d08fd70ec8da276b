"""AWD-LSTM (Merity et al., 2018: Regularizing and optimizing LSTM language models), and DeFINE's LSTM.

Axes: ``B`` batch, ``T`` time, ``V`` vocabulary, ``D`` width of the word vectors, ``I`` and ``H`` widths of a
layer's input and output, ``S`` score_dim. Inside the model, everything is time first, the layout of the LSTM
kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from itertools import pairwise

import torch
from torch import Tensor, nn

import shared_embeddings as se
from lm.models import LanguageModel, Output, State
from shared_embeddings.nn.layers import keep_mask
from shared_embeddings.utils.options import option

# A dropped matrix is not in the parameters' chunk of memory, so cuDNN copies the weights of a layer for every
# segment, which is cheap compared to the matrix products.
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")


@dataclasses.dataclass(frozen=True)
class AWDLSTMOptions:
    """Options of `awd_lstm`; defaults are the paper's for the Penn Treebank."""

    embedding_dim: int = option("D, the width of the word vectors.", 400, minimum=1)
    hidden_dim: int = option(
        "width of all layers but the last, whose width is the embedding's score_dim.", 1150, minimum=1
    )
    num_layers: int = option("number of LSTM layers.", 3, minimum=1)
    embedding_dropout: float = option(
        "probability of dropping a word type from the whole batch.", 0.1, minimum=0, below=1
    )
    input_dropout: float = option("variational dropout of the word vectors.", 0.4, minimum=0, below=1)
    hidden_dropout: float = option("variational dropout between layers.", 0.3, minimum=0, below=1)
    output_dropout: float = option(
        "variational dropout of the last layer's outputs.", 0.4, minimum=0, below=1
    )
    weight_drop: float = option(
        "DropConnect of the recurrent matrices, one mask per segment.", 0.5, minimum=0, below=1
    )
    ar_weight: float = option(
        "alpha, weight of activation regularization: the mean square of the dropped outputs.", 2.0, minimum=0
    )
    tar_weight: float = option(
        "beta, weight of temporal activation regularization: the mean square of the differences between "
        "successive outputs.",
        1.0,
        minimum=0,
    )


class LSTMLayer(nn.LSTM):
    """One LSTM layer, time first, with DropConnect of its recurrent matrix in training (section 2).

    The dropped matrix is passed to the kernel in place of the parameter, which gets its gradient through it.
    Parameters, their initialization and their memory layout on GPUs are those of ``nn.LSTM``, which
    ``torch.compile`` does not trace either. Under autocast on CPUs without a bfloat16 kernel, the layer runs
    in the precision of its parameters.
    """

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    bias_ih_l0: Tensor
    bias_hh_l0: Tensor

    def __init__(self, input_dim: int, hidden_dim: int, weight_drop: float) -> None:
        super().__init__(input_dim, hidden_dim)
        self.weight_drop = weight_drop

    def forward(  # type: ignore[override]
        self, inputs: Tensor, hidden: Tensor, cell: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs ``(T, B, H)`` for `inputs` ``(T, B, I)``, and the hidden and cell state ``(1, B, H)``."""
        if inputs.is_cpu and torch.is_autocast_enabled("cpu") and not cpu_has_bf16():
            dtype = self.weight_hh_l0.dtype
            with torch.autocast("cpu", enabled=False):
                return self.forward(inputs.to(dtype), hidden.to(dtype), cell.to(dtype))
        recurrent = self.weight_hh_l0
        if self.training and self.weight_drop > 0.0:
            recurrent = recurrent * keep_mask(recurrent, recurrent.shape, self.weight_drop)
        weights = [self.weight_ih_l0, recurrent, self.bias_ih_l0, self.bias_hh_l0]
        return torch.lstm(
            inputs,
            (hidden, cell),
            weights,
            has_biases=True,
            num_layers=1,
            dropout=0.0,
            train=torch.is_grad_enabled(),  # whether to store what the backward pass needs
            bidirectional=False,
            batch_first=False,
        )


@functools.cache
def cpu_has_bf16() -> bool:
    """Whether oneDNN computes in bfloat16 on this CPU (AVX-512).

    Elsewhere its LSTM raises an error, and its products are slow.
    """
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class AWDLSTM(LanguageModel, kind="awd_lstm", options_class=AWDLSTMOptions):
    """LSTM layers D -> hidden_dim -> ... -> S between the embedding and the softmax.

    The state holds the hidden and cell state ``(1, B, H)`` of each layer in order.
    """

    options: AWDLSTMOptions

    def __init__(self, embedding: se.SharedEmbedding, options: AWDLSTMOptions) -> None:
        super().__init__(embedding, options)
        inner = [options.hidden_dim] * (options.num_layers - 1)
        widths = [options.embedding_dim, *inner, embedding.score_dim]
        self.layers = nn.ModuleList(
            LSTMLayer(inputs, outputs, options.weight_drop) for inputs, outputs in pairwise(widths)
        )

    def reset_parameters(self) -> None:
        """Initialize the layers as ``nn.LSTM`` does, and the embedding by its own rule."""
        for layer in self.layers:
            layer.reset_parameters()  # type: ignore[operator]
        self.embedding.reset_parameters()

    def initial_layers(self, batch_size: int) -> State:
        """Zeros."""
        like: Tensor = self.layers[0].weight_hh_l0  # type: ignore[assignment]
        widths = [int(layer.hidden_size) for layer in self.layers for _ in ("hidden", "cell")]  # type: ignore[arg-type]
        return tuple(like.new_zeros(1, batch_size, width) for width in widths)

    def read(self, ids: Tensor, added: Tensor | None, state: State) -> Output:
        """See the base class; the penalty is AR + TAR of the last layer.

        Raises:
            ValueError: the state is of another batch size; torch's kernel would write outside of its memory.
        """
        if state[0].size(1) != ids.size(0):
            raise ValueError(
                f"the state is of {state[0].size(1)} texts, but ids are of {ids.size(0)}; use ids of shape "
                "(batch, time) and initial_state(batch)"
            )
        options, training, ids = self.options, self.training, ids.t()
        vectors = self.embedding(ids)  # (T, B, D)
        if training and options.embedding_dropout > 0.0:
            # A dropped word type is zero at all its positions in the batch (section 4.3).
            types = (self.embedding.num_embeddings, 1)
            vectors = vectors * keep_mask(vectors, types, options.embedding_dropout)[ids]
        if added is not None:
            vectors = vectors + added.transpose(0, 1)
        dropped = locked_dropout(vectors, options.input_dropout, training)
        rates = [options.hidden_dropout] * (len(self.layers) - 1) + [options.output_dropout]
        after: list[Tensor] = []
        for layer, rate, hidden, cell in zip(self.layers, rates, state[0::2], state[1::2], strict=True):
            outputs, *layer_state = layer(dropped, hidden, cell)
            after += [part.detach() for part in layer_state]
            dropped = locked_dropout(outputs, rate, training)
        penalty = torch.zeros((), device=outputs.device)
        if training and options.ar_weight > 0.0:
            # A mean as in the authors' code; the paper has an L2 norm.
            penalty = penalty + options.ar_weight * dropped.float().square().mean()
        if training and options.tar_weight > 0.0 and len(outputs) > 1:
            penalty = penalty + options.tar_weight * outputs.float().diff(dim=0).square().mean()
        return Output(dropped.transpose(0, 1), tuple(after), penalty)


@dataclasses.dataclass(frozen=True)
class LSTMOptions(AWDLSTMOptions):
    """Options of `lstm`, the model of DeFINE (Mehta et al., 2020) for WikiText-103, Tables 1a and 9.

    Those of `awd_lstm` with other defaults. Dropout as in Merity et al. (2018), An analysis of neural
    language modeling at multiple scales: 0.1, without embedding dropout, weight drop, AR and TAR.
    """

    embedding_dim: int = 256
    hidden_dim: int = 1024
    num_layers: int = 4
    embedding_dropout: float = 0.0
    input_dropout: float = 0.1
    hidden_dropout: float = 0.1
    output_dropout: float = 0.1
    weight_drop: float = 0.0
    ar_weight: float = 0.0
    tar_weight: float = 0.0


class LSTM(AWDLSTM, kind="lstm", options_class=LSTMOptions):
    """LSTM layers D -> 1024 -> 1024 -> 1024 -> S by default."""


def locked_dropout(inputs: Tensor, probability: float, training: bool) -> Tensor:
    """`inputs` ``(T, B, D)`` with one mask ``(B, D)`` for all time steps (section 4.2)."""
    if probability == 0.0 or not training:
        return inputs
    return inputs * keep_mask(inputs, (1, *inputs.shape[1:]), probability)
