"""What every language model offers to training, evaluation and generation, and the kinds by name.

Axes: ``B`` batch, ``T`` time, ``V`` vocabulary, ``D`` width of the word vectors, ``S`` width of the hidden
states that are scored, ``L`` layers that share a tensor of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor, nn

import shared_embeddings as se

# What a model carries from one segment of the text to the next, cut off from gradients. The batch is axis 1
# of every tensor: (L, B, ...).
State = tuple[Tensor, ...]


class Output(NamedTuple):
    """What a model makes of a segment.

    Attributes:
        hidden: ``(B, T, S)``, for the embedding's `logits` and `cross_entropy`.
        state: the state after the segment, cut off from gradients.
        penalty: a scalar to add to the mean loss per token in training; zero in evaluation.
    """

    hidden: Tensor
    state: State
    penalty: Tensor


class LanguageModel(nn.Module):
    """A model of the next word; the embedding is its input and, tied to it, its output.

    A model of a class is built from an embedding and the options of the class, and then `reset_parameters`
    gives it its first parameters: ``lm.models.build`` does both.

    Attributes:
        kind: the registered name.
        options_class: the frozen dataclass of its options; one of them is `embedding_dim`.
        embedding: the words, on both sides.
        options: the checked options.
    """

    kind: ClassVar[str]
    options_class: ClassVar[type]

    def __init__(self, embedding: se.SharedEmbedding, options: Any) -> None:
        super().__init__()
        self.embedding = embedding
        self.options = options

    def initial_state(self, batch_size: int) -> State:
        """The state before the first word of each of `batch_size` (B) texts."""
        raise NotImplementedError

    def forward(self, ids: Tensor, state: State) -> Output:
        """Read word ids ``(B, T)`` on from `state`; the hidden state at t predicts the word at t + 1."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draw all parameters anew from torch's random numbers, those of the embedding by its own rule."""
        raise NotImplementedError


ModelClass = TypeVar("ModelClass", bound=type[LanguageModel])

REGISTERED: dict[str, type[LanguageModel]] = {}


def register(kind: str, options_class: type) -> Callable[[ModelClass], ModelClass]:
    """Class decorator: make a model class known as `kind`, with `options_class` as its options."""

    def add(model_class: ModelClass) -> ModelClass:
        if kind in REGISTERED:
            raise ValueError(f"two language models are registered as '{kind}': rename one")
        model_class.kind = kind
        model_class.options_class = options_class
        REGISTERED[kind] = model_class
        return model_class

    return add
