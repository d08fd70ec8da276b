"""Fitting an embedding to a trained table, so that a model can be shrunk instead of trained anew.

What has a closed form or an algorithm of its own is computed (`shared_embeddings.fitting`); everything else
is found by gradient descent on the reconstruction loss of Distilled Embedding (Eq. 5).

Axes: ``V`` vocabulary, ``D`` model dimension, ``R`` rank.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.layers.dropout import set_updates
from shared_embeddings.registry import build, method_class, options_for_words

# Words per step of gradient descent, and how many steps there are by default.
_BATCH = 4096
_STEPS = 2000
_STEPS_BETWEEN_LOOKS = 100
_LEARNING_RATE = 5e-3
# A bar appears for what takes longer than this, in seconds.
_BAR_DELAY = 2.0


@dataclasses.dataclass(frozen=True)
class FitReport:
    """How well an embedding reconstructs the table that it was fitted to; the padding row does not count.

    Attributes:
        method: the registered name.
        options: its options as plain values, with which it can be built again.
        loss: mean over the words of ``||e - ê||``, the L2 loss of Distilled Embedding, Eq. 5.
        squared_loss: mean over the words of ``||e - ê||**2`` (ALONE, Eq. 4).
        relative_error: ``||E - Ê|| / ||E||`` in the Frobenius norm.
        weighted_error: the same with every word's squares weighted by its count; None without counts.
        parameters: trainable parameters of the embedding.
        stored_bits: what it takes to store it, codes included.
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


@dataclasses.dataclass(frozen=True)
class FitTask:
    """What one fit was asked for.

    Attributes:
        method, options: what to fit.
        teacher: the table ``(V, D)``, float32, its padding row zero.
        token_counts: ``(V,)`` how often each word occurs, or None.
        padding_idx: the word without a vector, or None.
        seed: of everything that is drawn.
        steps, learning_rate: of gradient descent; steps may be None for the default of the algorithm.
        progress: whether long fits show a bar.
    """

    method: str
    options: dict[str, Any]
    teacher: Tensor
    token_counts: Tensor | None
    padding_idx: int | None
    seed: int
    steps: int | None
    learning_rate: float
    progress: bool

    def build(self) -> Any:
        """A new embedding with the options that were asked for, in the teacher's type and on its device."""
        return self.build_with(self.options)

    def build_with(self, options: dict[str, Any]) -> Any:
        """A new embedding of the method with other options, in the teacher's type and on its device."""
        vocabulary, width = self.teacher.shape
        module = build(
            self.method,
            num_embeddings=vocabulary,
            embedding_dim=width,
            padding_idx=self.padding_idx,
            **options,
        )
        return module.to(self.teacher.device, self.teacher.dtype)

    def words(self) -> Tensor:
        """The ids of all words that have a vector."""
        ids = torch.arange(self.teacher.size(0), device=self.teacher.device)
        return ids if self.padding_idx is None else ids[ids != self.padding_idx]

    def at_unit_scale(self) -> tuple[FitTask, float]:
        """The same task for a teacher of root mean square one, and what it is divided by for that.

        Steps of gradient descent then have the same effect whatever the teacher's scale.
        """
        scale = float(self.teacher.square().mean().sqrt()) or 1.0
        return dataclasses.replace(self, teacher=self.teacher / scale), scale


# Whatever the caller computes without gradients, a fit needs them.
@torch.inference_mode(False)
@torch.enable_grad()
def fit(
    method: str,
    teacher: Tensor,
    *,
    token_counts: Tensor | None = None,
    padding_idx: int | None = None,
    words: Sequence[str] | None = None,
    seed: int = 0,
    steps: int | None = None,
    learning_rate: float = _LEARNING_RATE,
    progress: bool = True,
    **options: object,
) -> tuple[SharedEmbedding, FitReport]:
    """Build an embedding and fit it to a trained table.

    Args:
        method: one of `methods()`.
        teacher: the table ``(V, D)`` to reconstruct.
        token_counts: ``(V,)`` how often each word occurs, for methods that weigh words.
        padding_idx: the word without a vector; its row of the teacher is of no account.
        words: the words in the order of their ids, for options that name a file about words, as in `build`.
        seed: of everything that is drawn; the global random state is left as it was.
        steps: of gradient descent, for methods that are fitted by it; a good number when left out.
        learning_rate: of the same, where it goes.
        progress: show a bar for long fits.
        options: the method's own options.

    Returns:
        The embedding, on the teacher's device and in float32, and how well it reconstructs the table.

    Raises:
        OptionError: as in `build`.
        ValueError: a teacher that is no finite table, counts that do not fit it, or steps or a seed that
            cannot be.
    """
    # The fitters need what is defined here.
    from shared_embeddings.fitting import fitters

    embedding_class = method_class(method)
    if steps is not None and (not isinstance(steps, Integral) or steps < 1):
        raise ValueError(f"steps is {steps!r}, but gradient descent needs a whole number of at least 1")
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed is {seed!r}, but it must be a whole number of at most 64 bits")
    table = _checked_teacher(teacher, padding_idx)
    counts = _checked_counts(token_counts, table)
    given = dict(options)
    if words is not None:
        given = options_for_words(embedding_class, given, words, table.size(0))
    task = FitTask(method, given, table, counts, padding_idx, seed, steps, learning_rate, progress)
    started = time.perf_counter()
    cuda = [table.device] if table.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        embedding = fitters.find(method)(task)
    return embedding, report(embedding, table, counts, time.perf_counter() - started)


def report(
    embedding: SharedEmbedding, teacher: Tensor, token_counts: Tensor | None = None, seconds: float = 0.0
) -> FitReport:
    """How well `embedding` reconstructs `teacher` ``(V, D)``; see `FitReport`."""
    total, squares, norm = 0.0, 0.0, 0.0
    weighted, weighted_norm = 0.0, 0.0
    words = _words_of(embedding).to(teacher.device)
    with torch.no_grad():
        for ids in words.split(_BATCH):
            wanted = teacher[ids].double()
            missed = (embedding(ids).double() - wanted).square().sum(dim=1)
            size = wanted.square().sum(dim=1)
            total += float(missed.sqrt().sum())
            squares += float(missed.sum())
            norm += float(size.sum())
            if token_counts is not None:
                weighted += float(missed @ token_counts[ids].double())
                weighted_norm += float(size @ token_counts[ids].double())
    counts = embedding.counts()
    return FitReport(
        method=embedding.method,
        options=embedding.stored_options(),
        loss=total / max(len(words), 1),
        squared_loss=squares / max(len(words), 1),
        relative_error=_relative(squares, norm),
        weighted_error=None if token_counts is None else _relative(weighted, weighted_norm),
        parameters=counts["total"],
        stored_bits=counts["stored_bits"],
        compression=teacher.numel() / max(counts["total"], 1),
        seconds=seconds,
    )


def reconstruct(embedding: SharedEmbedding, task: FitTask) -> SharedEmbedding:
    """Minimise the mean of ``||e - ê||`` (Distilled Embedding, Eq. 5) over the words, with Adam.

    The learning rate falls to zero along half a cosine. Each pass over the words is in a new order. The best
    parameters seen are kept, those of the start included, by the loss over all words every so many steps.
    """
    parameters = [parameter for parameter in embedding.parameters() if parameter.requires_grad]
    optimiser = torch.optim.Adam(parameters, lr=task.learning_rate)
    steps = task.steps or _STEPS
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: 0.5 * (1.0 + math.cos(math.pi * step / steps))
    )
    best, kept = _loss(embedding, task), _copied_state(embedding)
    embedding.train()
    bar = _bar(task, f"fitting {task.method}", steps)
    for step, ids in zip(range(1, steps + 1), _batches(task.words(), task.seed), strict=False):
        set_updates(embedding, step - 1)
        loss = (embedding(ids) - task.teacher[ids]).norm(dim=1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        bar.update()
        if step % _STEPS_BETWEEN_LOOKS == 0 or step == steps:
            found = _loss(embedding, task)
            if found < best:
                best, kept = found, _copied_state(embedding)
            bar.set_postfix(loss=f"{found:.4g}")
    bar.close()
    embedding.load_state_dict(kept)
    return embedding


@torch.no_grad()
def _loss(embedding: SharedEmbedding, task: FitTask) -> float:
    """The mean of ``||e - ê||`` over all words."""
    words = task.words()
    total = sum(float((embedding(ids) - task.teacher[ids]).norm(dim=1).sum()) for ids in words.split(_BATCH))
    return total / max(len(words), 1)


def _copied_state(embedding: SharedEmbedding) -> dict[str, Tensor]:
    """The tensors of `embedding` as they are now."""
    return {name: value.clone() for name, value in embedding.state_dict().items()}


def _batches(words: Tensor, seed: int) -> Iterator[Tensor]:
    """Batches of `words`, pass after pass, each pass shuffled anew from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(words), generator=generator).to(words.device)
        yield from words[order].split(_BATCH)


def _bar(task: FitTask, title: str, total: int) -> Any:
    """A progress bar that appears when the work takes long."""
    return tqdm(total=total, desc=title, unit=" steps", delay=_BAR_DELAY, disable=not task.progress)


def _words_of(embedding: SharedEmbedding) -> Tensor:
    """The ids of all words of `embedding` but its padding word."""
    ids = torch.arange(embedding.num_embeddings)
    return ids if embedding.padding_idx is None else ids[ids != embedding.padding_idx]


def _relative(squares: float, norm: float) -> float:
    """A root of summed squares relative to a norm; 0 when nothing is missed of nothing."""
    return math.sqrt(squares / norm) if norm > 0.0 else float(squares > 0.0)


def _checked_teacher(teacher: Tensor, padding_idx: int | None) -> Tensor:
    """The teacher as a float32 table of its own, its padding row zero; ValueError when it is none."""
    if not isinstance(teacher, Tensor) or teacher.dim() != 2 or 0 in teacher.shape:
        shape = tuple(teacher.shape) if isinstance(teacher, Tensor) else type(teacher).__name__
        raise ValueError(f"the teacher is {shape}, but it must be a table of words by dimensions")
    if teacher.layout != torch.strided or teacher.is_meta:
        kind = "on the meta device" if teacher.is_meta else f"of layout {teacher.layout}"
        raise ValueError(f"the teacher is {kind}, but it must be a dense table with values")
    table = teacher.detach().float().clone()
    # What is no word is for `build` to refuse.
    if isinstance(padding_idx, Integral) and 0 <= padding_idx < len(table):
        table[padding_idx] = 0.0
    broken = (~table.isfinite()).any(dim=1).nonzero().flatten()
    if len(broken):
        raise ValueError(
            f"the teacher has values that are no finite numbers in {len(broken)} rows, the first is row "
            f"{int(broken[0])}; take a table from before the training diverged"
        )
    return table


def _checked_counts(token_counts: Tensor | None, table: Tensor) -> Tensor | None:
    """Counts as a double tensor ``(V,)`` where the table ``(V, D)`` is, or ValueError."""
    if token_counts is None:
        return None
    counts = torch.as_tensor(token_counts).to(table.device, torch.float64)
    if counts.shape != (len(table),):
        raise ValueError(
            f"token_counts has the shape {tuple(counts.shape)}, but the table has {len(table)} words; "
            "give one count per word"
        )
    if not bool(counts.isfinite().all()) or bool((counts < 0).any()) or not bool((counts > 0).any()):
        raise ValueError(
            "token_counts has negative or infinite values, or is zero throughout; give counts of a text"
        )
    return counts
