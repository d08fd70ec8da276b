"""Where the gradients go in the first steps of a language model, by method.

The models are those of the recipe ``ptb_awd_lstm`` that are trained from scratch with about a quarter of the
parameters. All have its network, batches and SGD with clipped gradients, also those that it trains with
another optimizer. Run the recipe's ``preprocess.sh`` first.

    OMP_NUM_THREADS=1 python -m benchmarks.gradients --output benchmarks/results.jsonl \\
        --readme benchmarks/README.md
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.measuring import Record, earlier_record, markdown, parser_of, publish, save_record
from lm.data.corpus import Columns, load_corpus
from lm.models import build
from lm.train.config import parse
from recipes.common.plot import PLAIN, finish, new_figure, style
from recipes.common.recipe import Recipe, Row, find_recipe
from recipes.common.tools import run_main
from recipes.language_model import data_folder
from shared_embeddings.utils.command_line import positive

PICTURE = "gradients.png"
RECIPE, PLAIN_ROW = "ptb_awd_lstm", "small_standard"
_FROM_SCRATCH = "adaptive alone define_half funnel group_reduce projective structured tensor_train uncle"
ROWS = (PLAIN_ROW, *(f"small_{name}" for name in _FROM_SCRATCH.split()))
# Numbers are medians of so many steps.
WINDOW = 25


def measure(recipe: Recipe, row: Row, steps: int) -> Record:
    """The norms of gradients in each window of steps, of each tensor of the embedding and of the network."""
    corpus, settings = load_corpus(data_folder(recipe, row)), recipe.rows[PLAIN_ROW].train
    embedding = recipe.with_files(row.embedding, recipe.home)
    config = parse({**settings, "embedding": embedding, "data": "", "output_dir": ""})
    torch.manual_seed(settings["seed"])
    model = build(config.training.model, corpus.vocabulary.words, embedding, vars(config.model))
    rate, length, largest = (settings[name] for name in ("learning_rate", "sequence_length", "max_grad_norm"))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    columns = Columns(corpus.train, settings["batch_size"])
    state, losses = model.initial_state(settings["batch_size"]), []
    norms: dict[str, list[float]] = {}
    for step in tqdm(range(steps), row.name, disable=None, leave=False):
        inputs, targets = columns.segment(step * length % (columns.length - 1), length)
        hidden, state, penalty = model(inputs, state)
        loss = model.embedding.cross_entropy(hidden, targets)
        optimizer.zero_grad()
        (loss + penalty).backward()
        squares = {"network": 0.0}
        for name, parameter in model.named_parameters():
            part = name.removeprefix("embedding.") if name.startswith("embedding.") else "network"
            square = 0.0 if parameter.grad is None else float(parameter.grad.square().sum())
            squares[part] = squares.get(part, 0.0) + square
        for name, square in squares.items():
            norms.setdefault(name, []).append(math.sqrt(square))
        losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
        optimizer.step()
    return {
        "row": row.name,
        "method": row.embedding["method"],
        "steps": steps,
        "losses": windows(losses),
        "norms": {name: windows(values) for name, values in norms.items()},
    }


def windows(values: Sequence[float]) -> list[float]:
    """The medians of each `WINDOW` values, to four digits."""
    parts = (values[start : start + WINDOW] for start in range(0, len(values), WINDOW))
    return [float(f"{statistics.median(part):.4g}") for part in parts]


def embedding_norms(result: Record) -> list[float]:
    """The norm of the gradient of all tensors of the embedding, by window."""
    tensors = (values for name, values in result["norms"].items() if name != "network")
    return [math.hypot(*values) for values in zip(*tensors, strict=True)]


def draw(results: Sequence[Record], path: Path) -> None:
    """Draw the norm of the embedding's gradient, and its share of the whole one, by step."""
    figure, (left, right) = new_figure(
        2, "Gradients in the first steps of a small language model", shared=False
    )
    for result in results:
        name = PLAIN if result["row"] == PLAIN_ROW else result["method"]
        look, norms = style(name), embedding_norms(result)
        steps = [WINDOW * (number + 0.5) for number in range(len(norms))]
        shares = [
            100 * mine**2 / (mine**2 + other**2)
            for mine, other in zip(norms, result["norms"]["network"], strict=True)
        ]
        for axes, values in ((left, norms), (right, shares)):
            axes.plot(steps, values, **look, markersize=3, linewidth=1, label=name)
    left.set_yscale("log")
    left.set_ylabel("norm of the embedding's gradient")
    right.set_ylabel("its share of the squared norm of all gradients, %")
    for axes in (left, right):
        axes.set_xlabel("step")
    finish(figure, [left, right], path)


def as_text(record: Mapping[str, Any]) -> str:
    """Return the picture, below a table as Markdown.

    It has norms in the first and the last window, and the tensor with most of the embedding's gradient.
    """
    rows = []
    for result in record["measured"]:
        norms, network = embedding_norms(result), result["norms"]["network"]
        tensors = {name: values[-1] for name, values in result["norms"].items() if name != "network"}
        largest = max(tensors, key=tensors.__getitem__)
        rows.append(
            [
                f"`{result['row']}`",
                *(f"{values[at]:.2g}" for at in (0, -1) for values in (norms, network)),
                f"{100 * norms[-1] ** 2 / (norms[-1] ** 2 + network[-1] ** 2):.0f} %",
                f"`{largest}`, {100 * (tensors[largest] / norms[-1]) ** 2:.0f} %" if norms[-1] else "–",
                f"{math.exp(result['losses'][-1]):.0f}",
            ]
        )
    titles = ["row", "embedding, first", "network, first", "embedding, last", "network, last"]
    titles += ["share of the embedding", "largest tensor of it", "perplexity of training"]
    return f"{markdown(titles, rows)}\n\n![norms of gradients by step and method]({PICTURE})"


def main(arguments: Sequence[str]) -> None:
    """Measure the rows that the output file does not have yet, and publish."""
    parser = parser_of("benchmarks.gradients", __doc__)
    parser.add_argument("--steps", type=positive, default=1000, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    recipe = find_recipe(RECIPE)
    record = earlier_record(options.output, "gradients") or {"measured": []}
    for row in (recipe.rows[name] for name in ROWS):
        done = [(result["row"], result["steps"]) for result in record["measured"]]
        if (row.name, options.steps) in done:
            continue
        print(row.name, file=sys.stderr, flush=True)
        record["measured"].append(measure(recipe, row, options.steps))
        record["measured"].sort(key=lambda result: ROWS.index(result["row"]))
        if options.output:
            save_record(options.output, "gradients", record)
    if options.readme:
        draw(record["measured"], options.readme.with_name(PICTURE))
    publish(record, as_text(record), "gradients", options)


if __name__ == "__main__":
    raise SystemExit(run_main("gradients", main))
