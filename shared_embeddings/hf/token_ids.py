"""Token ids in ``config.json``, ``generation_config.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
        ValueError: one does not; the message starts with `where` and names it.
    """
    for name, value in settings.items():
        expected = None if value is None else _violated_type(name, value)
        if expected is not None:
            raise ValueError(f"{where}: {name} is {value!r}, expected {expected}; correct it")
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
