"""The options of pyonmttok in ``src_onmttok_kwargs`` and ``tgt_onmttok_kwargs``, read as plain values."""

from __future__ import annotations

import difflib
from typing import Any

from nmt.model.plan import parse_text
from shared_embeddings.errors import UserError

NAMES = ("src_onmttok_kwargs", "tgt_onmttok_kwargs")
EXAMPLE = "{mode: aggressive, joiner_annotate: true}"
_LONGEST = 10_000
_MODES = ("aggressive", "char", "conservative", "none", "space")
# Keyword arguments of pyonmttok.Tokenizer, but for those that the subword options of OpenNMT set.
_SWITCHES = (
    "allow_isolated_marks",
    "case_feature",
    "case_markup",
    "joiner_annotate",
    "joiner_new",
    "no_substitution",
    "preserve_placeholders",
    "preserve_segmented_tokens",
    "segment_alphabet_change",
    "segment_case",
    "segment_numbers",
    "soft_case_regions",
    "spacer_annotate",
    "spacer_new",
    "support_prior_joiners",
    "with_separators",
)
_TYPES: dict[str, type] = {
    **dict.fromkeys(_SWITCHES, bool),
    **dict.fromkeys(("joiner", "lang", "mode"), str),
    **dict.fromkeys(("segment_alphabet", "vocabulary"), list),
}
_OF_SUBWORDS = {
    "bpe_model_path": "src_subword_model",
    "sp_model_path": "src_subword_model",
    "bpe_dropout": "src_subword_alpha",
    "sp_alpha": "src_subword_alpha",
    "sp_nbest_size": "src_subword_nbest",
    "vocabulary_path": "src_subword_vocab",
    "vocabulary_threshold": "src_vocab_threshold",
    "bpe_vocab_path": "src_subword_vocab",
    "bpe_vocab_threshold": "src_vocab_threshold",
}


def parse_tokenizer(name: str, value: Any) -> dict[str, Any]:
    """Return the options of a tokenizer; what is no literal is not evaluated.

    Args:
        name: of the option, for messages.
        value: a mapping, or its spelling in YAML, JSON or Python.

    Raises:
        UserError: names what is no mapping of plain values, or an option that pyonmttok does not have.
    """
    if isinstance(value, str) and len(value) > _LONGEST:
        raise UserError(f"{name}: has {len(value)} characters; expected a mapping such as {EXAMPLE}")
    try:
        found = parse_text(name, value, EXAMPLE)
    except (RecursionError, MemoryError) as error:
        raise UserError(f"{name}: is nested too deeply; expected a mapping such as {EXAMPLE}") from error
    if not isinstance(found, dict):
        raise UserError(f"{name}: {str(value)[:80]!r} is not a mapping; write it like {EXAMPLE}")
    for key, one in found.items():
        _check(name, key, one)
    return {"mode": "none", **found}


def _check(name: str, key: Any, value: Any) -> None:
    """Check one option of a tokenizer.

    Raises:
        UserError: it is unknown, or its value has another type.
    """
    if key in _OF_SUBWORDS:
        instead = _OF_SUBWORDS[key].replace("src", name[:3])
        raise UserError(f"{name}: {key} is set by {instead}; remove it here")
    if key not in _TYPES:
        close = difflib.get_close_matches(str(key)[:80], _TYPES, 1)
        hint = f"did you mean {close[0]}?" if close else f"wanted some of {', '.join(sorted(_TYPES))}"
        raise UserError(f"{name}: unknown option {str(key)[:80]!r}; {hint}")
    wanted = _TYPES[key]
    fits = isinstance(value, wanted)
    if wanted is list:
        fits = fits and all(isinstance(one, str) for one in value)
    if key == "mode" and value not in _MODES:
        raise UserError(f"{name}: mode is {str(value)[:80]!r}; expected one of {', '.join(_MODES)}")
    if not fits:
        kind = {bool: "true or false", str: "a text", list: "a list of texts"}[wanted]
        raise UserError(f"{name}: {key} is {str(value)[:80]!r}; expected {kind}")
