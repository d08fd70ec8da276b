"""News as AG News has them, without what the way to its files has left in them."""

from __future__ import annotations

import csv
import hashlib
import html
import re
from pathlib import Path
from typing import NamedTuple

from recipes.common.errors import UserError

# "&" became a space on the way: " #39;" is an apostrophe, " quot;" a quotation mark.
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
    """The rows of a file of AG News as they are: class, title, description.

    Raises:
        UserError: the file is not UTF-8 or no such table; a row that is not is named.
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
            raise UserError(f"{path}: row {number} has {len(row)} columns; wanted class, title, description")
    return [News(description, title) for _, title, description in rows]


def hash_of(news: News) -> str:
    """A fixed hash of a text and its title, in hexadecimal; it decides what a pair is used for."""
    return hashlib.sha256("\t".join(news).encode()).hexdigest()


def clean_news(news: News) -> News:
    """The same without markup, agencies and datelines, in small letters."""
    description, title = clean_text(news.description), UPDATE.sub("", clean_text(news.title))
    agency = AGENCY.search(title)
    # With the space that an empty description has lost.
    if agency and f"{description} ".startswith(f"{agency[1]} - "):
        title = title[: agency.start()]
        description = f"{description} ".removeprefix(f"{agency[1]} - ").strip()
    return News(DATELINE.sub("", description).lower(), title.lower())


def clean_text(text: str) -> str:
    """The text without backslashes, broken entities, tags, addresses and references to share prices."""
    text = re.sub(r"\\(?=[$\"])", "", text).replace("\\", " ")
    text = html.unescape(html.unescape(ENTITY.sub(r"&\1;", text)))
    for markup in (TAG, ADDRESS, QUOTE):
        text = markup.sub(" " if markup is ADDRESS else "", text)
    return " ".join(text.split())
