"""The tokenizer in a model's folder: its words, its token counts in texts, and leaving tokens out.

A trimmed ``tokenizer.json`` tokenizes covered texts as before. The tokens to keep, in addition to those of
the texts, depend on the kind of tokenizer:

- BPE merges two parts at a time. The intermediate parts of a kept token are kept, and all merges between kept
  parts, in their order.
- Unigram maximizes a sum of scores, so a path of kept pieces remains the best one. The cost of an unknown
  character derives from the piece with the lowest score, which is kept.
- WordPiece takes the longest piece at each position. Words that it cannot complete are unknown; the pieces
  up to the failing position are kept.

Byte tokens are kept if the tokenizer falls back to them, so that it can still tokenize any text. Other
tokenizers need single characters for that, see `TokenizerFile.characters`.
"""

from __future__ import annotations

import base64
import copy
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared_embeddings.hf.folder import quiet, read_json
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import first_line
from shared_embeddings.utils.reading import read_lines

TOKENIZER = "tokenizer.json"
_TOKENIZERS = ("tokenizer*", "vocab*", "*.spm", "*.model", "merges.txt")
# Lines that are tokenized at a time.
_LINES = 1000
# The share of rows that have a token, at least. Models often pad their tables, but not by that much.
_LEAST_TOKENS = 0.5
_BYTES = 256
# In place of a space, as in SentencePiece.
SPACE = "▁"
KINDS = ("BPE", "Unigram", "WordPiece", "WordLevel")
# The most characters that a tokenizer's rules may write for one that they read, or tokens around a text. NFKC
# has 18 for one character.
_MOST_WRITTEN = 64
# Characters of several bytes, which ``ByteLevel`` and normal forms lengthen.
_GROWING = ("é", "語", "ﷺ", "\U0001f600")


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder; UserError if it cannot be loaded, or makes texts much longer."""
    file = folder / TOKENIZER
    try:
        if file.is_file():
            check_growth(read_json(file))
        with quiet():
            loaded = require("transformers").AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        if loaded.is_fast and not file.is_file():
            check_growth(json.loads(loaded.backend_tokenizer.to_str()))
    except Exception as error:  # the library tokenizers raises plain ones, others their own
        missing = "" if file.is_file() else f"there is no {TOKENIZER}; "
        raise UserError(
            f"model {folder}: its tokenizer cannot be loaded ({missing}{first_line(error)}); copy it again, "
            "or remove it from the folder"
        ) from error
    return loaded


class Vocabulary:
    """The vocabulary of the tokenizer in a model's folder; without a tokenizer, the words are the ids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        has_tokenizer = any(any(folder.glob(pattern)) for pattern in _TOKENIZERS)
        self._tokenizer = load_tokenizer(folder) if has_tokenizer else None

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

    def mask(self) -> int | None:
        """The id of the mask token, if any."""
        return None if self._tokenizer is None else self._tokenizer.mask_token_id

    def _required(self, use: str = "to tokenize texts with; add it there") -> Any:
        """The tokenizer; UserError if there is none."""
        if self._tokenizer is None:
            raise UserError(f"model {self.folder}: has no tokenizer {use}")
        return self._tokenizer

    def encode(self, text: str) -> tuple[list[int], list[int]]:
        """The ids of the tokenizer's beginning mark, if any, and of a text; UserError without a tokenizer."""
        tokenizer = self._required()
        first = tokenizer("")["input_ids"][:1]
        begin = first if first == [tokenizer.bos_token_id] else []
        return begin, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def sentences(self, lines: Sequence[str], longest: int) -> list[list[int]]:
        """The ids of lines with sentence marks, up to `longest`; UserError without a tokenizer."""
        found = self._required()(list(lines), truncation=True, max_length=longest)
        return list(found["input_ids"])

    def count(self, texts: Sequence[Path]) -> dict[str, int]:
        """The token counts of texts; UserError without a tokenizer, or if a text is blank or not UTF-8."""
        tokenizer = self._required("to count words with; give --token-counts, with ids instead of words")
        counts: Counter[int] = Counter()
        for path in texts:
            lines = [line for line in read_lines(path) if line.strip()]
            for start in range(0, len(lines), _LINES):
                found = tokenizer(lines[start : start + _LINES], add_special_tokens=False, verbose=False)
                for ids in found["input_ids"]:
                    counts.update(ids)
        if not counts:
            raise UserError(f"text {', '.join(map(str, texts))}: has no words; use another text")
        return {tokenizer.convert_ids_to_tokens(index): count for index, count in counts.items()}


def check_tokens(ids: Mapping[str, int], rows: int) -> None:
    """Raise UserError unless a tokenizer, token -> id, is that of a model with `rows` rows of words."""
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


def check_growth(content: Mapping[str, Any]) -> None:
    """Raise UserError if the rules of a ``tokenizer.json`` could fill the memory with what they write."""
    before = [step for step in _steps(content.get("normalizer")) if step.get("type") != "Sequence"]
    before += [step for step in _steps(content.get("pre_tokenizer")) if step.get("type") == "ByteLevel"]
    after = [step for step in _steps(content.get("decoder")) if step.get("type") == "Replace"]
    for name, steps in (("normalizer", before), ("decoder", after)):
        if (longest := _longest_written(steps)) > _MOST_WRITTEN:
            raise UserError(
                f"{TOKENIZER}: its {name} can write {longest:,} characters for one, at most "
                f"{_MOST_WRITTEN} are read; use another tokenizer"
            )
    for step in _steps(content.get("post_processor")):
        single = step.get("single")
        template: list[Any] = single if isinstance(single, list) else []
        marks = sum(len(special["ids"]) for special in _templates(step))
        texts = sum("Sequence" in part for part in template)
        if texts > 1 or max(marks, len(template)) > _MOST_WRITTEN:
            raise UserError(
                f"{TOKENIZER}: its post_processor repeats a text, or adds more than {_MOST_WRITTEN} tokens; "
                "use another tokenizer"
            )


def _longest_written(steps: Sequence[Mapping[str, Any]]) -> int:
    """How many characters the steps of a normalizer write for one; stops where that is too many.

    Steps that replace text multiply: four that write 1,000 characters for one make 10^12 of it. So the steps
    after each one are applied to all that it can write.
    """
    written = [list(_GROWING), *map(_written, steps)]
    longest = max(len(text) for texts in written for text in texts)
    if longest > _MOST_WRITTEN:
        return longest
    applied = [_applied(step) for step in steps]
    for number, texts in enumerate(written):
        for text in texts:
            for apply in applied[number:]:
                text = apply(text)
                longest = max(longest, len(text))
                if longest > _MOST_WRITTEN:
                    return longest
    return longest


def _written(step: Mapping[str, Any]) -> list[str]:
    """What a step of a normalizer writes in place of what it finds."""
    if step.get("type") == "Precompiled":  # the size of a trie, the trie, and texts that end with NUL
        table = base64.b64decode(step["precompiled_charsmap"] or "")
        return table[4 + int.from_bytes(table[:4], "little") :].decode("utf-8", "replace").split("\0")
    return [str(step.get(name, "")) for name in ("content", "prepend")]


def _applied(step: Mapping[str, Any]) -> Callable[[str], str]:
    from tokenizers import Tokenizer

    # Decoders and pretokenizers that replace text are described like normalizers.
    kind = {"type": "ByteLevel"} if step.get("type") == "ByteLevel" else step
    empty = ("truncation", "padding", "pre_tokenizer", "post_processor", "decoder")
    model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    content: dict[str, Any] = {"version": "1.0", "added_tokens": [], **dict.fromkeys(empty), "model": model}
    normalizer: Any = Tokenizer.from_str(json.dumps({**content, "normalizer": kind})).normalizer
    return normalizer.normalize_str  # type: ignore[no-any-return]


class TokenizerFile:
    """The content of a ``tokenizer.json``.

    Args:
        content: the parsed file, not modified.

    Attributes:
        kind: one of `KINDS`.
        tokens: id -> token.
        ids: token -> id.
        marks: what pieces start or end with to mark their place in a word.

    Raises:
        UserError: an unknown kind of tokenizer.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self.model: Mapping[str, Any] = content["model"]
        self.kind = self.model.get("type")
        if not self.kind:  # an older file
            is_list = isinstance(self.model.get("vocab"), list)
            is_wordpiece = "continuing_subword_prefix" in self.model
            other = "Unigram" if is_list else "WordPiece" if is_wordpiece else "WordLevel"
            self.kind = "BPE" if "merges" in self.model else other
        if self.kind not in KINDS:
            raise UserError(
                f"a tokenizer of kind {self.kind} cannot be trimmed; supported are {', '.join(KINDS)}"
            )
        self.ids: dict[str, int] = self._model_ids() | {
            t["content"]: t["id"] for t in content["added_tokens"]
        }
        self.tokens = {number: token for token, number in self.ids.items()}
        # Older files separate the two parts of a merge by a space.
        merges = (m.split(" ") if isinstance(m, str) else m for m in self.model.get("merges", ()))
        self.merges = [(left, right) for left, right in merges]
        # What a piece inside a word starts with, and the last one ends with.
        default = "##" if self.kind == "WordPiece" else ""
        self._prefix: str = self.model.get("continuing_subword_prefix") or default
        self._suffix: str = self.model.get("end_of_word_suffix") or ""
        self.marks = [mark for mark in (self._prefix, self._suffix, SPACE) if mark]
        self._ranks = {parts: rank for rank, parts in enumerate(self.merges)}

    def _model_ids(self) -> dict[str, int]:
        vocab = self.model["vocab"]
        if self.kind == "Unigram":
            return {piece: number for number, (piece, _) in enumerate(vocab)}
        return dict(vocab)

    def specials(self) -> set[int]:
        """The ids of added tokens, of tokens around every text, of the unknown token and of padding."""
        found = {token["id"] for token in self.content["added_tokens"]}
        for step in _steps(self.content.get("post_processor")):
            found.update(number for special in _templates(step) for number in special["ids"])
            found.update(step[name][1] for name in ("sep", "cls") if isinstance(step.get(name), list))
        unknown = self.model.get("unk_token")
        if unknown in self.ids:
            found.add(self.ids[unknown])
        if self.model.get("unk_id") is not None:
            found.add(self.model["unk_id"])
        if self.content.get("padding"):
            found.add(self.content["padding"]["pad_id"])
        return found

    def closed(self, ids: Iterable[int]) -> set[int]:
        """The valid ones among `ids`, plus the ids that tokenizing a text into them requires.

        Args:
            ids: the ids to keep, including special ones.
        """
        kept = {number for number in ids if number in self.tokens} | self._bytes()
        if self.kind == "BPE":
            paths = (self._merge_path(self.tokens[number]) for number in list(kept))
            kept |= {self.ids[part] for path in paths for part in path if part in self.ids}
        if self.kind == "Unigram":
            scores = [score for _, score in self.model["vocab"]]
            kept.add(scores.index(min(scores)))
        return kept

    def characters(self) -> set[int]:
        """The ids that spell other texts: single characters, and tokens with other characters than those.

        Tokenizers that fall back to bytes do not need them; those of whole words do not spell.
        """
        if self.kind == "WordLevel" or len(self._bytes()) >= _BYTES:
            return set()
        found = set()
        for token, number in self._model_ids().items():
            spelled = self._characters(token)
            if len(spelled) == 1 or any(character not in self.ids for character in spelled):
                found.add(number)
        return found

    def _bytes(self) -> set[int]:
        found: set[str] = set()
        if self.model.get("byte_fallback"):
            found = {f"<0x{byte:02X}>" for byte in range(_BYTES)}
        if _has_part(self.content.get("pre_tokenizer"), "ByteLevel") or _has_part(
            self.content.get("normalizer"), "ByteLevel"
        ):
            from tokenizers.pre_tokenizers import ByteLevel

            found |= {byte + end for byte in ByteLevel.alphabet() for end in ("", self._suffix)}
        return {self.ids[token] for token in found if token in self.ids}

    def _merge_path(self, token: str) -> list[str]:
        """The characters of a token and the parts that merging creates from them, in order."""
        parts = self._characters(token)
        path = list(parts)
        prefix = self._prefix
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
        """The characters that merging starts from, with the prefix or suffix of their place in a word."""
        prefix = self._prefix
        suffix = self._suffix
        is_inside = bool(prefix) and token.startswith(prefix)
        is_last = bool(suffix) and token.endswith(suffix)
        body = token.removeprefix(prefix) if is_inside else token
        parts = list(body.removesuffix(suffix) if is_last else body)
        parts = [prefix + c if is_inside or place > 0 else c for place, c in enumerate(parts)]
        if is_last and parts:
            parts[-1] += suffix
        return parts

    def beginning_of(self, word: str) -> list[int]:
        """The ids of the pieces that WordPiece finds in a word, up to where it finds none."""
        prefix = self._prefix
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
        """The content of a tokenizer with only the `kept` ids, which are ascending and get renumbered."""
        new_ids = {old: new for new, old in enumerate(kept)}
        content = {name: copy.deepcopy(part) for name, part in self.content.items() if name != "model"}
        content["added_tokens"] = [
            {**token, "id": new_ids[token["id"]]} for token in self.content["added_tokens"]
        ]
        for step in _steps(content.get("post_processor")):
            for special in _templates(step):
                special["ids"] = [new_ids[number] for number in special["ids"]]
            for name in ("sep", "cls"):
                if isinstance(step.get(name), list):
                    step[name][1] = new_ids[step[name][1]]
        if content.get("padding"):
            content["padding"]["pad_id"] = new_ids[content["padding"]["pad_id"]]
        model = content["model"] = dict(self.model)
        if self.kind == "Unigram":
            model["vocab"] = [entry for number, entry in enumerate(self.model["vocab"]) if number in new_ids]
            if model.get("unk_id") is not None:
                model["unk_id"] = new_ids[model["unk_id"]]
            return content
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
        return content


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The steps of a tokenizer component, which may be a sequence."""
    if isinstance(part, dict):
        yield part
        for name in ("normalizers", "pretokenizers", "processors", "decoders"):
            for step in part.get(name, ()):
                yield from _steps(step)


def _has_part(part: Any, kind: str) -> bool:
    return any(step.get("type") == kind for step in _steps(part))


def _templates(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = step.get("special_tokens")
    return list(found.values()) if isinstance(found, dict) else []
