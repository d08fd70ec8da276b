"""AWD-LSTM: Merity et al. (2018), Regularizing and optimizing LSTM language models.

Axes: ``B`` batch, ``T`` time, ``I`` and ``H`` widths of a layer's input and output, ``S`` width of the hidden
states that are scored. Inside, everything is time first, as the LSTM kernels want it.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

import shared_embeddings as se
from lm.models.dropout import (
    activation_penalty,
    dropped_weights,
    locked_dropout,
    temporal_penalty,
    word_dropout,
)
from lm.models.interface import LanguageModel, Output, State, register
from shared_embeddings.options import require_at_least, require_layers, require_probability

# A dropped matrix lies elsewhere than the parameters, so cuDNN copies a layer's weights together for each
# segment, which takes little beside the products with them.
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")


@dataclasses.dataclass(frozen=True)
class AWDLSTMOptions:
    """Options of `awd_lstm`; the defaults are those of the paper for the Penn Treebank.

    Attributes:
        embedding_dim: D, the width of the word vectors.
        hidden_dim: the width of all layers but the last, which is as wide as the embedding's scores want it.
        num_layers: the number of LSTM layers.
        dropout_words: the share of word types that a batch does without.
        dropout_input: locked dropout of the word vectors.
        dropout_hidden: locked dropout between layers.
        dropout_output: locked dropout of the last layer's outputs.
        dropout_weights: DropConnect of the recurrent matrices, one mask for a whole segment.
        activation_penalty: alpha, the weight of the mean square of the dropped outputs (AR).
        temporal_penalty: beta, the weight of the mean square of the outputs' steps in time (TAR).
    """

    embedding_dim: int = 400
    hidden_dim: int = 1150
    num_layers: int = 3
    dropout_words: float = 0.1
    dropout_input: float = 0.4
    dropout_hidden: float = 0.3
    dropout_output: float = 0.4
    dropout_weights: float = 0.5
    activation_penalty: float = 2.0
    temporal_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("embedding_dim", "hidden_dim"):
            require_at_least(name, getattr(self, name), 1)
        require_layers("num_layers", self.num_layers)
        for place in ("words", "input", "hidden", "output", "weights"):
            require_probability(f"dropout_{place}", getattr(self, f"dropout_{place}"))
        for name in ("activation_penalty", "temporal_penalty"):
            require_at_least(name, getattr(self, name), 0)


class LSTMLayer(nn.LSTM):
    """One LSTM layer, time first, with DropConnect of its recurrent matrix in training (section 2).

    The dropped matrix is a value of its own, handed to the kernel in place of the parameter; gradients reach
    the parameter through it. Parameters, their first values and their place in a GPU's memory are those of
    ``nn.LSTM``, and like it this module is left out of what ``torch.compile`` takes apart.
    """

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    bias_ih_l0: Tensor
    bias_hh_l0: Tensor

    def __init__(self, input_dim: int, hidden_dim: int, dropout_weights: float) -> None:
        super().__init__(input_dim, hidden_dim)
        self.dropout_weights = dropout_weights

    def initial_state(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Hidden and cell state ``(1, B, H)`` of zeros."""
        shape = 1, batch_size, self.hidden_size
        return self.weight_hh_l0.new_zeros(shape), self.weight_hh_l0.new_zeros(shape)

    def forward(  # type: ignore[override]
        self, inputs: Tensor, hidden: Tensor, cell: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs ``(T, B, H)`` for `inputs` ``(T, B, I)``, and the hidden and cell state ``(1, B, H)``."""
        recurrent = dropped_weights(self.weight_hh_l0, self.dropout_weights, self.training)
        weights = [self.weight_ih_l0, recurrent, self.bias_ih_l0, self.bias_hh_l0]
        # What the kernel calls training is whether it keeps what its backward pass needs.
        keeps_for_backward = torch.is_grad_enabled()
        return torch.lstm(
            inputs,
            (hidden, cell),
            weights,
            has_biases=True,
            num_layers=1,
            dropout=0.0,
            train=keeps_for_backward,
            bidirectional=False,
            batch_first=False,
        )


@register("awd_lstm", AWDLSTMOptions)
class AWDLSTM(LanguageModel):
    """LSTM layers D -> hidden_dim -> ... -> S between a word's vector and the scores of the next one.

    The state holds the hidden and the cell state ``(1, B, H)`` of every layer in turn.
    """

    options: AWDLSTMOptions

    def __init__(self, embedding: se.SharedEmbedding, options: AWDLSTMOptions) -> None:
        super().__init__(embedding, options)
        inner = [options.hidden_dim] * (options.num_layers - 1)
        widths = [options.embedding_dim, *inner, embedding.score_dim]
        self.layers = nn.ModuleList(
            LSTMLayer(inputs, outputs, options.dropout_weights) for inputs, outputs in pairwise(widths)
        )

    def reset_parameters(self) -> None:
        """As in the base class; the layers by torch's default for an LSTM."""
        for layer in self._layers():
            layer.reset_parameters()
        self.embedding.reset_parameters()

    def initial_state(self, batch_size: int) -> State:
        """Zeros."""
        states = [layer.initial_state(batch_size) for layer in self._layers()]
        return tuple(part for state in states for part in state)

    def forward(self, ids: Tensor, state: State) -> Output:
        """As in the base class; the penalty is AR + TAR of the last layer."""
        dropped = self._look_up(ids.t())
        after: list[Tensor] = []
        for layer, rate, hidden, cell in zip(
            self._layers(), self._rates(), state[0::2], state[1::2], strict=True
        ):
            outputs, *layer_state = layer(dropped, hidden, cell)
            after += [part.detach() for part in layer_state]
            dropped = locked_dropout(outputs, rate, self.training)
        return Output(dropped.transpose(0, 1), tuple(after), self._penalty(dropped, outputs))

    def _layers(self) -> Iterator[LSTMLayer]:
        """The layers, by their type."""
        yield from self.layers  # type: ignore[misc]

    def _rates(self) -> list[float]:
        """The dropout after each layer."""
        return [self.options.dropout_hidden] * (len(self.layers) - 1) + [self.options.dropout_output]

    def _look_up(self, ids: Tensor) -> Tensor:
        """The vectors ``(T, B, D)`` of `ids` ``(T, B)``, after the dropout of words and of vectors."""
        options, words = self.options, self.embedding.num_embeddings
        vectors = word_dropout(self.embedding(ids), ids, words, options.dropout_words, self.training)
        return locked_dropout(vectors, options.dropout_input, self.training)

    def _penalty(self, dropped: Tensor, outputs: Tensor) -> Tensor:
        """AR of the last layer's `dropped` outputs ``(T, B, S)`` plus TAR of its full `outputs`."""
        penalty = torch.zeros((), device=outputs.device)
        if self.training and self.options.activation_penalty > 0.0:
            penalty = penalty + self.options.activation_penalty * activation_penalty(dropped)
        if self.training and self.options.temporal_penalty > 0.0:
            penalty = penalty + self.options.temporal_penalty * temporal_penalty(outputs)
        return penalty
