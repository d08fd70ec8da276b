"""``--smoke``: the same steps with a tiny network on generated text.

All output goes to the folder ``smoke`` of the recipe's runs. Rows keep the method of their embedding; options
that depend on the vocabulary size become small.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from recipes.common.results import SMOKE_FOLDER
from recipes.common.rows import Row

SMOKE = "--smoke"
SMOKE_HELP = f"use a generated text of a few hundred lines, in a separate folder {SMOKE_FOLDER}"
# Lines of text to train on, and to validate or test on.
LINES, TEST_LINES = 250, 10
# Words and semantic classes of a generated text, and BPE merges.
WORDS, CLASSES, MERGES = 400, 12, 200
# Longest translation in subwords or characters; longer than the desired length of headlines.
LONGEST = 30
CUTOFFS = (60, 120, 180)
# For methods that are fitted by gradient descent.
FIT_STEPS = 20
_BATCH = 256
# Options of embeddings that depend on the vocabulary or the number of steps.
_EMBEDDING = {"num_clusters": 16, "min_rank": 2, "num_classes": CLASSES, "relu_dropout_steps": 2}
# Replaced options of `onmt_train` and `lm_train`; `..._LESS` only if a row has them.
_TRANSLATION: dict[str, Any] = {
    "enc_layers": 1,
    "dec_layers": 1,
    "transformer_ff": 32,
    "train_steps": 4,
    "valid_steps": 2,
    "save_checkpoint_steps": 2,
    "report_every": 1,
    "bucket_size": 256,
    "num_workers": 0,
}
_TRANSLATION_LESS: dict[str, Any] = {"batch_size": _BATCH, "accum_count": [1]}
_SEARCH_LESS = {"beam_size": 2, "n_best": 2}
_MODEL: dict[str, Any] = {"epochs": 2, "batch_size": 4, "sequence_length": 40, "log_every": 5}
_MODEL_LESS: dict[str, Any] = {
    "hidden_dim": 32,
    "num_heads": 2,
    "head_dim": 8,
    "feed_forward_dim": 32,
    "memory_length": 20,
    "clamp_length": 20,
    "target_length": 20,
}
# The first and the last layer of an LSTM may have different widths.
_MODEL_LAYERS = 2
# Options counted in steps.
_IN_STEPS = ("steps", "evaluate_every", "warmup_steps")
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


def smoke_row(row: Row) -> Row:
    """Return a row with a tiny network, an embedding for a small vocabulary, and a few steps."""
    row = replace(row, embedding=smoke_embedding(row), distill=_start(row.distill), fit=_start(row.fit))
    if "model" in row.train:
        return replace(
            row,
            train=_smaller_model(row.train),
            finetune=None if row.finetune is None else _smaller_model(row.finetune),
            evaluate=_less(row.evaluate, _MODEL_LESS),
            data={},
        )
    return replace(
        row,
        train={**_less(row.train, _TRANSLATION_LESS), **_TRANSLATION},
        translate={**_less(row.translate, _SEARCH_LESS), "max_length": LONGEST},
        batch=None if row.batch is None else {"tokens": 2 * _BATCH, "per_gpu": _BATCH},
    )


def _smaller_model(train: dict[str, Any]) -> dict[str, Any]:
    """Return options of ``lm_train`` for a narrow network and two epochs; embedding widths are kept."""
    kept = {name: value for name, value in _less(train, _MODEL_LESS).items() if name not in _IN_STEPS}
    return {**kept, **_MODEL, "num_layers": min(_MODEL_LAYERS, train["num_layers"])}


def _less(options: dict[str, Any], less: dict[str, Any]) -> dict[str, Any]:
    """Replace options by those of `less` with the same names."""
    return {**options, **{name: value for name, value in less.items() if name in options}}


def _start(start: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a row's ``distill`` or ``fit`` with few fitting steps."""
    if start is None or start.get("embedding_start") == "random":
        return start
    return {**start, "fit_steps": FIT_STEPS}


def smoke_embedding(row: Row) -> dict[str, Any]:
    """Return the embedding of a row for the small vocabulary of a generated text."""
    embedding = row.embedding
    own: dict[str, Any] = {name: value for name, value in _EMBEDDING.items() if name in embedding}
    if "cutoffs" in embedding:
        own["cutoffs"] = list(CUTOFFS[: len(embedding["cutoffs"])])
    if embedding["method"] == "group_reduce":
        own["num_groups"] = min(4, embedding["num_groups"])
    if "classes" in embedding and row.batch is not None:
        own["classes"] = classes_file(CLASSES)
    return {**embedding, **own}


def classes_file(number: int) -> str:
    """Return the file name of `number` semantic classes, in recipes with several."""
    return f"classes_{number}.npz"


def generated_words(lines: int, seed: int) -> Iterator[list[str]]:
    """Yield lines of three to fifteen words of a made-up language, sampled by Zipf's law.

    All seeds share the same words.
    """
    words = generated_vocabulary()
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    draw = random.Random(seed)
    for _ in range(lines):
        yield draw.choices(words, weights, k=draw.randint(3, 15))


def generated_vocabulary() -> list[str]:
    """Return `WORDS` distinct words of one to four syllables, short words first."""
    draw = random.Random(0)
    words: dict[str, None] = dict.fromkeys(_SYLLABLES)
    while len(words) < WORDS:
        words["".join(draw.choices(_SYLLABLES, k=draw.randint(2, 4)))] = None
    return list(words)


def generated_pairs(lines: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield sentences of the made-up language, and the same sentences with reversed words."""
    for words in generated_words(lines, seed):
        yield sentence(words), sentence([word[::-1] for word in words])


def sentence(words: Sequence[str]) -> str:
    """Join words to a sentence."""
    return f"{' '.join(words).capitalize()}."
