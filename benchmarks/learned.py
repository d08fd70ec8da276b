"""What embeddings of trained translation models have learned: the spectrum of the table, and the losses of
frequent and rare words.

The models are those of the recipe ``multi30k_ende`` whose rows are named; run its ``preprocess.sh`` and
``train.sh`` first.

    python -m benchmarks.learned small_standard small_define --output benchmarks/results.jsonl \\
        --readme benchmarks/README.md
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from benchmarks.measuring import Record, earlier_record, markdown, parser_of, publish
from nmt.embeddings import shared_embeddings_of
from nmt.models import build_from_checkpoint
from recipes.common.recipe import Recipe, find_recipe
from recipes.common.tools import read_lines, run_main
from recipes.translation.train import AVERAGED, data_folder

RECIPE = "multi30k_ende"
# The first ranks by frequency of the bands of words.
BANDS = (0, 100, 1000)
_SENTENCES = 64


def measure(recipe: Recipe, name: str) -> Record:
    """The spectrum of a row's table, and the losses of the target side of the validation set."""
    row = recipe.row(name)
    folder = data_folder(recipe, row)
    languages = recipe.describe_data(folder)
    model, vocabs, _, _ = build_from_checkpoint(str(recipe.home / name / AVERAGED))
    (embedding,) = shared_embeddings_of(model)
    sides = [read_lines(folder / f"valid.{languages[side]}") for side in ("source", "target")]
    words = [line.split(" ")[0] for line in read_lines(folder / "vocabulary")]
    with torch.no_grad():
        losses = target_losses(model, vocabs["tgt"], *sides)
        return {
            "row": name,
            "method": row.embedding["method"],
            "parameters": embedding.counts()["total"],
            **spectrum(embedding.table()),
            "losses": by_frequency(losses, words),
        }


def spectrum(table: Tensor) -> dict[str, float]:
    """Of a table ``(V, D)``: the part of its energy that all words have in common, and how many directions
    the rest has, as the exponential of the entropy of its energies (Roy & Vetterli, 2007).
    """
    rows = table.double()
    mean = rows.mean(dim=0)
    energies = torch.linalg.svdvals(rows - mean).square()
    shares = energies / energies.sum()
    return {
        "common": float(len(rows) * mean.square().sum() / rows.square().sum()),
        "directions": float(torch.special.entr(shares).sum().exp()),
    }


def target_losses(
    model: Any, vocabulary: Any, sources: Sequence[str], targets: Sequence[str]
) -> list[tuple[str, float]]:
    """Each word of the targets with the negative logarithm of its probability, without ends of sentences."""
    losses: list[tuple[str, float]] = []
    for start in tqdm(range(0, len(sources), _SENTENCES), "sentences", leave=False, disable=None):
        end = start + _SENTENCES
        read, written = ([line.split(" ") for line in side[start:end]] for side in (sources, targets))
        source, target = (
            pad_sequence(
                [torch.tensor([vocabulary[word] for word in words]) for words in sentences],
                batch_first=True,
                padding_value=vocabulary["<blank>"],
            )[..., None]
            for sentences in (read, [["<s>", *words, "</s>"] for words in written])
        )
        hidden, _ = model(source, target, torch.tensor([len(words) for words in read]))
        scores = torch.log_softmax(model.generator(hidden), dim=-1)
        for row, words in enumerate(written):
            ids = torch.tensor([vocabulary[word] for word in words])
            values = scores[row, torch.arange(len(words)), ids]
            losses += zip(words, (-values).tolist(), strict=True)
    return losses


def by_frequency(losses: Sequence[tuple[str, float]], words: Sequence[str]) -> list[float]:
    """The mean loss of the words in each of `BANDS`, with `words` by frequency; then that of all."""
    ranks = {word: rank for rank, word in enumerate(words)}
    bands: list[list[float]] = [[] for _ in BANDS]
    for word, loss in losses:
        bands[sum(ranks.get(word, len(ranks)) >= first for first in BANDS) - 1].append(loss)
    return [math.fsum(band) / max(1, len(band)) for band in (*bands, [loss for _, loss in losses])]


def as_text(record: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    rows = [
        [
            f"`{result['row']}`",
            f"{result['parameters'] / 1e6:.2f} M",
            f"{100 * result['common']:.0f} %",
            f"{result['directions']:.0f}",
            *(f"{loss:.2f}" for loss in result["losses"]),
        ]
        for result in record["measured"]
    ]
    bands = [f"words {first + 1:,} to {last:,}" for first, last in zip(BANDS, BANDS[1:], strict=False)]
    titles = ["row", "parameters", "in common", "directions", *bands, "rarer words", "all words"]
    return markdown(titles, rows)


def main(arguments: Sequence[str]) -> None:
    """Measure rows, keep what the output file has of others, and publish."""
    parser = parser_of("benchmarks.learned", __doc__)
    parser.add_argument("rows", nargs="+", help="trained rows of the recipe")
    options = parser.parse_args(arguments)
    recipe = find_recipe(RECIPE)
    earlier = (earlier_record(options.output, "learned") or {"measured": []})["measured"]
    measured = {result["row"]: result for result in earlier}
    for name in options.rows:
        measured[name] = measure(recipe, name)
    record = {"measured": [measured[name] for name in recipe.rows if name in measured]}
    publish(record, as_text(record), "learned", options)


if __name__ == "__main__":
    raise SystemExit(run_main("learned", main))
