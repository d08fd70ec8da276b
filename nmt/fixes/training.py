"""Fixes of training: several processes, on GPUs or CPUs, and stopping."""

from __future__ import annotations

import copy
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onmt.utils.distributed
import onmt.utils.misc
import torch
from onmt.inputters import dynamic_iterator
from onmt.modules.embeddings import PositionalEncoding
from onmt.trainer import Trainer
from onmt.utils import earlystopping
from onmt.utils.earlystopping import EarlyStopping
from onmt.utils.scoring_utils import ScoringPreparator
from torch import Tensor

from nmt.corpora import read_lines
from nmt.fixes import replace, wrap
from nmt.train.batches import Batches, end_workers
from nmt.transforms import NEEDING_TARGETS
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_lines

# Applies the fixes in data loader workers, too.
replace("DynamicDatasetIter", dynamic_iterator)(Batches)


class MetricScorer(earlystopping.Scorer):  # type: ignore[misc]
    """A metric of ``valid_metrics`` as a criterion of early stopping."""

    def __init__(self, metric: str) -> None:
        # Unlike BLEU, TER counts errors.
        self.metric, self.sign = metric, -1.0 if metric == "TER" else 1.0
        super().__init__(-self.sign * float("inf"), metric.lower())

    def _caller(self, stats: Any) -> float:
        return float(stats.computed_metrics[self.metric])

    def is_improving(self, stats: Any) -> bool:
        """Return whether the metric is better than the best one."""
        return self.sign * self(stats) > self.sign * self.best_score

    def is_decreasing(self, stats: Any) -> bool:
        """Return whether the metric is worse than the best one."""
        return self.sign * self(stats) < self.sign * self.best_score


@wrap("scorers_from_opts", earlystopping)
def support_metrics(original: Any, opt: Namespace) -> list[Any]:
    """Support the metrics of validation (BLEU, TER) as ``early_stopping_criteria``."""
    if "valid" not in opt.data:
        raise UserError("early_stopping: needs validation; add data: {valid: {path_src: ..., path_tgt: ...}}")
    criteria = opt.early_stopping_criteria or []
    metrics = {name.upper() for name in criteria if name.upper() in ("BLEU", "TER")}
    if not metrics:
        return original(opt)  # type: ignore[no-any-return]
    for name in metrics - set(opt.valid_metrics):
        raise UserError(f"early_stopping_criteria: {name.lower()} needs valid_metrics: [{name}]; set it")
    others = [name for name in criteria if name.upper() not in metrics]
    return [*original(Namespace(early_stopping_criteria=others)), *map(MetricScorer, sorted(metrics))]


@wrap("translate", ScoringPreparator)
def score_pairs(original: Any, self: Any, model: Any, gpu_rank: int, step: int) -> Any:
    """Translate the validation pairs with text on both sides for ``valid_metrics``; also compressed ones.

    OpenNMT-py compares them with other lines if one side is empty, and needs targets for some transforms.
    """
    valid = dict(self.opt.data["valid"])
    with tempfile.TemporaryDirectory() as folder:
        pairs = zip(read_lines(valid["path_src"]), read_lines(valid["path_tgt"]))
        filled = [pair for pair in pairs if all(pair)]
        for side, lines in zip(("path_src", "path_tgt"), zip(*filled)):
            valid[side] = os.path.join(folder, side)
            write_lines(Path(valid[side]), lines)
        valid["transforms"] = [name for name in valid["transforms"] if name not in NEEDING_TARGETS]
        scored = copy.copy(self)
        scored.opt = Namespace(**{**vars(self.opt), "data": {"valid": valid}})
        return original(scored, model, gpu_rank, step)


@wrap("has_stopped", EarlyStopping)
def stop_all_ranks(original: Any, self: Any) -> bool:
    """Let the first rank, the only one that validates, stop early together with the others."""
    self.ends = original(self)
    return self.ends and not torch.distributed.is_initialized()


@wrap("_accum_batches", Trainer)
def end_at_same_step(original: Any, self: Any, iterator: Any) -> Iterator[Any]:
    """End the batches of all ranks after the same step, at a signal or early; it is then saved."""
    has_begun = False
    for batches in original(self, iterator):
        stops = self.must_stop() or getattr(self.earlystopper, "ends", False)
        if torch.distributed.is_initialized():
            device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
            votes = torch.tensor([int(stops)], device=device)
            torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX)
            stops = bool(votes)
        if stops:
            end_workers()
            if not has_begun:
                self.model_saver = None  # there is nothing to save
            return
        has_begun = True
        iterator.mark()  # batches of a step that is not made do not count as read
        yield batches


@wrap("_update_average", Trainer)
def average_by_step(original: Any, self: Any, step: int) -> None:
    """Count the steps of ``average_every`` from the start of the run instead of the process."""
    if (step - 1) % self.average_interval == 0:
        original(self, step)


@wrap("use_gpu", onmt.utils.misc)
def train_on_cpu(original: Any, opt: Namespace) -> bool:
    """Train ranks on the CPU if the backend is gloo and there is no GPU."""
    on_cpu = getattr(opt, "gpu_backend", "") == "gloo" and not torch.cuda.is_available()
    return not on_cpu and bool(original(opt))


@wrap("build_dynamic_dataset_iter", dynamic_iterator)
def keep_batches_on_cpu(original: Any, *args: Any, device_id: int = -1, **kwargs: Any) -> Any:
    """Keep batches on the CPU if there is no GPU."""
    return original(*args, device_id=device_id if torch.cuda.is_available() else -1, **kwargs)


@replace("all_gather_list", onmt.utils.distributed)
def all_gather_list(data: Any, max_size: int = 4096) -> list[Any]:
    """Gather Python objects over any backend; OpenNMT-py needs a GPU and a maximum size."""
    results: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(results, data)
    return results


@wrap("all_reduce_and_rescale_tensors", onmt.utils.distributed)
def sum_gradients(
    original: Any, tensors: list[Tensor], rescale_denom: float, buffer_size: int = 104857600
) -> Any:
    """Do not divide gradients by the number of processes: losses are divided by the tokens of all of them."""
    return original(tensors, 1.0, buffer_size)


@wrap("forward", PositionalEncoding)
def extend_sinusoids(original: Any, self: Any, emb: Tensor, step: int | None = None) -> Any:
    """Extend the sinusoids when a sentence is longer than their table, where an error is raised."""
    needed = (step or 0) + emb.size(1)
    if needed > self.pe.size(0):
        # Tables (T, 1, D) with all sines first; interleaved ones have cos(0) in column 1.
        is_concatenated = self.pe.size(-1) > 2 and float(self.pe[0, 0, 1]) == 0.0
        kind = "SinusoidalConcat" if is_concatenated else "SinusoidalInterleaved"
        self.pe = type(self)(self.dim, kind, max_len=2 * needed).pe.to(self.pe)
    return original(self, emb, step)
