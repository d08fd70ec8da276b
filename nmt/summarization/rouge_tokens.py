"""What ROUGE-1.5.5 makes of a text before it counts: bytes, tokens, stems.

- **Tokens.** Lower case, runs of the letters a to z and of digits; everything else, letters beyond ASCII
  included, separates. So does the program. For other languages there are ``unicode``, words of letters, marks
  and numbers in any script that separates its words, and ``characters``, each of these by itself, for scripts
  that do not.
- **Stemming.** Porter's original algorithm for tokens of more than three characters. The program looks a word
  up in WordNet's lists of irregular forms first, which come with it; `read_exceptions` reads these lists.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path

from nltk.stem.porter import PorterStemmer
from rouge_score.tokenize import tokenize as ascii_tokens

from shared_embeddings.errors import UserError

TOKENS = ("ascii", "unicode", "characters")
# Letters, the marks that belong to them, and numbers: the first letter of their Unicode category.
WORD_CATEGORIES = "LMN"


class Stemmer:
    """Porter's algorithm as published in 1980, after a list of irregular forms.

    Args:
        exceptions: base forms by irregular form, as `read_exceptions` reads them.
    """

    def __init__(self, exceptions: Mapping[str, str]) -> None:
        self.exceptions = exceptions
        self.porter = PorterStemmer(PorterStemmer.ORIGINAL_ALGORITHM)

    def stem(self, word: str) -> str:
        """The stem of a word in lower case."""
        return self.exceptions.get(word) or str(self.porter.stem(word))


def cut(text: str, size: int) -> str:
    """The first `size` bytes of a text in UTF-8, without a character that the cut breaks."""
    return text.encode()[:size].decode(errors="ignore")


def tokenize(text: str, kind: str, stemmer: Stemmer | None = None) -> list[str]:
    """The tokens of a text; `kind` is one of `TOKENS`."""
    if kind == "ascii":
        return list(ascii_tokens(text, stemmer))
    lowered = unicodedata.normalize("NFC", text.lower())
    kept = (letter if unicodedata.category(letter)[0] in WORD_CATEGORIES else " " for letter in lowered)
    words = "".join(kept).split()
    return list("".join(words)) if kind == "characters" else words


def read_exceptions(paths: Iterable[Path]) -> dict[str, str]:
    """Base forms by irregular form, from WordNet's ``.exc`` files; a later line replaces an earlier one.

    ROUGE-1.5.5 has them in ``data/WordNet-2.0-Exceptions``.

    Raises:
        UserError: a file is not there or not UTF-8, or a line is not an irregular form and its base.
    """
    exceptions = {}
    for path in paths:
        for number, line in enumerate(read_texts(path), 1):
            forms = line.split()
            if len(forms) < 2:
                raise UserError(f"{path}: line {number} is {line!r}; expected an irregular form and its base")
            exceptions[forms[0]] = forms[1]
    return exceptions


def read_texts(path: Path) -> list[str]:
    """One text a line; whitespace at both ends of a line is not part of it.

    Raises:
        UserError: the file is not there or not UTF-8.
    """
    try:
        lines = path.read_bytes().decode("utf-8").removeprefix("\ufeff").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; convert it") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    if not lines[-1]:
        lines.pop()
    return [line.strip() for line in lines]
