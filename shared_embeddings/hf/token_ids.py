"""The ids of tokens in ``config.json``, ``generation_config.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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


def check_ids(where: str, settings: Mapping[str, Any]) -> None:
    """Check that settings which list tokens hold whole numbers, in lists as deep as transformers wants them.

    Raises:
        ValueError: one does not; it is named, behind `where`.
    """
    for name, value in settings.items():
        if isinstance(value, dict):
            check_ids(where, value)
        elif name in _SEQUENCES and value is not None and not _all(value, _is_list_of_ids):
            raise ValueError(f"{where}: {name} is {value!r}, wanted a list of lists of token ids; correct it")
        elif name == "forced_decoder_ids" and value is not None and not _all(value, _is_pair):
            raise ValueError(f"{where}: {name} is {value!r}, wanted pairs of place and token id; correct it")


def _all(value: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether a value is a list of what is wanted."""
    return isinstance(value, list) and all(map(wanted, value))


def _is_list_of_ids(value: Any) -> bool:
    """Whether a value is a list of token ids."""
    return _all(value, _is_id)


def _is_pair(value: Any) -> bool:
    """Whether a value is a place in the output and the token for it, which may be None."""
    return isinstance(value, list) and len(value) == 2 and (value[1] is None or _is_id(value[1]))


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
