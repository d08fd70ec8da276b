"""Quantization-aware training of a plain table: the model uses rounded rows, gradients skip the rounding.

The straight-through estimator (Bengio et al., 2013) with the codes of `quantized`. With a `share` below one,
a random part of the words is rounded in each step, as in Quant-Noise (Fan et al., 2020). The option
of hosts is ``embedding_quantization``. The trained model has a plain table, which ``shared-embeddings
compress --method quantized`` with the same options then stores in few bits.

Axes: ``V`` vocabulary, ``D`` dimensions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shared_embeddings.compress.fit import fit
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.modules.quantized import QuantizedOptions
from shared_embeddings.modules.standard import StandardEmbedding
from shared_embeddings.utils.options import (
    OptionError,
    option,
    parse_options,
    plain_options,
    require,
    require_at_least,
)
from shared_embeddings.utils.tracing import without_autocast

OPTION = "embedding_quantization"
EXAMPLE = "{bits: 2, codec: uniform}"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When rows are rounded in training; the other keys of the option are those of `quantized`."""

    quantize_from_step: int = option("The first step with rounded rows.", 0)
    refresh_every: int = option(
        "Steps between searches for codes, which take seconds with codec trellis. In between, "
        "the rounding errors stay the same.",
        1,
    )
    share: float = option("The fraction of words that are rounded in a step, as in Quant-Noise.", 1.0)

    def __post_init__(self) -> None:
        require_at_least("quantize_from_step", self.quantize_from_step, 0)
        require_at_least("refresh_every", self.refresh_every, 1)
        require(
            0 < self.share <= 1, f"option 'share' is {self.share:g}, but it must be above 0 and at most 1"
        )


def parse_quantization(given: Mapping[str, Any]) -> tuple[Schedule, QuantizedOptions]:
    """The parts of the option ``embedding_quantization`` with their defaults."""
    own = {field.name for field in dataclasses.fields(Schedule)}
    for key in ("seed", "words_per_width", "output_bias"):
        if key in given:
            raise OptionError(f"{OPTION}: '{key}' cannot be set here; remove it")
    schedule = parse_options(OPTION, Schedule, {key: given[key] for key in given if key in own})
    options = parse_options(OPTION, QuantizedOptions, {key: given[key] for key in given if key not in own})
    return schedule, options


def check_method(method: str) -> None:
    """Raise `OptionError` unless the method of an embedding is standard."""
    if method != "standard":
        raise OptionError(
            f"{OPTION} rounds the table of method standard, but the embedding is {method}; set "
            "embedding: {method: standard}, or remove the option"
        )


def quantize_in_training(
    embedding: SharedEmbedding,
    given: Mapping[str, Any],
    token_counts: Tensor | None,
    step: Callable[[], int],
    seed: int,
) -> None:
    """Let an embedding of method `standard` use rounded rows in training and in evaluation.

    Args:
        embedding: the embedding to train.
        given: the option ``embedding_quantization``.
        token_counts: ``(V,)`` for the bits of words; None for equal bits.
        step: returns the number of completed training steps.
        seed: the seed for drawing the words that are rounded.
    """
    schedule, options = parse_quantization(given)
    check_method(embedding.method)
    assert isinstance(embedding, StandardEmbedding)
    embedding.effective_table = StraightThrough(embedding, schedule, options, token_counts, step, seed)


@dataclasses.dataclass(eq=False)
class StraightThrough:
    """Computes the rounded table of a plain one; see the module and `quantize_in_training`."""

    embedding: StandardEmbedding
    schedule: Schedule
    options: QuantizedOptions
    token_counts: Tensor | None
    step: Callable[[], int]
    seed: int
    # What the codes were searched for and the rounding errors, in training (True) and in evaluation.
    _kept: dict[bool, tuple[tuple[int, int, int], Tensor]] = dataclasses.field(default_factory=dict)

    def __call__(self, table: Tensor) -> Tensor:
        """The table ``(V, D)`` that the model uses in this step; its gradient is that of `table`."""
        done, every, share = self.step(), self.schedule.refresh_every, self.schedule.share
        if done < self.schedule.quantize_from_step:
            return table
        # One search for codes serves both sides of a step, and all steps until the next search.
        state, mode = (table.data_ptr(), table._version, -1), self.embedding.training
        if mode:
            state = (table.data_ptr(), table._version if every == 1 else 0, done // every)
        if mode not in self._kept or self._kept[mode][0] != state:
            with without_autocast(table.device):
                self._kept[mode] = state, self._rounded(table.detach()) - table.detach()
        error = self._kept[mode][1]
        if not mode or share == 1:
            return table + error
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + done) % 2**63)
        chosen = torch.rand(len(table), 1, generator=generator) < share
        return table + error * chosen.to(error)

    def _rounded(self, table: Tensor) -> Tensor:
        """The rows that `quantized` would store for the table ``(V, D)``."""
        settings: dict[str, Any] = plain_options(self.options)
        found, _ = fit(
            "quantized",
            table.float(),
            token_counts=self.token_counts,
            padding_idx=self.embedding.padding_idx,
            progress=False,
            **settings,
        )
        with torch.no_grad():
            return found.eval().table().to(table)
