"""The whole way of a recipe on a generated text and a tiny network, to see that all of it works."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.common.config import Row
from recipes.common.corpus import write_lines
from recipes.common.recipe import Recipe
from recipes.published.settings import Settings

SMOKE = "--smoke"
PAIRS, TEST_PAIRS = 250, 10
SMOKE_CLASSES = 12
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
# What cannot be larger than the small vocabulary; every other option of an embedding stays as it is.
_EMBEDDING: dict[str, Any] = {"cutoffs": [60, 120], "num_clusters": 16, "num_groups": 4, "min_rank": 2}
_NETWORK = {"enc_layers": 1, "dec_layers": 1, "transformer_ff": 32}
_TRAINING = {
    "train_steps": 4,
    "valid_steps": 2,
    "save_checkpoint_steps": 2,
    "report_every": 1,
    "warmup_steps": 2,
}


class SmokeRecipe(Recipe):
    """A recipe whose runs lie in a folder ``smoke`` of its own."""

    @property
    def home(self) -> Path:
        """``$RUNS/NAME/smoke``."""
        return super().home / "smoke"


def smoke_recipe(recipe: Recipe) -> Recipe:
    """The same recipe with runs of its own."""
    return SmokeRecipe(recipe.name)


def smoke_row(row: Row) -> Row:
    """The same row with one narrow layer, an embedding for a small vocabulary, and a few steps."""
    own = {name: value for name, value in _EMBEDDING.items() if name in row.embedding}
    if row.embedding["method"] == "structured":
        own.pop("num_groups")
    if "classes" in row.embedding or row.embedding.get("random_classes"):
        own["num_classes"] = SMOKE_CLASSES
    train = {**row.train, **_NETWORK, **_TRAINING, "num_workers": 0, "bucket_size": 256}
    train.pop("model_dtype", None)
    batch = {"tokens": 512, "per_gpu": 256}
    translate = {**row.translate, "max_length": 20}
    return replace(row, embedding={**row.embedding, **own}, train=train, batch=batch, translate=translate)


def write_smoke_texts(folder: Path, settings: Settings) -> None:
    """Write plain files for the training text and every test set of `settings`."""
    for name, pairs in ("train", PAIRS), *((texts.name, TEST_PAIRS) for texts in settings.tests):
        drawn = list(generated_pairs(pairs, seed=len(name)))
        for side, language in enumerate(settings.languages):
            write_lines(folder / f"{name}.{language}", (pair[side] for pair in drawn))


def generated_pairs(pairs: int, seed: int, words: int = 400) -> Any:
    """Pairs of a made-up language and the same with its syllables turned round; words as in Zipf's law."""
    draw = random.Random(seed)
    weights = [1 / rank for rank in range(1, words + 1)]
    spoken = ["".join(draw.choices(_SYLLABLES, k=draw.randint(1, 4))) for _ in range(words)]
    for _ in range(pairs):
        sentence = draw.choices(spoken, weights, k=draw.randint(3, 15))
        yield (
            f"{' '.join(sentence).capitalize()}.",
            f"{' '.join(word[::-1] for word in sentence).capitalize()}.",
        )
