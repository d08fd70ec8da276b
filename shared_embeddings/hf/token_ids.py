"""The ids of tokens in ``config.json``, ``generation_config.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_SETTINGS = ("_token_id", "_token_index")
# What must not, or must, be generated: what is gone needs no mention.
_LISTS = ("suppress_tokens", "begin_suppress_tokens")
_SEQUENCES = ("bad_words_ids", "force_words_ids")


def named_ids(settings: Mapping[str, Any]) -> Iterator[int]:
    """The ids that settings such as ``pad_token_id`` name, at any depth."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from named_ids(value)
        elif name.endswith(_SETTINGS):
            yield from (one for one in (value if isinstance(value, list) else [value]) if _is_id(one))
        elif name == "forced_decoder_ids":
            yield from (token for _, token in value or () if _is_id(token))


def with_new_ids(settings: Mapping[str, Any], new_ids: Mapping[int, int]) -> dict[str, Any]:
    """The settings with the new id of every token; None for an id that is no token."""
    return {name: _renumbered(name, value, new_ids) for name, value in settings.items()}


def _renumbered(name: str, value: Any, new_ids: Mapping[int, int]) -> Any:
    """The value of one setting."""
    if name == "added_tokens_decoder":
        return {str(new_ids[int(old)]): token for old, token in value.items()}
    if isinstance(value, dict):
        return with_new_ids(value, new_ids)
    if name.endswith(_SETTINGS) and _is_id(value):
        return new_ids.get(value)
    if isinstance(value, list) and name.endswith((*_SETTINGS, *_LISTS)):
        return [new_ids[one] for one in value if one in new_ids]
    if isinstance(value, list) and name in _SEQUENCES:
        return [[new_ids[one] for one in many] for many in value if all(one in new_ids for one in many)]
    if isinstance(value, list) and name == "forced_decoder_ids":
        return [[place, new_ids.get(token)] for place, token in value]
    return value


def _is_id(value: Any) -> bool:
    """Whether a value is the id of a token; -1 stands for none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
