"""Training speed of an AWD-LSTM, against plain ``nn.LSTM`` layers of the same shape without regularization.

The sizes are those of the Penn Treebank: 10,000 words, three layers of 1150 units on vectors of 400, batches
of 20 x 70 tokens. A step is a forward and backward pass and an SGD update. Both models have the same
embedding and softmax, and their steps alternate. A CUDA device is measured after the CPU if there is one. If
other programs use the CPU at the same time, compare the CPU time with one thread.

    OMP_NUM_THREADS=1 python -m benchmarks.language_model --threads 1
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.layers import Setting, words
from benchmarks.measuring import Step, markdown, median_clocks, parser_of, publish
from lm.models import LanguageModel, Output, State, build
from recipes.common.table import NOT_RUN
from recipes.common.tools import run_main

VOCABULARY, BATCH, TIME = 10000, 20, 70
TOKENS = BATCH * TIME
DEVICES = ("cpu", "cuda")


class PlainLSTM(LanguageModel):
    """The layers of a language model as plain ``nn.LSTM`` layers; shares the embedding of that model."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model.embedding, model.options)
        self.widths = [part.size(2) for part in model.initial_state(1)[::2]]
        inputs = [model.options.embedding_dim, *self.widths]
        self.layers = nn.ModuleList(nn.LSTM(a, b, batch_first=True) for a, b in zip(inputs, self.widths))

    def initial_state(self, batch_size: int) -> State:
        device = next(self.parameters()).device
        sizes = [width for width in self.widths for _ in range(2)]
        return tuple(torch.zeros(1, batch_size, width, device=device) for width in sizes)

    def forward(self, ids: Tensor, state: State) -> Output:
        hidden = self.embedding(ids)
        after: list[Tensor] = []
        for layer, *before in zip(self.layers, state[0::2], state[1::2]):
            hidden, layer_state = layer(hidden, tuple(before))
            after += [part.detach() for part in layer_state]
        return Output(hidden, tuple(after), hidden.new_zeros(()))


def training_step(model: LanguageModel, device: str) -> Step:
    """Return a function that trains a model on one segment, starting from the last state.

    Word ids have frequencies as in real text.
    """
    setting = Setting("language model", VOCABULARY, 0, BATCH * (TIME + 1))
    ids = words(setting).view(BATCH, TIME + 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = ids[:, :-1], ids[:, 1:].contiguous()
    state = model.initial_state(BATCH)

    def step() -> None:
        nonlocal state
        hidden, state, penalty = model(inputs, state)
        optimizer.zero_grad(set_to_none=True)
        (model.embedding.cross_entropy(hidden, targets) + penalty).backward()
        optimizer.step()
        if ids.is_cuda:
            torch.cuda.synchronize()

    return step


def models(device: str) -> list[LanguageModel]:
    """Build the AWD-LSTM of the Penn Treebank and plain layers of its shape, each with its own embedding."""
    names = [f"word{number}" for number in range(VOCABULARY)]
    torch.manual_seed(0)
    embedding = {"method": "standard", "output_bias": True}
    regularized, other = (build("awd_lstm", names, embedding, {}) for _ in range(2))
    return [regularized.to(device), PlainLSTM(other).to(device)]


def measure(device: str, repeats: int) -> dict[str, Any]:
    """Measure a training step of both models on a device."""
    print(f"measuring on {device} ...", file=sys.stderr, flush=True)
    clocks = median_clocks([training_step(model, device) for model in models(device)], repeats)
    regularized, plain = ({"seconds": wall, "processor_seconds": cpu} for wall, cpu in clocks)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"device": device, "name": name, "awd_lstm": regularized, "plain": plain}


def as_table(measured: list[dict[str, Any]]) -> str:
    """Format tokens per second and ratios on every device as a Markdown table."""
    rows = []
    for device in DEVICES:
        results = [result for result in measured if result["device"] == device]
        if not results:
            rows.append([device.upper(), *[NOT_RUN] * 4])
            continue
        plain, regularized = results[0]["plain"], results[0]["awd_lstm"]
        speeds = [TOKENS / model["seconds"] for model in (plain, regularized)]
        # CPU time does not include a GPU's work.
        processor = f"{plain['processor_seconds'] / regularized['processor_seconds']:.2f}"
        cells = [results[0]["name"], *(f"{speed:,.0f}" for speed in speeds), f"{speeds[1] / speeds[0]:.2f}"]
        rows.append([*cells, processor if device == "cpu" else "–"])
    titles = ["device", "plain LSTM, tokens/s", "AWD-LSTM, tokens/s", "ratio", "ratio of CPU time"]
    return markdown(titles, rows)


def main(arguments: Sequence[str]) -> None:
    """Measure and publish."""
    parser = parser_of("benchmarks.language_model", __doc__, threads=min(2, os.cpu_count() or 1))
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    devices = DEVICES if torch.cuda.is_available() else DEVICES[:1]
    record: dict[str, Any] = {"threads": options.threads, "repeats": options.repeats}
    record |= {"torch": torch.__version__}
    record["measured"] = [measure(device, options.repeats) for device in devices]
    text = as_table(record["measured"])
    text += f"\n\nThreads on the CPU: {record['threads']}; torch {record['torch']}."
    publish(record, text, "language model", options)


if __name__ == "__main__":
    raise SystemExit(run_main("language_model", main))
