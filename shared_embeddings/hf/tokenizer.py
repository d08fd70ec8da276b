"""The tokenizer in a model's folder: its tokens, their counts in texts, and leaving tokens out.

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

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared_embeddings.hf.folder import quiet
from shared_embeddings.utils.errors import UserError, first_line, require
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


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder; UserError if it cannot be loaded."""
    try:
        with quiet():
            return require("transformers").AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # the library tokenizers raises plain ones, others their own
        missing = "" if (folder / TOKENIZER).is_file() else f"there is no {TOKENIZER}; "
        raise UserError(
            f"model {folder}: its tokenizer cannot be loaded ({missing}{first_line(error)}); copy it again, "
            "or remove it from the folder"
        ) from error


class TokenVocabulary:
    """The vocabulary of the tokenizer in a model's folder.

    Without a `tokenizer`, tokens are named by their ids, and methods that tokenize raise UserError.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        has_tokenizer = any(any(folder.glob(pattern)) for pattern in _TOKENIZERS)
        self.tokenizer = load_tokenizer(folder) if has_tokenizer else None

    def words(self, length: int) -> list[str]:
        """Return the tokens of the ids from 0 to `length` - 1; unused ids get placeholder names."""
        if self.tokenizer is None:
            return [str(index) for index in range(length)]
        tokens = {index: token for token, index in self.tokenizer.get_vocab().items()}
        return [tokens.get(index, f"<unused {index}>") for index in range(length)]

    def sentence_marks(self, prompt: str = "") -> tuple[str, ...]:
        """Return the tokens that the tokenizer adds to every sentence, and those of a prompt before it."""
        if self.tokenizer is None:
            return ()
        return tuple(self.tokenizer.convert_ids_to_tokens(self.tokenizer(prompt)["input_ids"]))

    def _required(self, use: str = "to tokenize texts with; add it there") -> Any:
        if self.tokenizer is None:
            raise UserError(f"model {self.folder}: has no tokenizer {use}")
        return self.tokenizer

    def encode(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of the tokenizer's beginning mark, if any, and of a text."""
        tokenizer = self._required()
        first = tokenizer("")["input_ids"][:1]
        begin = first if first == [tokenizer.bos_token_id] else []
        return begin, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def length(self, prompt: str) -> int:
        """Return the number of tokens before a text after a prompt, with the mark at its beginning."""
        ids = self._required()(prompt)["input_ids"]
        return len(ids) - (ids[-1] in self._required().all_special_ids)

    def sentences(self, lines: Sequence[str], longest: int) -> list[list[int]]:
        """Return the ids of lines with sentence marks, up to `longest` for each."""
        return list(self._required()(list(lines), truncation=True, max_length=longest)["input_ids"])

    def count(self, texts: Sequence[Path]) -> dict[str, int]:
        """Return the token counts of texts."""
        tokenizer = self._required("to count tokens with; give token counts, with ids instead of tokens")
        counts: Counter[int] = Counter()
        for path in texts:
            lines = [line for line in read_lines(path) if line.strip()]
            for start in range(0, len(lines), _LINES):
                block = lines[start : start + _LINES]
                for ids in tokenizer(block, add_special_tokens=False, verbose=False)["input_ids"]:
                    counts.update(ids)
        if not counts:
            raise UserError(f"text {', '.join(map(str, texts))}: has no tokens; use another text")
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


class TokenizerFile:
    """The content of a ``tokenizer.json``, not modified; UserError for a kind that is not in `KINDS`.

    Attributes:
        tokens: id -> token.
        ids: token -> id.
        marks: what pieces start or end with to mark their place in a word.
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
        vocab = self.model["vocab"]
        if self.kind == "Unigram":
            vocab = {piece: number for number, (piece, _) in enumerate(vocab)}
        self._model_ids: dict[str, int] = dict(vocab)
        self.ids = self._model_ids | {token["content"]: token["id"] for token in content["added_tokens"]}
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

    def specials(self) -> set[int]:
        """Return the ids of added tokens, of tokens around every text, and of unknown words and padding."""
        specials = {token["id"] for token in self.content["added_tokens"]}
        for step in _steps(self.content.get("post_processor")):
            templates = (step.get("special_tokens") or {}).values()
            specials.update(number for special in templates for number in special["ids"])
            specials.update(step[name][1] for name in ("sep", "cls") if isinstance(step.get(name), list))
        padding = self.content.get("padding") or {}
        unknown = self.ids.get(self.model.get("unk_token") or "")
        specials |= {unknown, self.model.get("unk_id"), padding.get("pad_id")} - {None}
        return specials

    def closed(self, ids: Iterable[int]) -> set[int]:
        """Return the valid ones among `ids`, plus the ids that tokenizing a text into them requires."""
        needed = {number for number in ids if number in self.tokens} | self._bytes()
        if self.kind == "BPE":
            paths = (self._merge_path(self.tokens[number]) for number in list(needed))
            needed |= {self.ids[part] for path in paths for part in path if part in self.ids}
        if self.kind == "Unigram":
            scores = [score for _, score in self.model["vocab"]]
            needed.add(scores.index(min(scores)))
        return needed

    def characters(self) -> set[int]:
        """Return the ids that spell other texts: single characters, and tokens with others than those.

        Tokenizers that fall back to bytes do not need them; those of whole words do not spell.
        """
        if self.kind == "WordLevel" or len(self._bytes()) >= _BYTES:
            return set()
        spelling = set()
        for token, number in self._model_ids.items():
            parts = self._characters(token)
            if len(parts) == 1 or any(character not in self.ids for character in parts):
                spelling.add(number)
        return spelling

    def _bytes(self) -> set[int]:
        tokens: set[str] = set()
        if self.model.get("byte_fallback"):
            tokens = {f"<0x{byte:02X}>" for byte in range(_BYTES)}
        steps = [*_steps(self.content.get("pre_tokenizer")), *_steps(self.content.get("normalizer"))]
        if any(step.get("type") == "ByteLevel" for step in steps):
            from tokenizers.pre_tokenizers import ByteLevel

            tokens |= {byte + end for byte in ByteLevel.alphabet() for end in ("", self._suffix)}
        return {self.ids[token] for token in tokens if token in self.ids}

    def _merge_path(self, token: str) -> list[str]:
        """Return the characters of a token and the parts that merging creates from them, in order."""
        parts = self._characters(token)
        path = list(parts)
        while len(parts) > 1:
            pairs = enumerate(zip(parts, parts[1:]))
            ranked = [(self._ranks[pair], place) for place, pair in pairs if pair in self._ranks]
            if not ranked:
                break
            _, place = min(ranked)
            joined = parts[place] + parts[place + 1].removeprefix(self._prefix)
            parts[place : place + 2] = [joined]
            path.append(joined)
        return path

    def _characters(self, token: str) -> list[str]:
        """Return the characters that merging starts from, with the prefix or suffix of their place."""
        prefix, suffix = self._prefix, self._suffix
        is_inside = bool(prefix) and token.startswith(prefix)
        is_last = bool(suffix) and token.endswith(suffix)
        body = token.removeprefix(prefix) if is_inside else token
        parts = list(body.removesuffix(suffix) if is_last else body)
        parts = [prefix + c if is_inside or place > 0 else c for place, c in enumerate(parts)]
        if is_last and parts:
            parts[-1] += suffix
        return parts

    def beginning_of(self, word: str) -> list[int]:
        """Return the ids of the pieces that WordPiece finds in a word, up to where it finds none."""
        ids: list[int] = []
        start = 0
        while start < len(word):
            prefix = self._prefix if start else ""
            ends = [end for end in range(len(word), start, -1) if prefix + word[start:end] in self.ids]
            if not ends:
                break
            ids.append(self.ids[prefix + word[start : ends[0]]])
            start = ends[0]
        return ids

    def beginnings_in(self, line: str, tokenizer: Any) -> set[int]:
        """Return the ids of how far WordPiece gets in the words of a line; none for other tokenizers."""
        if self.kind != "WordPiece":
            return set()
        normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
        text = normalizer.normalize_str(line) if normalizer is not None else line
        words = splitter.pre_tokenize_str(text) if splitter is not None else [(text, None)]
        return {number for word, _ in words for number in self.beginning_of(word)}

    def restored(self, tokenizer: Any, lines: Sequence[str], ids: Sequence[Sequence[int]]) -> int:
        """Count the lines that a tokenizer decodes from their ids.

        Normalization may change case or accents; decoders may add or drop spaces, or leave marks of pieces.
        """

        def letters(text: str) -> str:
            text = text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)
            for mark in self.marks:
                text = text.replace(mark, "")
            return "".join(text.split())

        decoded = tokenizer.decode_batch([list(line) for line in ids], skip_special_tokens=True)
        return sum(letters(line) == letters(text) for line, text in zip(lines, decoded, strict=True))

    def trimmed(self, ids: Sequence[int]) -> dict[str, Any]:
        """Return the content of a tokenizer with only these ids, which are ascending and renumbered."""
        new_ids = {old: new for new, old in enumerate(ids)}
        content = {name: copy.deepcopy(part) for name, part in self.content.items() if name != "model"}
        content["added_tokens"] = [
            {**token, "id": new_ids[token["id"]]} for token in self.content["added_tokens"]
        ]
        for step in _steps(content.get("post_processor")):
            for special in (step.get("special_tokens") or {}).values():
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
            token: new_ids[number] for token, number in self._model_ids.items() if number in new_ids
        }
        if self.kind == "BPE":
            vocab = model["vocab"]
            model["merges"] = [
                merge
                for merge, (left, right) in zip(self.model["merges"], self.merges)
                if {left, right, left + right.removeprefix(self._prefix)} <= vocab.keys()
            ]
        return content


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The steps of a tokenizer component, which may be a sequence."""
    if isinstance(part, dict):
        yield part
        for name in ("normalizers", "pretokenizers", "processors", "decoders"):
            for step in part.get(name, ()):
                yield from _steps(step)
