"""The file ``tokenizer.json`` of a fast tokenizer with fewer tokens, which cuts covered texts as before.

What must stay beside the tokens of a text depends on the kind of tokenizer:

- BPE joins two parts at a time. The parts on the way to a kept token stay, and the merges whose parts and
  result all stay. The order of merges stays too, so that the same ones are applied.
- Unigram takes the best sum of scores, so that a path of kept pieces stays the best. An unknown character
  costs what the worst piece does, and a bit more; that piece stays.
- WordPiece takes the longest piece at each place. Words that it cannot finish are unknown; how far it gets in
  the words of the texts stays.

Tokens for single bytes stay wherever a tokenizer falls back to them, so that any text can still be cut.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

KINDS = ("BPE", "Unigram", "WordPiece", "WordLevel")


class TokenizerFile:
    """The content of a ``tokenizer.json``.

    Args:
        content: as it was read; it is not changed.

    Attributes:
        kind: one of `KINDS`.
        tokens: every token by its id.
        ids: every id by its token.

    Raises:
        ValueError: a kind of tokenizer that is not known.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self.model: Mapping[str, Any] = content["model"]
        self.kind = self.model.get("type") or _guessed_kind(self.model)
        if self.kind not in KINDS:
            raise ValueError(
                f"a tokenizer of the kind {self.kind} cannot be trimmed, only one of {', '.join(KINDS)}"
            )
        self.ids: dict[str, int] = self._model_ids() | {
            t["content"]: t["id"] for t in content["added_tokens"]
        }
        self.tokens = {number: token for token, number in self.ids.items()}
        self.merges = [_parts(merge) for merge in self.model.get("merges", ())]
        self._ranks = {parts: rank for rank, parts in enumerate(self.merges)}

    def _model_ids(self) -> dict[str, int]:
        """The ids of the tokens without those that were added."""
        vocab = self.model["vocab"]
        if self.kind == "Unigram":
            return {piece: number for number, (piece, _) in enumerate(vocab)}
        return dict(vocab)

    def specials(self) -> set[int]:
        """The tokens that were added, those that stand around every text, and that of unknown words."""
        found = {token["id"] for token in self.content["added_tokens"]}
        found |= set(_ids_in_processor(self.content.get("post_processor")))
        unknown = self.model.get("unk_token")
        if unknown in self.ids:
            found.add(self.ids[unknown])
        if self.model.get("unk_id") is not None:
            found.add(self.model["unk_id"])
        if self.content.get("padding"):
            found.add(self.content["padding"]["pad_id"])
        return found

    def closed(self, ids: Iterable[int]) -> set[int]:
        """The ids that are tokens, and those without which texts would not be cut into them.

        Args:
            ids: the special ones among them.
        """
        kept = {number for number in ids if number in self.tokens} | self._alphabet()
        if self.kind == "BPE":
            paths = (self._merge_path(self.tokens[number]) for number in list(kept))
            kept |= {self.ids[part] for path in paths for part in path if part in self.ids}
        if self.kind == "Unigram":
            scores = [score for _, score in self.model["vocab"]]
            kept.add(scores.index(min(scores)))
        return kept

    def _alphabet(self) -> set[int]:
        """The tokens that stand for single bytes, where the tokenizer has such."""
        found: set[str] = set()
        if self.model.get("byte_fallback"):
            found = {f"<0x{byte:02X}>" for byte in range(256)}
        if _has_part(self.content.get("pre_tokenizer"), "ByteLevel") or _has_part(
            self.content.get("normalizer"), "ByteLevel"
        ):
            from tokenizers.pre_tokenizers import ByteLevel

            found |= set(ByteLevel.alphabet())
        return {self.ids[token] for token in found if token in self.ids}

    def _merge_path(self, token: str) -> list[str]:
        """The parts that merges make one after the other on the way to a token, from its characters on."""
        parts = self._characters(token)
        path = list(parts)
        prefix = self.model.get("continuing_subword_prefix") or ""
        while len(parts) > 1:
            ranked = [(self._ranks.get(pair, -1), place) for place, pair in enumerate(zip(parts, parts[1:]))]
            possible = [found for found in ranked if found[0] >= 0]
            if not possible:
                break
            _, place = min(possible)
            joined = parts[place] + parts[place + 1].removeprefix(prefix)
            parts[place : place + 2] = [joined]
            path.append(joined)
        return path

    def _characters(self, token: str) -> list[str]:
        """The parts that merges begin with, marked as inside or at the end of a word where that is done."""
        prefix = self.model.get("continuing_subword_prefix") or ""
        suffix = self.model.get("end_of_word_suffix") or ""
        is_inside, is_last = (
            bool(prefix) and token.startswith(prefix),
            bool(suffix) and token.endswith(suffix),
        )
        body = token.removeprefix(prefix) if is_inside else token
        parts = list(body.removesuffix(suffix) if is_last else body)
        parts = [prefix + c if is_inside or place > 0 else c for place, c in enumerate(parts)]
        if is_last and parts:
            parts[-1] += suffix
        return parts

    def beginning_of(self, word: str) -> list[int]:
        """The pieces that WordPiece finds in a word up to where it finds no more."""
        prefix = self.model.get("continuing_subword_prefix", "##")
        found, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = self.ids.get((prefix if start else "") + word[start:end])
                if piece is not None:
                    found.append(piece)
                    start = end
                    break
            else:
                break
        return found

    def trimmed(self, kept: Sequence[int]) -> dict[str, Any]:
        """The content for a tokenizer with the `kept` ids alone, which ascend and are numbered anew."""
        new_ids = {old: new for new, old in enumerate(kept)}
        content = {name: copy.deepcopy(part) for name, part in self.content.items() if name != "model"}
        content["added_tokens"] = [
            {**token, "id": new_ids[token["id"]]} for token in self.content["added_tokens"]
        ]
        content["post_processor"] = _processor_with(content.get("post_processor"), new_ids)
        if content.get("padding"):
            content["padding"]["pad_id"] = new_ids[content["padding"]["pad_id"]]
        return {**content, "model": self._trimmed_model(new_ids)}

    def _trimmed_model(self, new_ids: Mapping[int, int]) -> dict[str, Any]:
        """The part of the content that holds the vocabulary."""
        model = dict(self.model)
        if self.kind == "Unigram":
            model["vocab"] = [entry for number, entry in enumerate(self.model["vocab"]) if number in new_ids]
            if model.get("unk_id") is not None:
                model["unk_id"] = new_ids[model["unk_id"]]
            return model
        model["vocab"] = {
            token: new_ids[number] for token, number in self._model_ids().items() if number in new_ids
        }
        if self.kind == "BPE":
            prefix = model.get("continuing_subword_prefix") or ""
            whole = model["vocab"]
            model["merges"] = [
                merge
                for merge, (left, right) in zip(self.model["merges"], self.merges)
                if left in whole and right in whole and left + right.removeprefix(prefix) in whole
            ]
        return model


def _guessed_kind(model: Mapping[str, Any]) -> str:
    """The kind of tokenizer that a file of an older version does not name."""
    if "merges" in model:
        return "BPE"
    if isinstance(model.get("vocab"), list):
        return "Unigram"
    return "WordPiece" if "continuing_subword_prefix" in model else "WordLevel"


def _parts(merge: str | Sequence[str]) -> tuple[str, str]:
    """The two parts of a merge, which files of older versions set apart by a space."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The steps of a part of a tokenizer, which may be a sequence of them."""
    if isinstance(part, dict):
        yield part
        for name in ("normalizers", "pretokenizers", "processors"):
            for step in part.get(name, ()):
                yield from _steps(step)


def _has_part(part: Any, kind: str) -> bool:
    """Whether a step of a kind is in a part of a tokenizer."""
    return any(step.get("type") == kind for step in _steps(part))


def _ids_in_processor(processor: Any) -> Iterator[int]:
    """The ids that a post-processor puts around texts."""
    for step in _steps(processor):
        for special in _templates(step):
            yield from special["ids"]
        for name in ("sep", "cls"):
            if isinstance(step.get(name), list):
                yield step[name][1]


def _processor_with(processor: Any, new_ids: Mapping[int, int]) -> Any:
    """A copy of a post-processor with other ids."""
    fresh = copy.deepcopy(processor)
    for step in _steps(fresh):
        for special in _templates(step):
            special["ids"] = [new_ids[number] for number in special["ids"]]
        for name in ("sep", "cls"):
            if isinstance(step.get(name), list):
                step[name][1] = new_ids[step[name][1]]
    return fresh


def _templates(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The special tokens of a template, each with its ids."""
    found = step.get("special_tokens")
    return list(found.values()) if isinstance(found, dict) else []
