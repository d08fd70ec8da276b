"""Moses tokenization and its inverse, with sacremoses."""

from __future__ import annotations

from sacremoses import MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer

# Outside English, the tokenizer makes three tokens of "McDonald's", which cannot be joined again.
INNER_APOSTROPHE = r"\w'\w"


class Tokenizer:
    """Text to tokens and back, for one language.

    Punctuation is normalized first. Nothing is escaped (``&`` stays ``&``), since no later step reads XML,
    and dashes inside words stay there unless `split_dashes` is set: subwords split what is rare anyway.
    """

    def __init__(self, language: str, split_dashes: bool = False) -> None:
        self.split_dashes = split_dashes
        self.protected = [] if language == "en" else [INNER_APOSTROPHE]
        self._normalizer = MosesPunctNormalizer(language)
        self._tokenizer = MosesTokenizer(language)
        self._detokenizer = MosesDetokenizer(language)

    def tokenize(self, text: str) -> str:
        """One line of text as tokens with a space between each two."""
        return self._tokenizer.tokenize(
            self._normalizer.normalize(text),
            aggressive_dash_splits=self.split_dashes,
            return_str=True,
            escape=False,
            protected_patterns=self.protected,
        )

    def detokenize(self, tokens: str) -> str:
        """The text of a tokenized line."""
        return self._detokenizer.detokenize(tokens.split(), unescape=False)
