"""AG News as headline data: cleaning, a split that does not depend on the order of the file, subwords."""

from __future__ import annotations

import csv
import hashlib
import html
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from recipes.common.corpus import with_progress
from recipes.common.recipe import Recipe, preprocess_options
from recipes.common.smoke import (
    LINES,
    MERGES,
    TEST_LINES,
    generated_words,
    sentence,
)
from recipes.common.tools import run_step
from recipes.headlines.data import describe, encode, read_settings, text_files, write_split
from recipes.translation.subwords import Tokenizer
from shared_embeddings.errors import UserError
from shared_embeddings.utils.download import download, verify
from shared_embeddings.utils.files import replacing

# The files have a space in place of "&": " #39;" is an apostrophe, " quot;" a quotation mark.
ENTITY = re.compile(r"(?:^| )(#\d{2,4}|amp|quot|lt|gt|nbsp|hellip|[mn]dash|[lr][sd]quo);")
TAG = re.compile(r"<[^<>]*>")
ADDRESS = re.compile(r"(?:https?://|www\.)\S+")
# "(CPB.N: Quote, Profile, Research)"
QUOTE = re.compile(r"\s*\([^()]*Quote, Profile, Research[^()]*\)")
# "(Reuters)" or "(SPACE.com)" at the end of a title whose description starts with "Reuters - "
AGENCY = re.compile(r"\s*\(([^()]+)\)$")
UPDATE = re.compile(r"\s*\(Update\d+\)$")
# "NEW YORK (Reuters) - ", "BAGHDAD, Iraq - ", "ATHENS -- "
DATELINE = re.compile(r"^[A-Z][A-Z .'/]+(?:, [^()-]{1,30}?)?(?:\s*\([^()]{1,40}\))? --? ")


class News(NamedTuple):
    """A description and its title."""

    description: str
    title: str


def read_news(path: Path) -> list[News]:
    """Read a file of AG News, with the columns class, title and description.

    Raises:
        UserError: the file is not UTF-8 or has other columns.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; replace it") from error
    except (OSError, csv.Error) as error:
        raise UserError(f"{path}: {error}; replace it") from error
    for number, row in enumerate(rows, 1):
        if len(row) != 3:
            raise UserError(
                f"{path}: row {number} has {len(row)} columns; expected class, title, description"
            )
    return [News(description, title) for _, title, description in rows]


def hash_of(news: News) -> str:
    """Return a hash of a text and its title in hexadecimal, which determines the split of the pair."""
    return hashlib.sha256("\t".join(news).encode()).hexdigest()


def clean_news(news: News) -> News:
    """Remove markup, agencies and datelines, and lowercase the text."""
    description, title = clean_text(news.description), UPDATE.sub("", clean_text(news.title))
    agency = AGENCY.search(title)
    # The space matters for empty descriptions.
    if agency and f"{description} ".startswith(f"{agency[1]} - "):
        title = title[: agency.start()]
        description = f"{description} ".removeprefix(f"{agency[1]} - ").strip()
    return News(DATELINE.sub("", description).lower(), title.lower())


def clean_text(text: str) -> str:
    """Remove backslashes, broken entities, tags, URLs and stock quotes."""
    text = re.sub(r"\\(?=[$\"])", "", text).replace("\\", " ")
    text = html.unescape(html.unescape(ENTITY.sub(r"&\1;", text)))
    for markup in (TAG, ADDRESS, QUOTE):
        text = markup.sub(" " if markup is ADDRESS else "", text)
    return " ".join(text.split())


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
    """Find the file in ``$DATA_DIR/ag_news`` or download it, and verify its checksum."""
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
    """Clean and split pairs, ordered by hash of the original pair.

    Of pairs with the same description, the one with the smallest hash is kept, so that splits are disjoint.
    Pairs without a description or title are removed.
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
    """Split, clean and tokenize the news; see `recipes.headlines.data.write_split`."""
    tokenizer = Tokenizer("en")
    for split, pairs in split_news(read_news(path), settings["valid"], settings["test"]).items():
        texts = with_progress([pair.description for pair in pairs], split)
        words = [tokenizer.tokenize(text).split()[: settings["source_words"]] for text in texts]
        write_split(folder, split, [" ".join(each) for each in words], [pair.title for pair in pairs])


def prepare(path: Path, settings: dict[str, Any], folder: Path) -> None:
    """Run all steps from the table to ``data.json``."""
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
    """Return settings for a small generated table."""
    return {**settings, "valid": TEST_LINES, "test": TEST_LINES, "bpe_operations": MERGES, "lengths": [20]}


def write_smoke_table(path: Path) -> None:
    """Write a generated table in the format of AG News."""
    rows = []
    for number, words in enumerate(generated_words(LINES, seed=0)):
        rows.append([number % 4 + 1, f"{sentence(words[:3])} (AP)", f"AP - {sentence(words)} #36;{number}"])
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare AG News in $RUNS/agnews_headline/data, from $DATA_DIR/ag_news or the network."""
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
