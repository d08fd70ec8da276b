"""Time and memory of every method's lookup, against ``nn.Embedding``.

Measures the forward and backward pass for ids distributed as in real text, half of them repeats. Times are
medians of warm runs that alternate with the plain layer; peak memory is what the first pass adds to a fresh
process.

    OMP_NUM_THREADS=2 python -m benchmarks.input_layer --threads 2
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.embeddings import Row, Setting, build, words
from benchmarks.measuring import Step, measure_layers
from recipes.common.errors import run_main


def prepare(row: Row, setting: Setting) -> Step:
    """Return a function that runs the forward and backward pass of a row's lookup once."""
    module = build(row, setting)
    ids = words(setting)
    gradient = torch.randn(setting.tokens, setting.dim)

    def step() -> None:
        module(ids).backward(gradient)
        module.zero_grad(set_to_none=True)

    return step


def main(arguments: Sequence[str]) -> None:
    """Measure the input layers of all methods."""
    measure_layers("benchmarks.input_layer", "input layer", __doc__, prepare, arguments)


if __name__ == "__main__":
    raise SystemExit(run_main("input_layer", main))
