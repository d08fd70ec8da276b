"""One fit of an embedding to a trained table, and the default algorithm, gradient descent.

Axes: ``V`` vocabulary, ``D`` model dimension.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from shared_embeddings.nn.layers import evaluating, set_updates
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.progress import BAR_DELAY

Module = TypeVar("Module", bound=nn.Module)

LEARNING_RATE = 5e-3
# Words per pass over a table or per step of gradient descent.
BATCH = 4096
_STEPS = 2000
_STEPS_BETWEEN_EVALUATIONS = 100
# Maximum number of multiplications in all steps, several minutes on one core. If necessary, steps use fewer
# words, and then there are fewer steps.
_PRODUCTS = 10**13
_SMALL_BATCH = 1024
_LEAST_STEPS = 100
# Maximum number of words for evaluating the loss. Fits of more words take minutes and show their progress
# bars immediately.
_EVALUATED = 2**15


@dataclasses.dataclass(frozen=True)
class FitTask:
    """The input of one fit: its arguments are those of `shared_embeddings.fit`, checked."""

    make: Callable[[Mapping[str, Any]], Any]  # builds a new embedding for the table from the method's options
    options: dict[str, Any]  # those that were requested
    # In float32, with a padding row of zeros; for methods that read blocks, in any type without padding.
    teacher: Tensor
    token_counts: Tensor | None
    metric: Tensor | None
    only: Tensor | None
    padding_idx: int | None
    seed: int
    steps: int | None
    learning_rate: float
    progress: bool

    def build(self, options: Mapping[str, Any] | None = None) -> Any:
        """Return a new embedding with the requested or other options, in float32 on the teacher's device."""
        embedding = self.make(self.options if options is None else options)
        return embedding.to(self.teacher.device, torch.float32)

    def words(self) -> Tensor:
        """The ids of all words that have a vector."""
        ids = torch.arange(self.teacher.size(0), device=self.teacher.device)
        return ids if self.padding_idx is None else ids[ids != self.padding_idx]

    def at_unit_scale(self) -> tuple[FitTask, float]:
        """The same task with a teacher of root mean square one, and the divisor that achieves it.

        Steps of gradient descent then have the same effect for teachers of any scale.
        """
        # In blocks, because torch would hold a second table for the squares.
        squares = sum(float(rows.square().sum()) for rows in self.teacher.split(BATCH))
        scale = math.sqrt(squares / self.teacher.numel()) or 1.0
        return dataclasses.replace(self, teacher=self.teacher / scale), scale


def reconstruct(embedding: Module, task: FitTask) -> Module:
    """Minimize the mean of ``||e - ê||`` (Distilled Embedding, Eq. 5) over the words with Adam.

    The learning rate decays to zero along half a cosine. Each epoch shuffles the words. The parameters with
    the lowest loss are kept; it is evaluated at the start and every few steps, on a sample if there are many
    words.

    Raises:
        UserError: no loss is finite.
    """
    parameters = [parameter for parameter in embedding.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=task.learning_rate, fused=True)
    words = task.words()
    steps, batch = (task.steps, BATCH) if task.steps else _steps_within(embedding, words)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1.0 + math.cos(math.pi * step / steps))
    )
    delay = BAR_DELAY if len(words) <= _EVALUATED else 0.0
    bar = tqdm(total=steps, desc="fitting", unit=" steps", delay=delay, disable=not task.progress)
    # No comparison with NaN is true.
    best = min(math.inf, _loss(embedding, task))
    best_state = copy.deepcopy(embedding.state_dict())
    embedding.train()
    generator = torch.Generator().manual_seed(task.seed)
    batches: list[Tensor] = []
    for step in range(1, steps + 1):
        if not batches:
            order = torch.randperm(len(words), generator=generator).to(words.device)
            batches = list(words[order].split(batch))
        ids = batches.pop(0)
        set_updates(embedding, step - 1)
        loss = (embedding(ids) - task.teacher[ids]).norm(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        bar.update()
        if step % _STEPS_BETWEEN_EVALUATIONS == 0 or step == steps:
            current = _loss(embedding, task)
            if current < best:
                best, best_state = current, copy.deepcopy(embedding.state_dict())
            bar.set_postfix(loss=f"{current:.4g}")
    bar.close()
    if best == math.inf:
        raise UserError(
            f"{embedding.method}: no loss of {steps} steps is finite; choose a learning_rate below "
            f"{task.learning_rate:g}"
        )
    embedding.load_state_dict(best_state)
    return embedding


@torch.no_grad()
def _steps_within(embedding: nn.Module, words: Tensor) -> tuple[int, int]:
    """The number of steps that take minutes at most, and the number of words in each."""

    def products(number: int) -> int:
        with FlopCounterMode(display=False) as counter:
            embedding(words[:number])
        # Two operations per multiplication; the backward pass has twice as many as the forward pass.
        return counter.get_total_flops() * 3 // 2

    few, more = products(_SMALL_BATCH // 4), products(_SMALL_BATCH // 2)
    of_words = (more - few) * 4 // _SMALL_BATCH
    shared = max(few - of_words * _SMALL_BATCH // 4, 0)
    if _STEPS * (shared + of_words * BATCH) <= _PRODUCTS:
        return _STEPS, BATCH
    steps = _PRODUCTS // (shared + of_words * _SMALL_BATCH)
    return min(max(steps, _LEAST_STEPS), _STEPS), _SMALL_BATCH


@torch.no_grad()
def _loss(embedding: nn.Module, task: FitTask) -> float:
    """The mean of ``||e - ê||`` over words."""
    words = task.words()
    words = words[:: -(-len(words) // _EVALUATED) or 1]
    with evaluating(embedding):  # without dropout
        total = sum(
            float((embedding(ids) - task.teacher[ids]).norm(dim=1).sum()) for ids in words.split(BATCH)
        )
    return total / max(len(words), 1)
