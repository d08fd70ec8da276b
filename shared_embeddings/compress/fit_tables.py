"""Fit embeddings to the tables of a trained model, and measure their errors, sizes and speed.

Axes: ``V`` vocabulary, ``D`` model dimension.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings import accounting
from shared_embeddings.compress.fit import fit
from shared_embeddings.compress.host import EmbeddingTable
from shared_embeddings.compress.report import Band, Decoding, Sizes, StorageReport, TableReport
from shared_embeddings.compress.session import Session
from shared_embeddings.compress.sizing import Target, stored_bytes
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.quant.packed_tensor import install
from shared_embeddings.quant.storage import hold, pack
from shared_embeddings.registry import get_method_config
from shared_embeddings.spec import Options
from shared_embeddings.utils.progress import begin_phase

# A storage format that adds more than this to the relative error gets a note.
_MUCH_ADDED = 0.05
# The last rank of each band of tokens by descending frequency; one more band has the rest.
BANDS = (100, 1_000, 10_000)
# Rows that are compared at a time, and in all: the first ones by frequency, and a sample of the others.
_ROWS, _COMPARED = 512, 2**15
# Decoding is timed for about this many seconds, with at most so many tokens.
_TIMED_SECONDS, _TIMED_TOKENS = 0.5, 20


@dataclasses.dataclass
class Fitted:
    """New embeddings of a model."""

    method: str  # of all of them
    store: str
    embeddings: dict[str, SharedEmbedding] = dataclasses.field(default_factory=dict)  # by table
    reports: list[TableReport] = dataclasses.field(default_factory=list)  # of the tables
    # About tables that miss their target, or that their storage makes much worse.
    notes: list[str] = dataclasses.field(default_factory=list)


def fit_tables(
    session: Session, method: str, options: Options, store: str, target: Target | None = None
) -> Fitted:
    """Fit an embedding to every table of a model; a target size determines its other options."""
    # All options are checked, and the original is measured, before the first fit, which may take long.
    chosen = {
        table.name: session.options_for(table, method, options, store, target) for table in session.tables
    }
    _ = session.comparison
    asked = {"seed": session.options.seed, "steps": session.options.fit_steps}
    every_table = [table.table for table in session.tables]
    fitted = Fitted(method, store)
    begin_phase("coding")
    for table in session.tables:
        known = session.fit_arguments(table, get_method_config(method).takes_metric)
        embedding, report = fit_table(table, method, store, known | asked | chosen[table.name])
        fitted.embeddings[table.name] = embedding
        fitted.reports.append(report)
        if known["metric"] is not None:
            fitted.notes.append(
                f"table '{table.name}' is rounded for predictions: its relative error is larger than with "
                "calibration none"
            )
        stored, error = report.storage, report.fit.relative_error
        if target is not None and report.stored_bytes.after > target.limit(table.table, every_table):
            fitted.notes.append(
                f"{method} chose its own sizes when it was fitted: table '{report.name}' misses the target"
            )
        if stored is not None and stored.relative_error > error + _MUCH_ADDED:
            fitted.notes.append(
                f"{stored.store} raises the relative error of table '{report.name}' from {error:.4f} to "
                f"{stored.relative_error:.4f}; another storage keeps more"
            )
    return fitted


def fit_table(
    table: EmbeddingTable, method: str, store: str, arguments: Mapping[str, Any]
) -> tuple[SharedEmbedding, TableReport]:
    """Return an embedding in evaluation mode, with the values that `store` keeps, and its report.

    The other `arguments` of `fit` are as from `Session.fit_arguments`.
    """
    counts, rows = arguments["token_counts"], table.table.__getitem__
    embedding, report = fit(method, table.table, **arguments)
    embedding.to(table.table.dtype).eval()
    bands, stored = Errors(embedding, rows, counts=counts).bands(), None
    after = stored_bytes(embedding, store)
    if store == "fp32":
        hold_as(embedding, store)  # packs codes
    else:
        tensors = (*embedding.parameters(), *embedding.buffers())
        fitted = copy.deepcopy(embedding, {id(tensor): tensor for tensor in tensors})
        sizes = Sizes(stored_bytes(embedding, "fp32"), after)
        hold_as(embedding, store)
        added, errors = (Errors(embedding, wanted, counts=counts) for wanted in (fitted, rows))
        stored = StorageReport(
            store=store,
            stored_bytes=sizes,
            added_error=added.mean_and_relative()[1],
            relative_error=errors.mean_and_relative()[1],
            added_bands=added.bands(),
            bands=errors.bands(),
        )
    return embedding, TableReport(
        name=table.name,
        uses=table.uses,
        part=table.part,
        parameters=Sizes(table.parameters, report.parameters),
        stored_bytes=Sizes(-(-table.stored_bits // 8), after),
        fit=report,
        order="in the order of the vocabulary" if counts is None else "by count",
        bands=bands,
        storage=stored,
        decoding=_decoding(table, embedding),
    )


def hold_as(embedding: SharedEmbedding, store: str) -> None:
    """Keep the numbers of an embedding in memory as its storage does, except for biases, which hosts copy."""
    tensors = accounting.distinct_state(embedding).items()
    state = {name: tensor for name, tensor in tensors if tensor.dim() > 1 or not tensor.is_floating_point()}
    embedding.load_state_dict(install(embedding, hold(pack(state, state, store))), strict=False)


class Errors:
    """The distances of an embedding's rows from wanted ones.

    Args:
        wanted: rows ``(n, D)`` for ids ``(n,)``.
        metric: ``(D, D)`` what squared distances and norms are measured in; None for those of vectors.
        counts: ``(V,)`` by which tokens are ordered; None for this order.
    """

    @torch.no_grad()
    def __init__(
        self,
        embedding: SharedEmbedding,
        wanted: Callable[[Tensor], Tensor],
        metric: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> None:
        ids = torch.arange(embedding.num_embeddings)
        # Small tensors that stay between large ones would keep the allocator from using memory again.
        self._squared_errors, self._squares, self._weights = torch.zeros(3, len(ids), dtype=torch.float64)
        self._order = ids if counts is None else torch.argsort(counts, descending=True, stable=True)
        if embedding.padding_idx is not None:
            self._order = self._order[self._order != embedding.padding_idx]
        first, others = self._order[: BANDS[-1]], self._order[BANDS[-1] :]
        sample = others[:: -(-len(others) // (_COMPARED - BANDS[-1])) or 1]
        self._weights[first] = 1.0
        self._weights[sample] = len(others) / max(len(sample), 1)
        matrix = None if metric is None else metric.double()
        for block in self._weights.nonzero().flatten().split(_ROWS):
            rows = wanted(block).double()
            errors = embedding(block).double() - rows
            for sums, vectors in ((self._squared_errors, errors), (self._squares, rows)):
                weighted = vectors if matrix is None else vectors @ matrix
                sums[block] = (weighted * vectors).sum(dim=1)

    def mean_and_relative(self, words: Tensor | None = None) -> tuple[float, float]:
        """Return the mean distance and ``||E - Ê|| / ||E||`` of some tokens, or of all except padding."""
        words = self._order if words is None else words
        weights, squared = self._weights[words], self._squared_errors[words]
        norm = math.sqrt(float(weights @ self._squares[words]))
        mean = float(weights @ squared.sqrt() / weights.sum())
        return mean, math.sqrt(float(weights @ squared)) / norm if norm else 0.0

    def weighted(self, weights: Tensor) -> tuple[float, float]:
        """Return the weighted sums of squared errors and of squared norms, for weights ``(V,)`` of tokens."""
        weights = self._weights * weights.double()
        return float(self._squared_errors @ weights), float(self._squares @ weights)

    def bands(self) -> list[Band]:
        """Return the errors by frequency band."""
        edges = [0, *(edge for edge in BANDS if edge < len(self._order)), len(self._order)]
        return [
            Band(first + 1, last, *self.mean_and_relative(self._order[first:last]))
            for first, last in zip(edges, edges[1:])
        ]


@torch.no_grad()
def _decoding(table: EmbeddingTable, embedding: SharedEmbedding) -> Decoding:
    """Time generating a text token by token, with the table and the embedding."""
    rows, ids = table.table, torch.arange(len(table.table))
    hidden = rows[:1]
    scores = table.is_scored and embedding.has_output and embedding.score_dim == rows.size(1)

    def tokens_per_second(look_up: Callable[[Tensor], Any], score: Callable[[Tensor], Any]) -> float:
        fastest, started = float("inf"), time.perf_counter()
        for number, token in enumerate(ids[: _TIMED_TOKENS + 1].split(1)):
            before = time.perf_counter()
            look_up(token)
            if scores:
                score(hidden)
            after = time.perf_counter()
            fastest = min(fastest, after - before) if number else fastest  # the first fills caches
            if number and after - started > _TIMED_SECONDS:
                break
        return 1 / max(fastest, 1e-9)

    before = tokens_per_second(
        lambda token: F.embedding(token, rows), lambda states: F.log_softmax(F.linear(states, rows), dim=-1)
    )
    after = tokens_per_second(embedding, embedding.log_prob)
    return Decoding(scores, before, after, Sizes(rows.nbytes, accounting.bytes_in_memory(embedding)))
