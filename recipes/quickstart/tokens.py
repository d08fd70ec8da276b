"""Words of sentences and back: sacremoses, and single characters in scripts without spaces between words."""

from __future__ import annotations

import re

from sacremoses import MosesTokenizer

# In front of a word that follows the previous one without a space, as pyonmttok writes it.
JOINER = "\uffed"
# Scripts without spaces between words: Thai, Lao, Myanmar, Khmer, kana, bopomofo and Chinese characters;
# combining signs stay with their base character.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u312f\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff"
)
_SIGNS = (
    "\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ecd\u102b-\u103e\u17b4-\u17d3\u3099\u309a"
)
_CHARACTER = re.compile(f"([{_UNSPACED}][{_SIGNS}]*)")


class Tokenizer:
    """Splits sentences of one language into words, and joins words: ``join(split(text)) == text``, if clean.

    sacremoses decides where to split. Where it parts what the text does not, the second word begins with
    `JOINER`, so that no rules have to guess the spaces back.
    """

    def __init__(self, language: str) -> None:
        self._moses = MosesTokenizer(lang=language.replace("-", "_").split("_")[0])

    def split(self, text: str) -> list[str]:
        """The words of a sentence with single spaces; none is empty or contains white space."""
        words: list[str] = []
        position = 0
        for word in self._pieces(text):
            spaced = text.startswith(" ", position)
            position += spaced
            if not text.startswith(word, position):
                # sacremoses rewrites a few sequences; such a sentence is split at its spaces alone.
                return text.split()
            words.append(word if spaced or position == 0 else JOINER + word)
            position += len(word)
        return words

    def _pieces(self, text: str) -> list[str]:
        moses = self._moses.tokenize(text, escape=False)
        return [piece for word in moses for piece in _CHARACTER.split(word) if piece]

    @staticmethod
    def join(words: list[str]) -> str:
        """The sentence that the words make."""
        return " ".join(words).replace(f" {JOINER}", "").removeprefix(JOINER)
