"""Fit an embedding to one table of a trained model, store it, and measure both.

Rows are compared in blocks, so that no second table is in memory.

Axes: ``V`` vocabulary, ``D`` model dimension.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings import accounting
from shared_embeddings.compress.fit import fit
from shared_embeddings.compress.host import EmbeddingTable
from shared_embeddings.compress.report import Band, Decoding, Sizes, StorageReport, TableReport
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.quant.packed_tensor import install
from shared_embeddings.quant.storage import hold, pack
from shared_embeddings.words.token_counts import counts_of

# The last rank of each band of words by descending frequency; one more band has the rest.
BANDS = (100, 1_000, 10_000)
# Rows that are compared at a time.
_ROWS = 512
# Decoding is timed for about this many seconds, with at most so many tokens.
_TIMED_SECONDS, _TIMED_TOKENS = 0.5, 20


def fit_table(
    table: EmbeddingTable,
    method: str,
    store: str,
    counts: Mapping[str, int] | None,
    options: Mapping[str, object],
) -> tuple[SharedEmbedding, TableReport]:
    """Fit an embedding to a table of a trained model, with the values that `store` keeps.

    Args:
        table, method, store, counts: as in `shared_embeddings.compress.session.compress`.
        options: other arguments of `fit`.

    Returns:
        The embedding in evaluation mode, and its report.
    """
    of_words = None if counts is None else counts_of(table.words, counts, table.sentence_marks)
    embedding, found = fit(
        method,
        table.table,
        token_counts=of_words,
        padding_idx=table.padding_idx,
        words=table.words,
        **options,  # type: ignore[arg-type]
    )
    embedding.to(table.table.dtype).eval()
    bands = Errors(embedding, table.table.__getitem__).bands(of_words)
    stored = None if store == "fp32" else _store(embedding, store, table.table, of_words)
    if stored is None:
        _hold(embedding, store)  # packs word codes
    after = -(-accounting.stored_bits(embedding) // 8) if stored is None else stored.stored_bytes.after
    return embedding, TableReport(
        name=table.name,
        uses=table.uses,
        part=table.part,
        parameters=Sizes(table.parameters, found.parameters),
        stored_bytes=Sizes(-(-table.stored_bits // 8), after),
        fit=found,
        order="in the order of the vocabulary" if counts is None else "by count",
        bands=bands,
        storage=stored,
        decoding=_decoding(table, embedding),
    )


def _hold(embedding: SharedEmbedding, store: str) -> None:
    """Keep the numbers of an embedding in memory as its storage does, except for biases, which hosts copy."""
    tensors = accounting.distinct_state(embedding).items()
    state = {name: one for name, one in tensors if one.dim() > 1 or not one.is_floating_point()}
    embedding.load_state_dict(install(embedding, hold(pack(state, state, store))), strict=False)


@torch.no_grad()
def _store(embedding: SharedEmbedding, store: str, teacher: Tensor, counts: Tensor | None) -> StorageReport:
    """Keep the numbers of an embedding as its storage does, and measure the difference."""
    tensors = (*embedding.parameters(), *embedding.buffers())
    fitted = copy.deepcopy(embedding, {id(tensor): tensor for tensor in tensors})
    sizes = Sizes(*(-(-accounting.stored_bits(embedding, kind) // 8) for kind in ("fp32", store)))
    _hold(embedding, store)
    added, errors = Errors(embedding, fitted), Errors(embedding, teacher.__getitem__)
    added_bands, bands = added.bands(counts), errors.bands(counts)
    return StorageReport(store, sizes, added.relative(), errors.relative(), added_bands, bands)


class Errors:
    """The distances of an embedding's rows from wanted ones.

    Args:
        embedding: the embedding.
        wanted: rows ``(n, D)`` for ids ``(n,)``.
    """

    @torch.no_grad()
    def __init__(self, embedding: SharedEmbedding, wanted: Callable[[Tensor], Tensor]) -> None:
        # Small tensors that stay between large ones would keep the allocator from using memory again.
        self._missed, self._squares = torch.zeros(2, embedding.num_embeddings, dtype=torch.float64)
        ids = torch.arange(embedding.num_embeddings)
        for some in ids.split(_ROWS):
            rows = wanted(some).double()
            self._missed[some] = (embedding(some).double() - rows).square().sum(dim=1)
            self._squares[some] = rows.square().sum(dim=1)
        self._words = ids if embedding.padding_idx is None else ids[ids != embedding.padding_idx]

    def relative(self) -> float:
        """``||E - Ê|| / ||E||`` over all words except padding."""
        return self._of(self._words)[1]

    def weighted(self, weights: Tensor) -> tuple[float, float]:
        """The sums of squared distances and of squared norms over all words except padding.

        Args:
            weights: ``(V,)`` of the words.
        """
        own = weights[self._words].double()
        return float(self._missed[self._words] @ own), float(self._squares[self._words] @ own)

    def bands(self, counts: Tensor | None) -> list[Band]:
        """The errors by frequency band.

        Args:
            counts: ``(V,)`` of the words; None for words in order of frequency.
        """
        order = self._words
        if counts is not None:
            order = order[torch.argsort(counts[order], descending=True, stable=True)]
        edges = [0, *(edge for edge in BANDS if edge < len(order)), len(order)]
        return [Band(first + 1, last, *self._of(order[first:last])) for first, last in zip(edges, edges[1:])]

    def _of(self, words: Tensor) -> tuple[float, float]:
        """The mean distance of the rows of words, and the relative error."""
        missed, norm = self._missed[words], float(self._squares[words].sum().sqrt())
        return float(missed.sqrt().mean()), float(missed.sum().sqrt()) / norm if norm else 0.0


@torch.no_grad()
def _decoding(table: EmbeddingTable, embedding: SharedEmbedding) -> Decoding:
    """The speed and the memory of generating a text token by token, with the table and the embedding."""
    rows, ids = table.table, torch.arange(len(table.table))
    hidden = rows[:1]
    scores = table.is_scored and embedding.has_output and embedding.score_dim == rows.size(1)

    def plain(one: Tensor) -> None:
        F.embedding(one, rows)
        if scores:
            F.log_softmax(F.linear(hidden, rows), dim=-1)

    def compressed(one: Tensor) -> None:
        embedding(one)
        if scores:
            embedding.log_prob(hidden)

    before, after = _tokens_per_second(plain, ids), _tokens_per_second(compressed, ids)
    return Decoding(scores, before, after, Sizes(rows.nbytes, embedding.bytes_in_memory()))


def _tokens_per_second(step: Callable[[Tensor], object], ids: Tensor) -> float:
    """How many tokens ``(1,)`` a step takes in a second, by the fastest of some; the first fills caches."""
    step(ids[:1])
    fastest, started = float("inf"), time.perf_counter()
    for one in ids[:_TIMED_TOKENS].split(1):
        before = time.perf_counter()
        step(one)
        after = time.perf_counter()
        fastest = min(fastest, after - before)
        if after - started > _TIMED_SECONDS:
            break
    return 1 / max(fastest, 1e-9)
