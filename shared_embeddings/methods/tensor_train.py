"""Tensor train (Khrulkov et al., 2019): the table as a product of cores, one for each digit of a word."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shared_embeddings.embedding import Layer, SharedEmbedding
from shared_embeddings.options import EmbeddingOptions, require, require_at_least
from shared_embeddings.registry import register


@dataclasses.dataclass(frozen=True)
class TensorTrainOptions(EmbeddingOptions):
    """Options of `tensor_train`.

    Attributes:
        vocab_shape: v_1 ... v_K, at least two factors whose product is at least V.
        dim_shape: d_1 ... d_K, as many factors, whose product is D.
        rank: the K - 1 inner ranks, or one number for all of them.
    """

    vocab_shape: tuple[int, ...]
    dim_shape: tuple[int, ...]
    rank: int | tuple[int, ...]

    def __post_init__(self) -> None:
        require(
            len(self.vocab_shape) >= 2,
            f"option 'vocab_shape' is {list(self.vocab_shape)}, but it must have at least two factors",
        )
        require(
            len(self.dim_shape) == len(self.vocab_shape),
            f"option 'dim_shape' has {len(self.dim_shape)} factors and 'vocab_shape' has "
            f"{len(self.vocab_shape)}, but they must have as many; change one of them",
        )
        for name in ("vocab_shape", "dim_shape"):
            for factor in getattr(self, name):
                require_at_least(name, factor, 1)
        if isinstance(self.rank, tuple):
            require(
                len(self.rank) == len(self.vocab_shape) - 1,
                f"option 'rank' has {len(self.rank)} inner ranks, but {len(self.vocab_shape)} cores have "
                f"{len(self.vocab_shape) - 1}; give that many, or one number for all",
            )
        for rank in self.rank if isinstance(self.rank, tuple) else (self.rank,):
            require_at_least("rank", rank, 1)

    def core_shapes(self) -> list[tuple[int, int, int, int]]:
        """``(r_{k-1}, v_k, d_k, r_k)`` of every core, with outer ranks of one."""
        number = len(self.vocab_shape)
        inner = self.rank if isinstance(self.rank, tuple) else (self.rank,) * (number - 1)
        ranks = pairwise((1, *inner, 1))
        return [(r, v, d, s) for (r, s), v, d in zip(ranks, self.vocab_shape, self.dim_shape)]


@register("tensor_train", TensorTrainOptions)
class TensorTrainEmbedding(SharedEmbedding):
    """Entry (j_1 ... j_K) of the row of word (i_1 ... i_K) is ``G_1[:, i_1, j_1] ... G_K[:, i_K, j_K]``.

    The digits of a word and of a dimension are counted row by row (the last digit runs fastest) over
    `vocab_shape` and `dim_shape`. The rows of `vocab_shape` beyond V belong to no word.

    Parameters: `cores`, G_k of shape ``(r_{k-1}, v_k, d_k, r_k)``.
    """

    options: TensorTrainOptions
    paper = "Khrulkov et al. (2019)"
    idea = "a product of small cores, one slice of each for a word"
    vocabulary_size: Tensor
    is_deep = True

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, options: TensorTrainOptions
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, options)
        self.cores = nn.ParameterList(torch.empty(shape) for shape in options.core_shapes())
        # No core tells how many words there are, so a checkpoint of another vocabulary would load unseen.
        self.register_buffer("vocabulary_size", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def draw_parameters(self) -> None:
        """Normal entries, all cores alike, whose products sum up to entries of std D**-0.5."""
        shapes = self.options.core_shapes()
        paths = math.prod(shape[0] for shape in shapes)
        for core in self.cores:
            nn.init.normal_(core, std=(self.embedding_dim * paths) ** (-0.5 / len(shapes)))
        self.vocabulary_size.fill_(self.num_embeddings)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``(n, D)`` for ids ``(n,)``; words with the same first digits share these digits' product."""
        self._check_ids(ids)
        products, beginning = deque(self._products(self._digits(ids)), maxlen=1).pop()
        return products.squeeze(-1).index_select(0, beginning)

    def layers(self, ids: Tensor) -> list[Layer]:
        """The products of the first k cores ``(n, d_1 * ... * d_k * r_k)`` for each k; at last the output."""
        found = [
            products.flatten(1).index_select(0, beginning)
            for products, beginning in self._products(self._digits(ids))
        ]
        inner = [Layer(f"cores 1 to {number}", values) for number, values in enumerate(found[:-1], 1)]
        return [*inner, Layer("output", found[-1])]

    def _products(self, digits: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Digit by digit, the products of the cores so far.

        They are ``(m, d_1 * ... * d_k, r_k)`` for the m beginnings of words that are in use; with them comes
        ``(n,)``, which of the beginnings each word has.
        """
        products, beginning = self.cores[0].squeeze(0), digits[0]
        yield products, beginning
        for core, digit in zip(list(self.cores)[1:], digits[1:]):
            number = core.size(1)
            # Sorted by the last digit first: then words with one slice of the core stand together.
            pairs, longer = torch.unique(digit * products.size(0) + beginning, return_inverse=True)
            slices = pairs.div(products.size(0), rounding_mode="floor").bincount(minlength=number).tolist()
            chosen = products.index_select(0, pairs % products.size(0))
            products = _times_slices(chosen, slices, core)
            beginning = longer
            yield products, beginning

    def _all_rows(self) -> Tensor:
        """The rows ``(V, D)`` of all words by full products, which waste nothing when all are wanted."""
        products = self.cores[0].squeeze(0)
        for core in list(self.cores)[1:]:
            rank, number, width, next_rank = core.shape
            longer = products.flatten(0, 1) @ core.flatten(1)
            longer = longer.view(*products.shape[:2], number, width, next_rank).transpose(1, 2)
            products = longer.reshape(products.size(0) * number, products.size(1) * width, next_rank)
        return products.squeeze(-1)[: self.num_embeddings]

    def _digits(self, ids: Tensor) -> list[Tensor]:
        """The digits ``(n,)`` of ids ``(n,)``, first to last."""
        digits: list[Tensor] = []
        rest = ids.long()
        for number in reversed(self.options.vocab_shape):
            digits.insert(0, rest % number)
            rest = rest.div(number, rounding_mode="floor")
        return digits

    def _check_ids(self, ids: Tensor) -> None:
        """Raise IndexError for an id that is no word, where looking costs no wait for a device."""
        if ids.device.type != "cpu" or ids.numel() == 0:
            return
        for word in (int(ids.min()), int(ids.max())):
            if not 0 <= word < self.num_embeddings:
                raise IndexError(f"index {word} is out of range: there are {self.num_embeddings} words")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """As in torch, and a checkpoint of another number of words is an error."""
        stored = state_dict.get(prefix + "vocabulary_size")
        if stored is not None and int(stored) != self.num_embeddings:
            error_messages: list[str] = rest[-1]
            error_messages.append(
                f"size mismatch for {prefix}cores: the checkpoint is of {int(stored)} words, this "
                f"tensor_train embedding of {self.num_embeddings}"
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @classmethod
    def check_sizes(cls, num_embeddings: int, embedding_dim: int, options: TensorTrainOptions) -> None:
        """The factors must cover V words and give exactly D dimensions."""
        words, dim = math.prod(options.vocab_shape), math.prod(options.dim_shape)
        require(
            words >= num_embeddings,
            f"option 'vocab_shape' {list(options.vocab_shape)} holds {words} words, fewer than the "
            f"{num_embeddings} of the vocabulary; choose larger factors",
        )
        require(
            dim == embedding_dim,
            f"option 'dim_shape' {list(options.dim_shape)} has the product {dim}, but the dimension is "
            f"{embedding_dim}; choose factors of {embedding_dim}",
        )

    @classmethod
    def closed_form(cls, num_embeddings: int, embedding_dim: int, options: TensorTrainOptions) -> int:
        """The sum of r_{k-1} v_k d_k r_k over the cores (Khrulkov et al., section 3)."""
        return sum(math.prod(shape) for shape in options.core_shapes())


def _times_slices(products: Tensor, slices: list[int], core: Tensor) -> Tensor:
    """Products ``(m, P, r)`` times their slices of a core ``(r, v, d, s)``: ``(m, P * d, s)``.

    Args:
        slices: how many of the products, in order, belong to each of the v slices.
    """
    rank, _, width, next_rank = core.shape
    longer = [
        part.reshape(-1, rank) @ matrix.reshape(rank, -1)
        for part, matrix in zip(products.split(slices), core.unbind(1))
    ]
    return torch.cat(longer).view(products.size(0), products.size(1) * width, next_rank)
