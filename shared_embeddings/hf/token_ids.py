"""The ids of tokens in ``config.json``, ``generation_config.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

# XLM's have names of their own.
_SETTINGS = ("_token_id", "_token_index", "bos_index", "eos_index", "pad_index", "unk_index", "mask_index")
# What must, must not or may well be generated: what is gone needs no mention.
_LISTS = ("suppress_tokens", "begin_suppress_tokens")
_SEQUENCES = ("bad_words_ids", "force_words_ids")
_BIASES = "sequence_bias"
_FORCED = "forced_decoder_ids"


def named_ids(settings: Mapping[str, Any]) -> Iterator[int]:
    """The ids that settings such as ``pad_token_id`` name, at any depth."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from named_ids(value)
        elif name.endswith(_SETTINGS):
            yield from (one for one in (value if isinstance(value, list) else [value]) if _is_id(one))
        elif name == _FORCED:
            yield from (token for _, token in value or () if _is_id(token))


def with_new_ids(settings: Mapping[str, Any], new_ids: Mapping[int, int]) -> dict[str, Any]:
    """The settings with the new id of every token; None for an id that is no token."""
    return {name: _renumbered(name, value, new_ids) for name, value in settings.items()}


def check_ids(where: str, settings: Mapping[str, Any]) -> None:
    """Check that settings which list tokens hold whole numbers, in lists as deep as transformers wants them.

    Raises:
        ValueError: one does not; it is named, behind `where`.
    """
    for name, value in settings.items():
        wanted = None if value is None else _fault(name, value)
        if wanted is not None:
            raise ValueError(f"{where}: {name} is {value!r}, wanted {wanted}; correct it")
        if isinstance(value, dict):
            check_ids(where, value)


def _fault(name: str, value: Any) -> str | None:
    """What the value of a setting should be, where it is not."""
    if name in _SEQUENCES and not _all(value, _is_list_of_ids):
        return "a list of lists of token ids"
    if name == _FORCED and not _all(value, _is_pair):
        return "pairs of place and token id"
    if name == _BIASES and not _all(value, _is_bias):
        return "pairs of a list of token ids and a number"
    if name in _LISTS and not _is_list_of_ids(value):
        return "a list of token ids"
    if name.endswith(_SETTINGS) and isinstance(value, list) and not _is_list_of_ids(value):
        return "a token id, or a list of such"
    return None


def _all(value: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether a value is a list of what is wanted."""
    return isinstance(value, list) and all(map(wanted, value))


def _is_list_of_ids(value: Any) -> bool:
    """Whether a value is a list of token ids."""
    return _all(value, _is_id)


def _is_pair(value: Any) -> bool:
    """Whether a value is a place in the output and the token for it, which may be None."""
    return isinstance(value, list) and len(value) == 2 and (value[1] is None or _is_id(value[1]))


def _is_bias(value: Any) -> bool:
    """Whether a value is a list of token ids and what is added to the score of the last."""
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and _is_list_of_ids(value[0]) and isinstance(value[1], (int, float))


def _renumbered(name: str, value: Any, new_ids: Mapping[int, int]) -> Any:
    """The value of one setting; None for a list of which nothing is left, which transformers refuses."""
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
    """Whether a value is the id of a token; -1 stands for none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
