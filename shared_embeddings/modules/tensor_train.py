"""Tensor train (Khrulkov et al., 2019): the table as a product of cores, one for each digit of a word."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.embedding import Layer, SharedEmbedding
from shared_embeddings.fitting.factorization import tt_svd
from shared_embeddings.fitting.task import FitTask
from shared_embeddings.nn.tracing import needs_fixed_shapes
from shared_embeddings.registry import register
from shared_embeddings.spec import EmbeddingOptions, Options, Presets, SearchGrid
from shared_embeddings.utils.options import option, require


@dataclasses.dataclass(frozen=True)
class TensorTrainOptions(EmbeddingOptions["TensorTrainEmbedding"]):
    """Options of `tensor_train`."""

    paper = "Khrulkov et al. (2019)"
    summary = "a product of small cores, one slice of each for a word"
    grid_choice = "three similar factors with little waste, the largest rank"
    fit_bound = 0.75

    vocab_shape: tuple[int, ...] = option(
        "v_1 ... v_K, at least two factors whose product is at least V.", minimum=1
    )
    dim_shape: tuple[int, ...] = option(
        "d_1 ... d_K, the same number of factors, whose product is D.", minimum=1
    )
    rank: int | tuple[int, ...] = option("The K - 1 inner ranks, or one number for all of them.", minimum=1)

    def __post_init__(self) -> None:
        require(
            len(self.vocab_shape) >= 2,
            f"option 'vocab_shape' is {list(self.vocab_shape)}, but it must have at least two factors",
        )
        require(
            len(self.dim_shape) == len(self.vocab_shape),
            f"option 'dim_shape' has {len(self.dim_shape)} factors and 'vocab_shape' has "
            f"{len(self.vocab_shape)}, but both need the same number; change one of them",
        )
        if isinstance(self.rank, tuple):
            require(
                len(self.rank) == len(self.vocab_shape) - 1,
                f"option 'rank' has {len(self.rank)} inner ranks, but {len(self.vocab_shape)} cores have "
                f"{len(self.vocab_shape) - 1}; give that many, or one number for all",
            )

    def core_shapes(self) -> list[tuple[int, int, int, int]]:
        """``(r_{k-1}, v_k, d_k, r_k)`` of every core, with outer ranks of one."""
        number = len(self.vocab_shape)
        inner = self.rank if isinstance(self.rank, tuple) else (self.rank,) * (number - 1)
        ranks = pairwise((1, *inner, 1))
        return [(r, v, d, s) for (r, s), v, d in zip(ranks, self.vocab_shape, self.dim_shape)]

    def check_sizes(self, num_embeddings: int, embedding_dim: int) -> None:
        words, dim = math.prod(self.vocab_shape), math.prod(self.dim_shape)
        require(
            words >= num_embeddings,
            f"option 'vocab_shape' {list(self.vocab_shape)} holds {words} words, fewer than the "
            f"{num_embeddings} of the vocabulary; choose larger factors",
        )
        require(
            dim == embedding_dim,
            f"option 'dim_shape' {list(self.dim_shape)} has the product {dim}, but the dimension is "
            f"{embedding_dim}; choose factors of {embedding_dim}",
        )

    def count_parameters(self, num_embeddings: int, embedding_dim: int) -> int:
        """The sum of r_{k-1} v_k d_k r_k over the cores (Khrulkov et al., section 3)."""
        return sum(math.prod(shape) for shape in self.core_shapes())

    @classmethod
    def presets(cls, num_embeddings: int, embedding_dim: int) -> Presets:
        """Three similar factors of V, or little more, and of D.

        The example has about the rank of Distilled Embedding.
        """
        root = num_embeddings ** (1 / 3)
        around = range(max(int(0.7 * root), 1), math.ceil(1.4 * root) + 1)
        shapes_of_words = {
            tuple(sorted((a, b, math.ceil(num_embeddings / (a * b))))) for a, b in product(around, repeat=2)
        }
        words = min(shapes_of_words, key=lambda shape: (math.prod(shape), shape[2] - shape[0]))
        lower = [number for number in range(1, math.isqrt(embedding_dim) + 1) if embedding_dim % number == 0]
        divisors = sorted({*lower, *(embedding_dim // number for number in lower)})
        shapes_of_dims = {
            tuple(sorted((a, b, embedding_dim // (a * b))))
            for a, b in product(divisors, repeat=2)
            if embedding_dim % (a * b) == 0
        }
        dims = min(shapes_of_dims, key=lambda shape: (shape[2], shape[2] - shape[0]))
        shapes: Options = {"vocab_shape": list(words), "dim_shape": list(dims)}
        # A higher inner rank cannot represent more tables.
        highest = min(words[0] * dims[0], words[2] * dims[2])
        grid = SearchGrid(highest, lambda step: {**shapes, "rank": step + 1})
        return Presets({"": {**shapes, "rank": max(embedding_dim // 6, 4)}}, [grid])


@register("tensor_train", TensorTrainOptions)
class TensorTrainEmbedding(SharedEmbedding):
    """Entry (j_1 ... j_K) of the row of word (i_1 ... i_K) is ``G_1[:, i_1, j_1] ... G_K[:, i_K, j_K]``.

    The digits of a word and of a dimension are in row-major order (the last digit changes fastest) over
    `vocab_shape` and `dim_shape`. Rows of `vocab_shape` beyond V are unused.

    Parameters: `cores`, G_k of shape ``(r_{k-1}, v_k, d_k, r_k)``.
    """

    options: TensorTrainOptions
    vocabulary_size: Tensor
    expensive_rows = True

    def create_parameters(self) -> None:
        self.cores = nn.ParameterList(torch.empty(shape) for shape in self.options.core_shapes())
        # The cores do not determine V: without this, a checkpoint of another vocabulary would load silently.
        self.register_buffer("vocabulary_size", torch.empty((), dtype=torch.int64))

    def init_weights(self) -> None:
        """Normal entries, with the same std in all cores, whose products sum to entries of std D**-0.5."""
        shapes = self.options.core_shapes()
        paths = math.prod(shape[0] for shape in shapes)
        for core in self.cores:
            nn.init.normal_(core, std=(self.embedding_dim * paths) ** (-0.5 / len(shapes)))
        self.vocabulary_size.fill_(self.num_embeddings)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``(n, D)`` for ids ``(n,)``; words with the same first digits share a product."""
        if needs_fixed_shapes(ids):
            # Which products are needed depends on the ids.
            return F.embedding(ids, self._all_rows())
        if ids.device.type == "cpu" and ids.numel():  # elsewhere, checking would wait for the device
            if int(ids.min()) < 0 or int(ids.max()) >= self.num_embeddings:
                raise IndexError(f"a word id is out of range: there are {self.num_embeddings} words")
        products, beginning = deque(self._products(ids), maxlen=1).pop()
        return products.squeeze(-1).index_select(0, beginning)

    def layers(self, ids: Tensor) -> list[Layer]:
        """The products of the first k cores ``(n, d_1 * ... * d_k * r_k)`` for each k, then the output."""
        layers = [
            Layer(f"cores 1 to {number}", products.flatten(1).index_select(0, beginning))
            for number, (products, beginning) in enumerate(self._products(ids), 1)
        ]
        return [*layers[:-1], layers[-1]._replace(name="output")]

    def _products(self, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """After each digit, the products of the cores so far, and the product that each word uses.

        The products are ``(m, d_1 * ... * d_k, r_k)`` for the m distinct prefixes of words; each of the n
        words has the number of its prefix in the second tensor ``(n,)``.
        """
        digits: list[Tensor] = []
        rest = ids.long()
        for factor in reversed(self.options.vocab_shape):
            digits.insert(0, rest % factor)
            rest = rest.div(factor, rounding_mode="floor")
        products, beginning = self.cores[0].squeeze(0), digits[0]
        yield products, beginning
        for core, digit in zip(list(self.cores)[1:], digits[1:]):
            rank, number, width, next_rank = core.shape
            # Sorted by the last digit first, so that words with the same slice of the core are adjacent.
            pairs, longer = torch.unique(digit * products.size(0) + beginning, return_inverse=True)
            slices = pairs.div(products.size(0), rounding_mode="floor").bincount(minlength=number).tolist()
            chosen = products.index_select(0, pairs % products.size(0))
            parts = [
                part.reshape(-1, rank) @ matrix.reshape(rank, -1)
                for part, matrix in zip(chosen.split(slices), core.unbind(1))
            ]
            products = torch.cat(parts).view(chosen.size(0), chosen.size(1) * width, next_rank)
            beginning = longer
            yield products, beginning

    def _all_rows(self) -> Tensor:
        """The rows ``(V, D)`` of all words by full products, without duplicate work."""
        products = self.cores[0].squeeze(0)
        for core in list(self.cores)[1:]:
            rank, number, width, next_rank = core.shape
            longer = products.flatten(0, 1) @ core.flatten(1)
            longer = longer.view(*products.shape[:2], number, width, next_rank).transpose(1, 2)
            products = longer.reshape(products.size(0) * number, products.size(1) * width, next_rank)
        return products.squeeze(-1)[: self.num_embeddings]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        stored = state_dict.get(prefix + "vocabulary_size")
        if stored is not None and int(stored) != self.num_embeddings:
            error_messages: list[str] = rest[-1]
            error_messages.append(
                f"size mismatch for {prefix}cores: the checkpoint is of {int(stored)} words, this "
                f"tensor_train embedding of {self.num_embeddings}"
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @classmethod
    def fit(cls, task: FitTask) -> TensorTrainEmbedding:
        embedding: TensorTrainEmbedding = task.build()
        options = embedding.options
        cores = tt_svd(task.teacher, options.vocab_shape, options.dim_shape, options.rank)
        with torch.no_grad():
            for parameter, core in zip(embedding.cores, cores, strict=True):
                parameter.copy_(core)
        return embedding
