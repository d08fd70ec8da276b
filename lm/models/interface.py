"""What every language model offers to training, evaluation and generation.

Axes: ``B`` batch, ``T`` time, ``V`` vocabulary, ``S`` width of the hidden states that the embedding scores,
``L`` whatever a model stacks along the first axis of its state.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

import shared_embeddings as se

State = tuple[Tensor, ...]


class Output(NamedTuple):
    """What a model gives for a segment.

    Attributes:
        hidden: ``(B, T, S)``, what the embedding scores.
        state: for the next segment, detached; the batch is axis 1 of every tensor.
        penalty: scalar to add to the mean loss in training; zero in evaluation.
    """

    hidden: Tensor
    state: State
    penalty: Tensor


class LanguageModel(nn.Module):
    """A model of the next word, with one embedding for its input and its output.

    Attributes:
        embedding: looks words up and scores the hidden states.
    """

    embedding: se.SharedEmbedding

    def initial_state(self, batch_size: int) -> State:
        """The state before the first word of `batch_size` texts."""
        raise NotImplementedError

    def forward(self, ids: Tensor, state: State) -> Output:
        """Hidden states for the words after each of `ids` ``(B, T)``."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draw all parameters anew, those of the embedding last."""
        raise NotImplementedError
