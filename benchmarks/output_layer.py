"""Time and memory of every method's output layer, against a plain table that builds all scores.

Measures the forward and backward pass of `cross_entropy` relative to
``F.cross_entropy(hidden @ table.T, targets)``. Times are medians of warm runs that alternate with the plain
layer; peak memory is what the first pass adds to a fresh process.

    OMP_NUM_THREADS=2 python -m benchmarks.output_layer --threads 2
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.embeddings import PADDING, Row, Setting, build, words
from benchmarks.measuring import Step, measure_layers
from recipes.common.errors import run_main


def prepare(row: Row, setting: Setting) -> Step:
    """Return a function that runs the forward and backward pass of a row's loss once."""
    module = build(row, setting)
    hidden = torch.randn(setting.tokens, module.score_dim, requires_grad=True)
    targets = words(setting)

    def step() -> None:
        module.cross_entropy(hidden, targets, ignore_index=PADDING).backward()
        hidden.grad = None
        module.zero_grad(set_to_none=True)

    return step


def main(arguments: Sequence[str]) -> None:
    """Measure the output layers of all methods."""
    measure_layers("benchmarks.output_layer", "output layer", __doc__, prepare, arguments)


if __name__ == "__main__":
    raise SystemExit(run_main("output_layer", main))
