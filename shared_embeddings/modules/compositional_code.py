"""Compositional code (Shu & Nakayama, 2018): every word is a sum of one entry of each of a few codebooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.embedding import OutputFactors, SharedEmbedding, scores_of_codes
from shared_embeddings.fitting.codes import learn_codes
from shared_embeddings.fitting.task import FitTask
from shared_embeddings.nn.layers import code_bits, code_dtype, draw_codes, entry_std
from shared_embeddings.quant.packed_tensor import dense
from shared_embeddings.registry import register
from shared_embeddings.spec import EmbeddingOptions, Presets, SearchGrid
from shared_embeddings.utils.options import option


@dataclasses.dataclass(frozen=True)
class CompositionalCodeOptions(EmbeddingOptions["CompositionalCodeEmbedding"]):
    """Options of `compositional_code`; the defaults are those that DeFINE compares with (Table 5)."""

    paper = "Shu & Nakayama (2018)"
    summary = "sums of M codebook entries, chosen by codes"
    grid_choice = "codebooks of 16, as many as fit; codes are extra"
    fit_bound = 0.3
    default_store = "fp16"

    num_codebooks: int = option(
        "M, the number of codebooks; a word is the sum of one entry of each.", 32, minimum=1
    )
    codebook_size: int = option("K, the number of entries of each codebook.", 16, minimum=1)
    seed: int = option(
        "The seed of the random codes of an embedding that is not fitted to a table.", 0, minimum=0
    )

    def count_parameters(self, num_embeddings: int, embedding_dim: int) -> int:
        """M * K * D trained numbers (Shu & Nakayama, section 3)."""
        return self.num_codebooks * self.codebook_size * embedding_dim

    @classmethod
    def presets(cls, num_embeddings: int, embedding_dim: int) -> Presets:
        """The default codebooks, but no more entries than words; up to the size of a plain table."""
        most = num_embeddings // 16
        grid = SearchGrid(max(most, 1), lambda step: {"num_codebooks": step + 1, "codebook_size": 16})
        return Presets({"": {"num_codebooks": min(most, 32), "codebook_size": 16}}, [grid])


@register("compositional_code", CompositionalCodeOptions)
class CompositionalCodeEmbedding(SharedEmbedding):
    """Row w of the table is the sum over m of ``codebooks[m, codes[w, m]]`` (Shu & Nakayama, section 3).

    Parameters: `codebooks` ``(M, K, D)``. The `codes` ``(V, M)`` are fixed: drawn with ``options.seed`` or
    learned from a table, and saved with the parameters; loaded codes replace drawn ones. `stored_bits` of
    `counts` includes log2(K) bits for each.
    """

    options: CompositionalCodeOptions
    per_word = ("codes",)
    codes: Tensor
    expensive_rows = True
    scores_in_blocks = True

    def create_parameters(self) -> None:
        number, size = self.options.num_codebooks, self.options.codebook_size
        self.codebooks = nn.Parameter(torch.empty(number, size, self.embedding_dim))
        self.register_buffer("codes", torch.empty(self.num_embeddings, number, dtype=code_dtype(size)))
        self.buffer_bits["codes"] = number * code_bits(size)

    def init_weights(self) -> None:
        """Codes from the seed, and normal entries whose sums have std D**-0.5."""
        draw_codes(self.codes, self.options.codebook_size, self.options.seed)
        std = entry_std(self.embedding_dim * self.options.num_codebooks)
        nn.init.normal_(self.codebooks, std=std)

    def _row_function(self) -> Callable[[Tensor], Tensor]:
        entries = dense(self.codebooks).flatten(0, 1)
        starts = torch.arange(self.options.num_codebooks, device=entries.device) * self.options.codebook_size

        def rows(ids: Tensor) -> Tensor:
            return F.embedding_bag(self.codes.index_select(0, ids).long() + starts, entries, mode="sum")

        return rows

    def _block_scores(self, hidden: Tensor) -> Tensor:
        scores = scores_of_codes(
            hidden, self.codes, lambda: torch.einsum("nd,mkd->nmk", hidden, dense(self.codebooks))
        )
        return super()._block_scores(hidden) if scores is None else scores

    def output_factors(self) -> OutputFactors:
        """Ones at the entries of each word ``(V, M * K)`` and all entries ``(M * K, D)``; or the table.

        The ones are not trained, so their gradient, a third of the work, is skipped. This is faster as long
        as the other two thirds are not much wider than with the table.
        """
        entries = self.codebooks.flatten(0, 1)
        if 2 * entries.size(0) > 3 * self.embedding_dim:
            return super().output_factors()
        ones = entries.new_zeros((self.num_embeddings, entries.size(0)))
        starts = torch.arange(self.options.num_codebooks, device=ones.device) * self.options.codebook_size
        return OutputFactors(ones.scatter_(1, self.codes.long() + starts, 1.0), entries)

    @classmethod
    def fit(cls, task: FitTask) -> CompositionalCodeEmbedding:
        """Codes and codebooks in turn, until the error stands still."""
        embedding: CompositionalCodeEmbedding = task.build()
        sizes = (embedding.options.num_codebooks, embedding.options.codebook_size)
        codes, codebooks = learn_codes(task.teacher, *sizes, seed=task.seed, progress=task.progress)
        with torch.no_grad():
            embedding.codes.copy_(codes)
            embedding.codebooks.copy_(codebooks)
        return embedding
