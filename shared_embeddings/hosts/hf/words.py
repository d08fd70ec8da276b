"""The vocabulary of a Hugging Face model, its token counts in texts, and its token ids in settings files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from shared_embeddings.hosts.hf.tokenizer_file import load_tokenizer
from shared_embeddings.utils.errors import UserError

_LINES = 1000
# The share of rows that have a token, at least. Models often pad their tables, but not by that much.
_LEAST_TOKENS = 0.5
_TOKENIZERS = ("tokenizer*", "vocab*", "*.spm", "*.model", "merges.txt")


class Vocabulary:
    """The vocabulary of the tokenizer in a model's folder; without a tokenizer, the words are the ids.

    Args:
        folder: the folder of the model.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokenizer = _read_tokenizer(folder)

    def words(self, length: int) -> list[str]:
        """The words of the ids from 0 to `length` - 1; unused ids get placeholder names."""
        if self._tokenizer is None:
            return [str(index) for index in range(length)]
        known = {index: word for word, index in self._tokenizer.get_vocab().items()}
        return [known.get(index, f"<unused {index}>") for index in range(length)]

    def check(self, rows: int) -> None:
        """Raise UserError unless the tokenizer, if any, fits tables with `rows` rows."""
        if self._tokenizer is not None:
            check_tokens(self._tokenizer.get_vocab(), rows)

    def sentence_marks(self) -> tuple[str, ...]:
        """The words that the tokenizer adds to every sentence."""
        if self._tokenizer is None:
            return ()
        return tuple(self._tokenizer.convert_ids_to_tokens(self._tokenizer("")["input_ids"]))

    def encode(self, text: str) -> tuple[list[int], list[int]]:
        """The ids of the tokenizer's beginning mark, if any, and of a text.

        Raises:
            UserError: there is no tokenizer.
        """
        tokenizer = self._required_tokenizer()
        first = tokenizer("")["input_ids"][:1]
        begin = first if first == [tokenizer.bos_token_id] else []
        return begin, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def sentences(self, lines: Sequence[str], longest: int) -> list[list[int]]:
        """The ids of lines with sentence marks, truncated to `longest` tokens.

        Raises:
            UserError: there is no tokenizer.
        """
        tokenizer = self._required_tokenizer()
        found: list[list[int]] = tokenizer(list(lines), truncation=True, max_length=longest)["input_ids"]
        return found

    def _required_tokenizer(self) -> Any:
        """The tokenizer; UserError if there is none."""
        if self._tokenizer is None:
            raise UserError(f"model {self.folder}: has no tokenizer to tokenize texts with; add it there")
        return self._tokenizer

    def mask(self) -> int | None:
        """The id of the mask token, if any."""
        return None if self._tokenizer is None else self._tokenizer.mask_token_id

    def count(self, texts: Sequence[Path]) -> dict[str, int]:
        """The token counts of texts.

        Raises:
            UserError: there is no tokenizer, a text is not UTF-8, or all lines are blank.
            OSError: a text cannot be read.
        """
        if self._tokenizer is None:
            raise UserError(
                f"model {self.folder}: has no tokenizer to count words with; give --token-counts, with ids "
                "instead of words"
            )
        counts: Counter[int] = Counter()
        for path in texts:
            try:
                read = path.read_text(encoding="utf-8-sig").splitlines()
            except UnicodeDecodeError as error:
                raise UserError(f"{path}: is not UTF-8 text (byte {error.start}); convert it") from error
            lines = [line for line in read if line.strip()]
            for start in range(0, len(lines), _LINES):
                found = self._tokenizer(lines[start : start + _LINES], add_special_tokens=False)
                for ids in found["input_ids"]:
                    counts.update(ids)
        if not counts:
            raise UserError(f"text {', '.join(map(str, texts))}: has no words; use another text")
        return {self._tokenizer.convert_ids_to_tokens(index): count for index, count in counts.items()}


def check_tokens(ids: Mapping[str, int], rows: int) -> None:
    """Check that the tokens of a tokenizer are those of a model.

    Args:
        ids: token -> id.
        rows: of the model's largest table.

    Raises:
        UserError: an id has no row, or most rows have no token.
    """
    last = max(ids, key=ids.__getitem__)
    if ids[last] >= rows:
        raise UserError(
            f"token {last!r} has the id {ids[last]}, but the model has {rows} rows: the tokenizer belongs to "
            "another model; give the model its own"
        )
    if len(ids) < rows * _LEAST_TOKENS:
        raise UserError(
            f"the tokenizer has {len(ids)} tokens for the {rows} rows of the model, so it is missing or "
            "belongs to another model; give the model its own"
        )


def _read_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder, or None; UserError if it cannot be read."""
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZERS):
        return None
    try:
        return load_tokenizer(folder)
    # The errors depend on the libraries that the tokenizer requires.
    except Exception as error:
        raise UserError(
            f"model {folder}: its tokenizer cannot be read ({type(error).__name__}: {error}); copy it again, "
            "or remove it from the folder"
        ) from error


def first_position(model: nn.Module) -> int:
    """The position of the first token: the padding id + 1 in models that count from it, else 0.

    Such models recognize padding by its id, so trimming the vocabulary must not change that id.
    """
    first = 0
    for path, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if padding is not None and "position" in f"{path.rpartition('.')[2]} {type(module).__name__}".lower():
            first = max(first, int(padding) + 1)
    return first


# XLM's names end in "_index".
_SETTINGS = ("_token_id", "_token_index", "bos_index", "eos_index", "pad_index", "unk_index", "mask_index")
# Tokens that generation suppresses, forces or biases; removed tokens are dropped from these lists.
_LISTS = ("suppress_tokens", "begin_suppress_tokens")
_SEQUENCES = ("bad_words_ids", "force_words_ids")
_BIASES = "sequence_bias"
_FORCED = "forced_decoder_ids"


def named_ids(settings: Mapping[str, Any]) -> Iterator[int]:
    """The ids in settings such as ``pad_token_id``, at any depth."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from named_ids(value)
        elif name.endswith(_SETTINGS):
            yield from (one for one in (value if isinstance(value, list) else [value]) if _is_id(one))
        elif name == _FORCED:
            yield from (token for _, token in value or () if _is_id(token))


def with_new_ids(settings: Mapping[str, Any], new_ids: Mapping[int, int]) -> dict[str, Any]:
    """The settings with new token ids; None for ids of removed tokens."""
    return {name: _renumbered(name, value, new_ids) for name, value in settings.items()}


def check_ids(where: str, settings: Mapping[str, Any]) -> None:
    """Check that settings that list token ids have the structure that transformers expects.

    Raises:
        UserError: one does not; the message starts with `where` and names it.
    """
    for name, value in settings.items():
        expected = None if value is None else _violated_type(name, value)
        if expected is not None:
            raise UserError(f"{where}: {name} is {value!r}, expected {expected}; correct it")
        if isinstance(value, dict):
            check_ids(where, value)


def _violated_type(name: str, value: Any) -> str | None:
    """The expected type of a setting whose value does not have it, else None."""
    if name in _SEQUENCES and not _is_list_of(value, _is_list_of_ids):
        return "a list of lists of token ids"
    if name == _FORCED and not _is_list_of(value, _is_pair):
        return "pairs of position and token id"
    if name == _BIASES and not _is_list_of(value, _is_bias):
        return "pairs of a list of token ids and a number"
    if name in _LISTS and not _is_list_of_ids(value):
        return "a list of token ids"
    if name.endswith(_SETTINGS) and isinstance(value, list) and not _is_list_of_ids(value):
        return "a token id or a list of token ids"
    return None


def _is_list_of(value: Any, is_item: Callable[[Any], bool]) -> bool:
    """Whether a value is a list whose items pass a test."""
    return isinstance(value, list) and all(map(is_item, value))


def _is_list_of_ids(value: Any) -> bool:
    """Whether a value is a list of token ids."""
    return _is_list_of(value, _is_id)


def _is_pair(value: Any) -> bool:
    """Whether a value is an output position and the token id for it, which may be None."""
    return isinstance(value, list) and len(value) == 2 and (value[1] is None or _is_id(value[1]))


def _is_bias(value: Any) -> bool:
    """Whether a value is a list of token ids and a bias for the score of the last one."""
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and _is_list_of_ids(value[0]) and isinstance(value[1], (int, float))


def _renumbered(name: str, value: Any, new_ids: Mapping[int, int]) -> Any:
    """The new value of one setting; None instead of an empty list, which transformers rejects."""
    if name == "added_tokens_decoder":
        return {str(new_ids[int(old)]): token for old, token in value.items()}
    if isinstance(value, dict):
        return with_new_ids(value, new_ids)
    if name.endswith(_SETTINGS) and _is_id(value):
        return new_ids.get(value)
    if not isinstance(value, list):
        return value
    if name.endswith((*_SETTINGS, *_LISTS)):
        return [new_ids[one] for one in value if one in new_ids] or None
    if name in _SEQUENCES:
        return [
            [new_ids[one] for one in many] for many in value if all(one in new_ids for one in many)
        ] or None
    if name == _BIASES:
        kept = [(many, bias) for many, bias in value if all(one in new_ids for one in many)]
        return [[[new_ids[one] for one in many], bias] for many, bias in kept] or None
    if name == _FORCED:
        return [[place, new_ids.get(token)] for place, token in value]
    return value


def _is_id(value: Any) -> bool:
    """Whether a value is a token id; -1 means none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
