"""The words of a model of Hugging Face, and how often its tokenizer finds them in texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared_embeddings.hf.library import transformers

_LINES = 1000
_TOKENIZERS = ("tokenizer*", "vocab*", "*.spm", "*.model", "merges.txt")


class Vocabulary:
    """The words of the tokenizer in a model's folder; where there is none, the ids stand for words.

    Args:
        folder: of the model.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokenizer = _read_tokenizer(folder)

    def words(self, length: int) -> list[str]:
        """The words of the ids from 0 to `length` - 1; ids without a word have names of their own."""
        if self._tokenizer is None:
            return [str(index) for index in range(length)]
        known = {index: word for word, index in self._tokenizer.get_vocab().items()}
        return [known.get(index, f"<unused {index}>") for index in range(length)]

    def sentence_marks(self) -> tuple[str, ...]:
        """The words that the tokenizer adds to every sentence."""
        if self._tokenizer is None:
            return ()
        return tuple(self._tokenizer.convert_ids_to_tokens(self._tokenizer("")["input_ids"]))

    def encode(self, text: str) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer begins every text with, and those of a text.

        Raises:
            ValueError: there is no tokenizer.
        """
        if self._tokenizer is None:
            raise ValueError(f"model {self.folder}: has no tokenizer to divide a text with; put it there")
        first = self._tokenizer("")["input_ids"][:1]
        begin = first if first == [self._tokenizer.bos_token_id] else []
        return begin, self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def sentences(self, lines: Sequence[str], longest: int) -> list[list[int]]:
        """The ids of lines with the marks of sentences, cut at `longest` tokens.

        Raises:
            ValueError: there is no tokenizer.
        """
        if self._tokenizer is None:
            raise ValueError(f"model {self.folder}: has no tokenizer to divide a text with; put it there")
        found: list[list[int]] = self._tokenizer(list(lines), truncation=True, max_length=longest)[
            "input_ids"
        ]
        return found

    def mask(self) -> int | None:
        """The id of the word that stands for masked ones, if there is one."""
        return None if self._tokenizer is None else self._tokenizer.mask_token_id

    def count(self, texts: Sequence[Path]) -> dict[str, int]:
        """How often each word is in texts, as the tokenizer divides them.

        Raises:
            ValueError: there is no tokenizer, a text is no UTF-8, or they are empty.
            OSError: a text cannot be read.
        """
        if self._tokenizer is None:
            raise ValueError(
                f"model {self.folder}: has no tokenizer to count text with; give --token-counts, with the "
                "ids of words in place of the words"
            )
        counts: Counter[int] = Counter()
        for path in texts:
            try:
                lines = path.read_text(encoding="utf-8-sig").splitlines()
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: is no UTF-8 text (byte {error.start}); convert it") from error
            for start in range(0, len(lines), _LINES):
                found = self._tokenizer(lines[start : start + _LINES], add_special_tokens=False)
                for ids in found["input_ids"]:
                    counts.update(ids)
        if not counts:
            raise ValueError(f"text {', '.join(map(str, texts))}: has no words; give text")
        return {self._tokenizer.convert_ids_to_tokens(index): count for index, count in counts.items()}


def _read_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder, or None; ValueError where it cannot be read."""
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZERS):
        return None
    try:
        return transformers().AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    # Which errors there are depends on the libraries that a tokenizer needs.
    except Exception as error:
        raise ValueError(
            f"model {folder}: its tokenizer cannot be read ({type(error).__name__}: {error}); copy it anew, "
            "or take it out of the folder"
        ) from error
