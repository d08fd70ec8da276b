"""Fitting an embedding to a trained table, so that a model can be compressed instead of retrained.

Each method has its own `fit`, with a closed form or an algorithm of `shared_embeddings.fitting`; the
default is gradient descent on the reconstruction loss of Distilled Embedding (Eq. 5).

Axes: ``V`` vocabulary, ``D`` model dimension, ``R`` rank.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.fitting.task import BATCH, LEARNING_RATE, FitTask
from shared_embeddings.nn.layers import evaluating
from shared_embeddings.quant.metric import RIDGE
from shared_embeddings.registry import build, spec_of
from shared_embeddings.spec import EmbeddingOptions
from shared_embeddings.utils.errors import UserError

# Rows that are compared at a time, in 64 bits.
_ROWS = 512


@dataclasses.dataclass(frozen=True)
class FitReport:
    """How well an embedding reconstructs the table that it was fitted to, without the padding row.

    Attributes:
        method: the registered name.
        options: its options as plain values, from which it can be built again.
        loss: mean over the words of ``||e - ê||``, the L2 loss of Distilled Embedding, Eq. 5.
        squared_loss: mean over the words of ``||e - ê||**2`` (ALONE, Eq. 4).
        relative_error: ``||E - Ê|| / ||E||`` in the Frobenius norm.
        weighted_error: the same with every word's squares weighted by its count; None without counts.
        parameters: trainable parameters of the embedding.
        stored_bits: the bits that storing it takes, codes included.
        compression: parameters of the table over those of the embedding.
        seconds: wall time of the fit.
    """

    method: str
    options: dict[str, object]
    loss: float
    squared_loss: float
    relative_error: float
    weighted_error: float | None
    parameters: int
    stored_bits: int
    compression: float
    seconds: float


# A fit needs gradients even if the caller has disabled them.
@torch.inference_mode(False)
@torch.enable_grad()
def fit(
    method: str | EmbeddingOptions[Any],
    teacher: Tensor,
    *,
    token_counts: Tensor | None = None,
    metric: Tensor | None = None,
    only: Tensor | None = None,
    padding_idx: int | None = None,
    words: Sequence[str] | None = None,
    seed: int = 0,
    steps: int | None = None,
    learning_rate: float = LEARNING_RATE,
    progress: bool = True,
    **options: object,
) -> tuple[SharedEmbedding, FitReport]:
    """Build an embedding and fit it to a trained table.

    Args:
        method: one of `methods()`, or the options of a method.
        teacher: the table ``(V, D)`` to reconstruct.
        token_counts: ``(V,)`` how often each word occurs or is expected, for methods that weight words.
        metric: ``(D, D)`` what errors of rows count, as `shared_embeddings.compress.calibration` measures it,
            for methods that round with feedback.
        only: the ids ``(n,)`` of the words that matter in a trial. Methods that encode words one by one leave
            out the others, whose vectors are then arbitrary. The report is about these words.
        padding_idx: the word without a vector; its row of the teacher is ignored.
        words: the words in the order of their ids, for options that name a file about words, as in `build`.
        seed: the seed of all random numbers; the global random state does not change.
        steps: of gradient descent, for methods that use it; None for their default.
        learning_rate: the initial learning rate of gradient descent.
        progress: show a progress bar for slow fits.
        options: the method's own options by name, if `method` is a name.

    Returns:
        The embedding, on the teacher's device and in float32, and a report of its reconstruction errors.

    Raises:
        OptionError: as in `build`.
        UserError: the teacher is not a finite table; or counts, metric, steps or seed are invalid.
    """
    spec, resolved = spec_of(method, options, teacher.size(0) if teacher.dim() else 0, words)
    if steps is not None and steps < 1:
        raise UserError(f"steps is {steps}, but gradient descent needs at least 1")
    if not isinstance(seed, int):
        raise UserError(f"seed is {seed!r}; give a whole number")
    is_copied = not spec.reads_blocks or padding_idx is not None
    table = _check_teacher(teacher, padding_idx, spec.largest, is_copied)
    counts = None if token_counts is None else _check_counts(token_counts, table)
    sizes = {"num_embeddings": table.size(0), "embedding_dim": table.size(1), "padding_idx": padding_idx}
    task = FitTask(
        make=lambda options: build(spec.method, **sizes, **options),  # type: ignore[arg-type]
        options=resolved,
        teacher=table,
        token_counts=counts,
        metric=None if metric is None else _check_metric(metric, table),
        only=only,
        padding_idx=padding_idx,
        seed=seed,
        steps=steps,
        learning_rate=learning_rate,
        progress=progress,
    )
    started = time.perf_counter()
    cuda = [table.device] if table.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        embedding: SharedEmbedding = spec.embedding_class.fit(task)
    return embedding, report(embedding, table, counts, time.perf_counter() - started, only)


@torch.no_grad()
def report(
    embedding: SharedEmbedding,
    teacher: Tensor,
    token_counts: Tensor | None = None,
    seconds: float = 0.0,
    only: Tensor | None = None,
) -> FitReport:
    """How well `embedding` reconstructs `teacher` ``(V, D)``, or rows `only` ``(n,)``; see `FitReport`."""
    ids = torch.arange(embedding.num_embeddings, device=teacher.device) if only is None else only
    ids = ids if embedding.padding_idx is None else ids[ids != embedding.padding_idx]
    # The sums of distances, of their squares and of the squared norms, then weighted by counts.
    loss = squares = norm = weighted = weighted_norm = 0.0
    # Training caches nothing, so what all blocks share would be computed for each.
    with evaluating(embedding):
        for block in ids.split(_ROWS):
            wanted = teacher[block].double()
            missed = (embedding(block).double() - wanted).square().sum(dim=1)
            size = wanted.square().sum(dim=1)
            loss += float(missed.sqrt().sum())
            squares += float(missed.sum())
            norm += float(size.sum())
            if token_counts is not None:
                weighted += float(missed @ token_counts[block].double())
                weighted_norm += float(size @ token_counts[block].double())

    def relative(squared_errors: float, squares: float) -> float:
        return math.sqrt(squared_errors / squares) if squares > 0.0 else float(squared_errors > 0.0)

    counts = embedding.counts()
    return FitReport(
        method=embedding.method,
        options=embedding.stored_options(),
        loss=loss / max(len(ids), 1),
        squared_loss=squares / max(len(ids), 1),
        relative_error=relative(squares, norm),
        weighted_error=None if token_counts is None else relative(weighted, weighted_norm),
        parameters=counts["total"],
        stored_bits=counts["stored_bits"],
        compression=teacher.numel() / max(counts["total"], 1),
        seconds=seconds,
    )


def _check_teacher(teacher: Tensor, padding_idx: int | None, largest: float, is_copied: bool) -> Tensor:
    """Return the teacher, or a copy in float32 with a padding row of zeros; UserError if it is not finite."""
    if teacher.dim() != 2 or 0 in teacher.shape:
        raise UserError(
            f"the teacher is {tuple(teacher.shape)}, but it must be a table of words by dimensions"
        )
    table = teacher.detach()
    table = table.to(torch.float32, copy=True) if is_copied or table.element_size() > 4 else table
    # `build` rejects an index that is out of range.
    if padding_idx is not None and 0 <= padding_idx < len(table):
        table[padding_idx] = 0.0
    # In blocks, because torch would allocate a second table.
    is_finite = torch.cat([(rows.abs() <= largest).all(dim=1) for rows in table.split(BATCH)])
    if not bool(is_finite.all()):
        rows = (~is_finite).nonzero().flatten()
        raise UserError(
            f"the teacher has values that are not finite, or above {largest:g}, in {len(rows)} rows, the "
            f"first is row {int(rows[0])}; use a table from before the training diverged"
        )
    return table


def _check_counts(values: Tensor, table: Tensor) -> Tensor:
    """Return counts as a double tensor ``(V,)`` on the device of the table ``(V, D)``, or UserError."""
    counts = torch.as_tensor(values).to(table.device, torch.float64)
    if counts.shape != (len(table),):
        raise UserError(
            f"token_counts has the shape {tuple(counts.shape)}, but the table has {len(table)} words; "
            "give one number per word"
        )
    if not bool(counts.isfinite().all()) or bool((counts < 0).any()) or not bool((counts > 0).any()):
        raise UserError(
            "token_counts has negative or infinite values, or is zero throughout; give those of a text"
        )
    return counts


def _check_metric(metric: Tensor, table: Tensor) -> Tensor:
    """Return the metric ``(D, D)`` in float32 on the device of the table ``(V, D)``, or UserError."""
    matrix = metric.to(table.device, torch.float32)
    if matrix.shape != (table.size(1), table.size(1)) or not bool(matrix.isfinite().all()):
        raise UserError(
            f"the metric is {tuple(matrix.shape)}, but it must be a finite matrix ({table.size(1)}, "
            f"{table.size(1)}) for this table; calibrate this model"
        )
    matrix = (matrix + matrix.t()) / 2
    ridge = RIDGE * matrix.diagonal().mean().double() * torch.eye(len(matrix), device=matrix.device)
    if int(torch.linalg.cholesky_ex(matrix.double() + ridge).info):
        raise UserError(
            "the metric gives errors a negative cost, or none; it must be a positive semidefinite matrix"
        )
    return matrix
