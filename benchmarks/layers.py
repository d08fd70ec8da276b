"""Time and memory of every method's input and output layer, against a plain table.

``input``: forward and backward pass of a lookup, against ``nn.Embedding``, for ids distributed as in real
text. ``output``: forward and backward pass of `cross_entropy`, against
``F.cross_entropy(hidden @ table.T, targets)``, which builds all scores. Times are medians of warm runs that
alternate with the plain layer; peak memory is what the first pass adds to a fresh process.

    OMP_NUM_THREADS=2 python -m benchmarks.layers output --threads 2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import shared_embeddings as se
from benchmarks.measuring import (
    Step,
    added_peak,
    in_fresh_process,
    markdown,
    median_times,
    parser_of,
    publish,
)
from recipes.common.tools import run_main

DENSE = "plain table"
# Losses of a plain table by other code, for GPUs, with the package that has each.
FUSED = {
    "linear_cross_entropy of torch": "torch",
    "Liger": "liger_kernel",
    "cut-cross-entropy": "cut_cross_entropy",
}
PADDING = 1
COLUMNS = {
    "time_ratio": ("time, ratio", 2),
    "limit_ratio": ("products alone, ratio", 2),
    "peak_mib": ("peak memory, MiB", 0),
    "peak_ratio": ("peak memory, ratio", 3),
}


class LayerRow(NamedTuple):
    """One embedding to measure."""

    name: str
    method: str
    options: dict[str, Any]


class Setting(NamedTuple):
    """The sizes V, D and N."""

    name: str
    vocab_size: int
    dim: int
    tokens: int


PLAIN = LayerRow(DENSE, DENSE, {})
SETTINGS = {
    "translation": Setting("translation", 37000, 512, 4096),
    "language model": Setting("language model", 267735, 512, 1024),
    "tiny": Setting("tiny", 3000, 512, 64),
}


class Dense(nn.Module):
    """``nn.Embedding`` with a tied softmax that builds all scores, or with the loss of `FUSED` code."""

    def __init__(self, name: str, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.name, self.score_dim = name, dim
        self.weight = nn.Parameter(torch.randn(vocab_size, dim) * dim**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight, PADDING)

    def cross_entropy(self, hidden: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        """The mean loss of hidden ``(N, D)`` and targets ``(N,)``."""
        if self.name == DENSE:
            return F.cross_entropy(hidden @ self.weight.T, targets, ignore_index=ignore_index)
        loss: Tensor
        with torch.autocast(hidden.device.type, enabled=False):
            table = self.weight.to(hidden.dtype)
            if self.name == "Liger":
                from liger_kernel.transformers.fused_linear_cross_entropy import (
                    LigerFusedLinearCrossEntropyLoss,
                )

                loss = LigerFusedLinearCrossEntropyLoss(ignore_index=ignore_index)(table, hidden, targets)
            elif self.name == "cut-cross-entropy":
                from cut_cross_entropy import linear_cross_entropy

                loss = linear_cross_entropy(hidden, table, targets, ignore_index=ignore_index)
            else:
                options = nn.LinearCrossEntropyOptions()
                loss = F.linear_cross_entropy(
                    hidden, table, targets, ignore_index=ignore_index, options=options
                )
        return loss


def rows(setting: Setting, methods: Sequence[str]) -> list[LayerRow]:
    """The examples of each of `methods`."""
    examples: list[LayerRow] = []
    for method in methods:
        presets = se.get_method_config(method).presets(setting.vocab_size, setting.dim)
        for label, options in presets.examples.items():
            examples.append(LayerRow(f"{method}, {label}" if label else method, method, options))
    return examples


def words(setting: Setting) -> Tensor:
    """Draw ``(N,)`` word ids from Zipf's law: the frequency of id i is proportional to 1 / (i + 1)."""
    generator = torch.Generator().manual_seed(0)
    frequencies = 1.0 / torch.arange(1, setting.vocab_size + 1, dtype=torch.float64)
    return torch.multinomial(frequencies, setting.tokens, replacement=True, generator=generator)


def layer_step(
    side: str, row: LayerRow, setting: Setting, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Step:
    """Return a function that runs the forward and backward pass of a row's lookup or loss, under autocast.

    Weights are drawn with a fixed seed.
    """
    vocab_size, dim = setting.vocab_size, setting.dim
    torch.manual_seed(0)
    module: Any
    if row.method == DENSE or row.method in FUSED:
        module = Dense(row.method, vocab_size, dim)
    else:
        sizes: dict[str, Any] = {"num_embeddings": vocab_size, "embedding_dim": dim, "padding_idx": PADDING}
        module = se.build(row.method, **sizes, **row.options)
    module.to(device)
    ids = words(setting).to(device)
    is_input = side == "input"
    # Of the input layer, the gradient of its vectors.
    hidden = torch.randn(setting.tokens, dim if is_input else module.score_dim, device=device, dtype=dtype)
    hidden.requires_grad_(not is_input)

    def step() -> None:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            output = module(ids) if is_input else module.cross_entropy(hidden, ids, ignore_index=PADDING)
        output.backward(hidden.to(output.dtype) if is_input else None)
        hidden.grad = None
        module.zero_grad(set_to_none=True)

    return step


def operations(step: Step) -> int:
    """Floating-point operations of the matrix products in a step."""
    # The counter lacks the in-place product.
    addmm = {torch.ops.aten.addmm_: lambda total, left, right, **_: 2 * left[0] * left[1] * right[1]}
    counter = FlopCounterMode(display=False, custom_mapping=addmm)
    with counter:
        step()
    return counter.get_total_flops()


def measure(
    side: str, setting: Setting, methods: Sequence[str], threads: int, repeats: int
) -> dict[str, Any]:
    """Measure times and memory of the plain layer and of the rows of `methods` in one setting."""
    # Operations per second of a large matrix product into an allocated buffer.
    left, right, result = torch.randn(2048, 2048), torch.randn(2048, 2048), torch.empty(2048, 2048)
    speed = 2.0 * 2048**3 / median_times([lambda: torch.mm(left, right, out=result)], 5)[0]
    results = []
    for row in [PLAIN, *rows(setting, methods)]:
        print(f"{setting.name}: measuring {row.name} ...", file=sys.stderr, flush=True)
        steps = [layer_step(side, compared, setting) for compared in (row, PLAIN)]
        seconds, plain_seconds = median_times(steps, repeats)
        apart = ["--peak-of", json.dumps(row), "--settings", setting.name, "--threads", threads]
        results.append(
            {
                "name": row.name,
                "options": row.options,
                "seconds": seconds,
                "plain_seconds": plain_seconds,
                "needed_seconds": operations(steps[0]) / speed,
                "peak_bytes": in_fresh_process("benchmarks.layers", side, *apart),
            }
        )
    return {"setting": setting._asdict(), "product_speed": speed, "results": results}


def with_ratios(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Add to the results of one setting their ratios to the plain layer.

    Every row is compared with the plain layer that alternated with it. If that layer's time varies a lot,
    because the memory of its gradient is not always at hand, its median over all rows is used instead.
    """
    results = measured["results"]
    taken = [result["plain_seconds"] for result in results]
    # Within a factor of two is noise of the machine.
    median = statistics.median(taken) if max(taken) > 2 * min(taken) else None
    plain_peak = next(result["peak_bytes"] for result in results if result["name"] == DENSE)
    return [
        {
            **result,
            "time_ratio": result["seconds"] / (median or result["plain_seconds"]),
            "limit_ratio": result["needed_seconds"] / (median or result["plain_seconds"]),
            "peak_mib": result["peak_bytes"] / 2**20,
            "peak_ratio": result["peak_bytes"] / plain_peak,
        }
        for result in results
    ]


def as_text(record: dict[str, Any]) -> str:
    """Return a table for each setting, with its sizes and the plain layer's times."""
    parts = []
    for measured in record["measured"]:
        sizes, results = measured["setting"], measured["results"]
        taken = sorted(1000 * result["plain_seconds"] for result in results)
        rows = [
            [result["name"], *(f"{result[key]:.{digits}f}" for key, (_, digits) in COLUMNS.items())]
            for result in with_ratios(measured)
        ]
        parts += [
            f"V = {sizes['vocab_size']:,}, D = {sizes['dim']}, N = {sizes['tokens']:,}",
            markdown(["embedding", *(title for title, _ in COLUMNS.values())], rows),
            f"The plain layer took {statistics.median(taken):,.0f} ms ({taken[0]:,.0f} to {taken[-1]:,.0f} "
            "across the rows).",
        ]
    return "\n\n".join([*parts, f"Threads: {record['threads']}; torch {record['torch']}."])


def main(arguments: Sequence[str]) -> None:
    """Measure and publish."""
    parser = parser_of("benchmarks.layers", __doc__, threads=min(2, os.cpu_count() or 1))
    parser.add_argument("side", choices=("input", "output"))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=("translation", "language model"))
    parser.add_argument("--methods", nargs="+", choices=se.methods(), default=se.methods())
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.peak_of:
        (name,) = options.settings
        row = LayerRow(*json.loads(options.peak_of))
        print(added_peak(layer_step(options.side, row, SETTINGS[name])))
        return
    how = options.methods, options.threads, options.repeats
    measured = [measure(options.side, SETTINGS[name], *how) for name in options.settings]
    record: dict[str, Any] = {"threads": options.threads, "repeats": options.repeats}
    record |= {"torch": torch.__version__, "measured": measured}
    publish(record, as_text(record), f"{options.side} layer", options)


if __name__ == "__main__":
    raise SystemExit(run_main("layers", main))
