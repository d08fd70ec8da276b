"""What ``--smoke`` does in every recipe: its whole way on a generated text, with few steps of a tiny network.

Everything goes to a folder ``smoke`` below the recipe's own (`SmokeRecipe`), so that no real run is touched.
Each row keeps the method of its embedding; what is counted in words of the vocabulary is made smaller.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.common.config import Row
from recipes.common.recipe import Recipe
from recipes.common.results import SMOKE_FOLDER
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.path_options import PathOption

SMOKE = "--smoke"
SMOKE_HELP = f"a generated text of a few hundred lines, in a folder {SMOKE_FOLDER} of its own"
# Lines of text to train on, and to validate or test on.
LINES, TEST_LINES = 250, 10
# Words and semantic classes that a generated text has; merges of byte pairs that can be learned from it.
WORDS, CLASSES, MERGES = 400, 12, 200
# Longest translation, in pieces or characters; above the length that headlines are asked for.
LONGEST = 30
CUTOFFS = (60, 120, 180)
# What grows with the vocabulary or the steps; `cutoffs` keep their number, and the other options stay.
_EMBEDDING = {"num_clusters": 16, "min_rank": 2, "num_classes": CLASSES, "relu_dropout_steps": 2}
_NETWORK = {"enc_layers": 1, "dec_layers": 1, "transformer_ff": 32}
_TRAINING: dict[str, Any] = {
    "train_steps": 4,
    "valid_steps": 2,
    "save_checkpoint_steps": 2,
    "report_every": 1,
    "bucket_size": 256,
    "num_workers": 0,
}
# Of methods that are fitted to a trained table by gradient descent.
FIT_STEPS = 20
_BATCH = 256
# Where the settings have them.
_LESS: dict[str, Any] = {"batch_size": _BATCH, "accum_count": [1]}
_LESS_SEARCH = {"beam_size": 2, "n_best": 2}
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


class SmokeRecipe(Recipe):
    """A recipe whose runs lie in a folder ``smoke`` of its own."""

    @property
    def home(self) -> Path:
        """``$RUNS/NAME/smoke``."""
        return super().home / SMOKE_FOLDER

    def command(self, script: str, *arguments: str) -> str:
        """As `Recipe.command`, with ``--smoke``."""
        return super().command(script, *arguments, SMOKE)


def parse(recipe: Recipe, usage: str, arguments: Sequence[str]) -> tuple[Recipe, Row, list[str]]:
    """As `Recipe.parse`, and the recipe; with ``--smoke`` among the options, `SmokeRecipe` and `smoke_row`.

    Raises:
        UserError: see `Recipe.parse`.
    """
    row, options = recipe.parse(usage, arguments)
    if SMOKE not in options:
        return recipe, row, options
    return SmokeRecipe(recipe.name), smoke_row(row), [option for option in options if option != SMOKE]


def preprocess_options(
    recipe: Recipe, description: str | None, arguments: Sequence[str]
) -> argparse.Namespace:
    """The options ``settings``, a file, and ``smoke`` of a preprocess.sh that has no others."""
    parser = Parser("preprocess.sh", description=description)
    default = recipe.folder / "data.yaml"
    parser.add_argument("--settings", type=PathOption.FILE, default=default, help="default: %(default)s")
    parser.add_argument(SMOKE, action="store_true", help=SMOKE_HELP)
    return parser.parse_args(arguments)


def smoke_row(row: Row) -> Row:
    """The same row with one narrow layer, an embedding for a small vocabulary, and a few steps."""
    less = {name: value for name, value in _LESS.items() if name in row.train}
    search = {name: value for name, value in _LESS_SEARCH.items() if name in row.translate}
    return replace(
        row,
        embedding=smoke_embedding(row.embedding),
        train={**row.train, **_NETWORK, **_TRAINING, **less},
        translate={**row.translate, **search, "max_length": LONGEST},
        batch=None if row.batch is None else {"tokens": 2 * _BATCH, "per_gpu": _BATCH},
        distill=smoke_start(row.distill),
        fit=smoke_start(row.fit),
    )


def smoke_start(start: dict[str, Any] | None) -> dict[str, Any] | None:
    """What a row says of the row that it starts from, with few steps of a fit where there is one."""
    if start is None or start.get("embedding_start") == "random":
        return start
    return {**start, "fit_steps": FIT_STEPS}


def smoke_embedding(embedding: dict[str, Any]) -> dict[str, Any]:
    """The same method for the few words of a generated text."""
    own: dict[str, Any] = {name: value for name, value in _EMBEDDING.items() if name in embedding}
    if "cutoffs" in embedding:
        own["cutoffs"] = list(CUTOFFS[: len(embedding["cutoffs"])])
    if embedding["method"] == "group_reduce":
        own["num_groups"] = min(4, embedding["num_groups"])
    return {**embedding, **own}


def generated_words(lines: int, seed: int) -> Iterator[list[str]]:
    """Lines of three to fifteen words of a made-up language, drawn as in Zipf's law.

    The words are the same for every seed, so that a test text has words of the training text.
    """
    spoken = generated_vocabulary()
    weights = [1 / rank for rank in range(1, len(spoken) + 1)]
    draw = random.Random(seed)
    for _ in range(lines):
        yield draw.choices(spoken, weights, k=draw.randint(3, 15))


def generated_vocabulary() -> list[str]:
    """`WORDS` different words of one to four syllables, the short ones first."""
    draw = random.Random(0)
    words: dict[str, None] = dict.fromkeys(_SYLLABLES)
    while len(words) < WORDS:
        words["".join(draw.choices(_SYLLABLES, k=draw.randint(2, 4)))] = None
    return list(words)


def generated_pairs(lines: int, seed: int) -> Iterator[tuple[str, str]]:
    """Sentences of the made-up language, and the same with the letters of each word turned round."""
    for words in generated_words(lines, seed):
        yield sentence(words), sentence([word[::-1] for word in words])


def sentence(words: Sequence[str]) -> str:
    """Words as running text."""
    return f"{' '.join(words).capitalize()}."
