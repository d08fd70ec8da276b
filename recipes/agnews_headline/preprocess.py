"""AG News to headlines: a split that does not depend on the order of the file, subwords and characters."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from recipes.agnews_headline.news import News, clean_news, hash_of, read_news
from recipes.common.corpus import with_progress
from recipes.common.errors import UserError
from recipes.common.recipe import Recipe, preprocess_options
from recipes.common.smoke import (
    LINES,
    MERGES,
    TEST_LINES,
    generated_words,
    sentence,
)
from recipes.common.steps import run_step
from recipes.headlines.data import describe, encode, read_settings, text_files, write_split
from recipes.translation.moses import Tokenizer
from shared_embeddings.utils.download import download, verify
from shared_embeddings.utils.files import replacing

KINDS = {
    "valid": int,
    "test": int,
    "source_words": int,
    "bpe_operations": int,
    "lengths": list,
    "file": str,
    "url": str,
    "sha256": str,
}


def locate(settings: dict[str, Any], home: Path) -> Path:
    """The file in ``$DATA_DIR/ag_news``, or downloaded; its checksum is right."""
    name, data_dir = settings["file"], os.environ.get("DATA_DIR")
    own = Path(data_dir) / "ag_news" / name if data_dir else None
    path = own if own and own.is_file() else home / "raw" / name
    if path.is_file():
        verify(path, settings["sha256"])
    else:
        advice = f"when offline, put {name} into $DATA_DIR/ag_news and run again"
        download(f"{settings['url']}/{name}", path, settings["sha256"], advice)
    return path


def split_news(news: list[News], valid: int, test: int) -> dict[str, list[News]]:
    """Cleaned pairs by split, each in the order of the hashes of what they were.

    Of pairs with the same description only the one with the smallest hash is kept, so that no text is in two
    splits; pairs without a description or a title are left out.
    """
    kept: dict[str, News] = {}
    for pair in sorted(news, key=hash_of):
        cleaned = clean_news(pair)
        if all(cleaned):
            kept.setdefault(cleaned.description, cleaned)
    pairs = list(kept.values())
    if len(pairs) <= valid + test:
        raise UserError(f"{len(pairs)} pairs are too few for {valid} to validate on and {test} to test on")
    return {"test": pairs[:test], "valid": pairs[test : test + valid], "train": pairs[test + valid :]}


def write_texts(path: Path, settings: dict[str, Any], folder: Path) -> None:
    """Split, clean and tokenize; see `recipes.headlines.data.write_split`."""
    tokenizer = Tokenizer("en")
    for split, pairs in split_news(read_news(path), settings["valid"], settings["test"]).items():
        texts = with_progress([pair.description for pair in pairs], split)
        words = [tokenizer.tokenize(text).split()[: settings["source_words"]] for text in texts]
        write_split(folder, split, [" ".join(each) for each in words], [pair.title for pair in pairs])


def prepare(path: Path, settings: dict[str, Any], folder: Path) -> None:
    """All steps from the table to ``data.json``, which describes the outcome."""
    references = [folder / "text" / "test.target"]
    run_step(
        "texts",
        folder / "steps",
        partial(write_texts, path, settings, folder),
        inputs=[path],
        outputs=[*text_files(folder), *references],
        settings={name: settings[name] for name in ("valid", "test", "source_words")},
    )
    encode(folder, settings["bpe_operations"])
    describe(folder, references, lengths=settings["lengths"])


def smoke_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The same steps for a generated table, at one length that its short titles have."""
    return {**settings, "valid": TEST_LINES, "test": TEST_LINES, "bpe_operations": MERGES, "lengths": [20]}


def write_smoke_table(path: Path) -> None:
    """Write a generated table as AG News is: class, title and description, all in quotation marks."""
    rows = []
    for number, words in enumerate(generated_words(LINES, seed=0)):
        rows.append([number % 4 + 1, f"{sentence(words[:3])} (AP)", f"AP - {sentence(words)} #36;{number}"])
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare AG News below $RUNS/agnews_headline/data, from $DATA_DIR/ag_news or from the network."""
    options = preprocess_options(recipe, main.__doc__, arguments)
    settings = read_settings(options.settings, KINDS)
    if options.smoke:
        recipe, settings = recipe.smoke(), smoke_settings(settings)
        table = recipe.home / "raw" / settings["file"]
        write_smoke_table(table)
    else:
        table = locate(settings, recipe.home)
    prepare(table, settings, recipe.data)
    print(f"prepared {recipe.data}")
