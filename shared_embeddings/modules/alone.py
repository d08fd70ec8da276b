"""ALONE: one base vector for all words, a fixed random filter for each word, and a feed-forward net."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.embedding import Layer, SharedEmbedding, without_padding
from shared_embeddings.fitting.task import FitTask, reconstruct
from shared_embeddings.nn.layers import EndingDropout, code_bits, code_dtype, code_std, entry_std
from shared_embeddings.registry import register
from shared_embeddings.spec import EmbeddingOptions, Presets, SearchGrid
from shared_embeddings.utils.options import option, require, require_effect


@dataclasses.dataclass(frozen=True)
class AloneOptions(EmbeddingOptions["AloneEmbedding"]):
    """Options of `alone`; the defaults are the paper's (section 3.1)."""

    paper = "ALONE, Eq. 1 to 3"
    summary = "one vector, filtered for each word by fixed random codes, and a feed-forward network"
    grid_choice = "the largest H"
    fit_bound = 0.05

    hidden_dim: int = option("H (D_inter), the width of the feed-forward net.", minimum=1)
    filter: Literal["real", "binary"] = option(
        'Filters are sums of Gaussian vectors ("real") or masks ("binary").', "real"
    )
    base_dim: int | None = option("D_o, the width of the base vector; D by default.", None, minimum=1)
    codebooks: int = option("M, the number of vectors that are combined into a filter.", 8, minimum=1)
    codebook_size: int = option("c, the number of vectors in each codebook.", 64, minimum=1)
    zero_probability: float | None = option(
        'p_o, the probability that an element of a mask is 0, 0.5 by default; for filter "binary" only.', None
    )
    train_base: bool = option("Trains the base vector.", True)
    relu_dropout: float = option(
        "Dropout after the ReLU (section 3.2), on the input side only.", 0.0, minimum=0, below=1
    )
    relu_dropout_steps: int | None = option(
        "The number of optimizer updates after which this dropout ends; by default, it does not end.",
        None,
        minimum=1,
    )
    seed: int = option("The seed of the random filters.", 0, minimum=0)

    def __post_init__(self) -> None:
        require(
            self.relu_dropout_steps is None or self.relu_dropout > 0.0,
            "option 'relu_dropout_steps' has no effect without 'relu_dropout'; give both or remove it",
        )
        if self.filter == "real":
            require_effect(self, ("zero_probability",), "with filter 'real'")
        require(
            self.zero_probability is None or 0.0 < self.zero_probability < 1.0,
            f"option 'zero_probability' is {self.zero_probability}, but masks differ only between 0 and 1; "
            "choose a value between them",
        )

    def count_parameters(self, num_embeddings: int, embedding_dim: int) -> int:
        """D_o + D_inter (D_o + D_e), Table 1 (volatile); without D_o if the base is not trained."""
        base_dim = self.base_dim or embedding_dim
        trained_base = base_dim if self.train_base else 0
        return trained_base + self.hidden_dim * (base_dim + embedding_dim)

    @classmethod
    def presets(cls, num_embeddings: int, embedding_dim: int) -> Presets:
        # The hidden width of the paper's translation models.
        examples = {kind: {"hidden_dim": 8 * embedding_dim, "filter": kind} for kind in ("real", "binary")}
        return Presets(examples, [SearchGrid(num_embeddings, lambda step: {"hidden_dim": step + 1})])


@register("alone", AloneOptions)
class AloneEmbedding(SharedEmbedding):
    """Row w of the table is ``W2 max(0, W1 (m_w * o))`` (Eq. 3).

    The filter m_w is not stored. It is computed from `codes` ``(V, M)``, the word's entry in each codebook,
    and `codebooks` ``(M, c, D_o)``, as the sum of the entries (Eq. 1; "real") or their logical or (Eq. 2;
    "binary"). Both are fixed, drawn with ``options.seed``, and saved with the parameters; loaded filters
    replace drawn ones.

    `relu_dropout` drops hidden units of every input token independently, as in the authors' code: two tokens
    of one word differ. `table` and the output side have no dropout. The training loop calls
    `shared_embeddings.set_updates` so that the dropout ends after `relu_dropout_steps` updates.

    New parameters have another scale than in the authors' code, which draws W1 and W2 as Xavier and o with a
    std from D + H: here rows have a std of D**-0.5, as in a new plain table, and hidden units are as small as
    the codes of a narrow table. A step that moves W2 would move rows by many times their size otherwise.

    Parameters: `base` o ``(D_o,)``, a buffer if it is not trained; `first` W1 ``(H, D_o)``; `second` W2
    ``(D, H)``. They are the paper's "volatile" count; `stored_bits` adds the codebooks, and log2(c) bits for
    each code.
    """

    options: AloneOptions
    per_word = ("codes",)
    codes: Tensor
    codebooks: Tensor
    expensive_rows = True

    def create_parameters(self) -> None:
        base_dim = self.options.base_dim or self.embedding_dim
        self.base: Tensor
        if self.options.train_base:
            self.base = nn.Parameter(torch.empty(base_dim))
        else:
            self.register_buffer("base", torch.empty(base_dim))
        self.first = nn.Parameter(torch.empty(self.options.hidden_dim, base_dim))
        self.second = nn.Parameter(torch.empty(self.embedding_dim, self.options.hidden_dim))
        self.relu_dropout = EndingDropout(self.options.relu_dropout, self.options.relu_dropout_steps)
        number, size = self.options.codebooks, self.options.codebook_size
        dtype = torch.bool if self.options.filter == "binary" else None
        self.register_buffer("codes", torch.empty(self.num_embeddings, number, dtype=code_dtype(size)))
        self.register_buffer("codebooks", torch.empty(number, size, base_dim, dtype=dtype))
        self.buffer_bits["codes"] = number * code_bits(size)
        if self.options.filter == "binary":
            self.buffer_bits["codebooks"] = size * base_dim

    def init_weights(self) -> None:
        """Draw the filters with the seed, normal parameters for small hidden units, and rows of a table."""
        options, shape = self.options, self.codebooks.shape
        zero_rate = 0.5 if options.zero_probability is None else options.zero_probability
        # From the options' seed only, identical on every device.
        generator = torch.Generator(device="cpu").manual_seed(options.seed)
        codes = torch.randint(options.codebook_size, self.codes.shape, generator=generator, device="cpu")
        self.codes.copy_(codes)
        if options.filter == "binary":
            # With M codebooks, all entries of an element are 0 with probability p_o (section 2.1).
            rate = 1.0 - zero_rate ** (1.0 / options.codebooks)
            self.codebooks.copy_(torch.rand(shape, generator=generator, device="cpu") < rate)
        else:
            # The sum over the codebooks then has variance one.
            entries = torch.randn(shape, generator=generator, device="cpu")
            self.codebooks.copy_(entries * options.codebooks**-0.5)
        base_dim = self.first.size(1)
        passed = 1.0 - zero_rate if options.filter == "binary" else 1.0
        nn.init.normal_(self.base)
        with torch.no_grad():
            self.base.mul_(self.base.square().mean().rsqrt())
        small, whole = code_std(self.embedding_dim), entry_std(self.embedding_dim)
        nn.init.normal_(self.first, std=small * (base_dim * passed) ** -0.5)
        # A ReLU keeps half of the variance.
        nn.init.normal_(self.second, std=whole / small * (self.options.hidden_dim / 2) ** -0.5)

    @classmethod
    def fit(cls, task: FitTask) -> AloneEmbedding:
        """By gradient descent, from hidden units with a variance of one, which leave a smaller error here."""
        embedding: AloneEmbedding = task.build()
        small = code_std(embedding.embedding_dim)
        with torch.no_grad():
            embedding.first.div_(small)
            embedding.second.mul_(small)
        reconstruct(embedding, task)
        return embedding

    def _row_function(self) -> Callable[[Tensor], Tensor]:
        hidden = self._hidden_function()
        return lambda ids: F.linear(hidden(ids), self.second)

    def token_rows(self, words: Tensor, inverse: Tensor) -> Tensor:
        """With dropout, tokens of a word share only the work before it."""
        if not self._draws_per_token:
            return super().token_rows(words, inverse)
        hidden = self.relu_dropout(F.embedding(inverse, self._hidden_function()(words)))
        tokens = words.index_select(0, inverse)
        return without_padding(F.linear(hidden, self.second), self.padding_idx, tokens)

    def _hidden_function(self) -> Callable[[Tensor], Tensor]:
        """A function from word ids ``(n,)`` to hidden units ``(n, H)``; shared work is done once, here.

        The base is folded into W1, and for "real" filters W1 into the codebooks: W1 (m_w * o) is linear in a
        real filter, so it is a sum of M rows of a small ``(M * c, H)`` table.
        """
        folded = self.first * self.base
        is_binary = self.options.filter == "binary"
        entries = folded if is_binary else self.codebooks.flatten(0, 1) @ folded.t()
        starts = torch.arange(self.options.codebooks, device=folded.device) * self.options.codebook_size

        def hidden(ids: Tensor) -> Tensor:
            codes = self.codes.index_select(0, ids).long()
            if not is_binary:
                return torch.relu(F.embedding_bag(codes + starts, entries, mode="sum"))
            mask = torch.zeros((ids.size(0), folded.size(1)), dtype=torch.bool, device=codes.device)
            for number, codebook in enumerate(self.codebooks):
                mask |= codebook.index_select(0, codes[:, number])
            return torch.relu(F.linear(mask.to(folded.dtype), folded))

        return hidden

    def layers(self, ids: Tensor) -> list[Layer]:
        codes = self.codes.index_select(0, ids).long()
        filters = self.base.new_zeros((ids.size(0), self.base.size(0)))
        for number, codebook in enumerate(self.codebooks):
            filters += codebook.index_select(0, codes[:, number])
        if self.options.filter == "binary":
            filters = filters.clamp(max=1.0)
        filtered = filters * self.base
        hidden = torch.relu(F.linear(filtered, self.first))
        return [Layer("filtered", filtered), Layer("hidden", hidden), *super().layers(ids)]
