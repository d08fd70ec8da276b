"""Vocabulary files, and replacements of packages that OpenNMT-py imports but that may lack a wheel."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.extras import missing_module
from shared_embeddings.words.token_counts import split_count

UNKNOWN = "<unk>"
# Part of each sentence, but not of vocabulary files.
SENTENCE_MARKS = ("<s>", "</s>")


class Vocab:
    """A list of tokens with their ids; the part of ``pyonmttok.Vocab`` that OpenNMT-py uses."""

    def __init__(self, tokens: Iterable[str] = ()) -> None:
        self.ids_to_tokens: list[str] = []
        self.tokens_to_ids: dict[str, int] = {}
        self._default_id: int | None = None
        for token in tokens:
            self.add_token(token)

    @property
    def default_id(self) -> int:
        """The id of unknown tokens: the one that was set, or that of ``<unk>``, or the size."""
        if self._default_id is not None:
            return self._default_id
        return self.tokens_to_ids.get(UNKNOWN, len(self))

    @default_id.setter
    def default_id(self, index: int) -> None:
        self._default_id = index

    def add_token(self, token: str) -> None:
        """Append a token unless it exists."""
        if token not in self.tokens_to_ids:
            self.tokens_to_ids[token] = len(self.ids_to_tokens)
            self.ids_to_tokens.append(token)

    def lookup_token(self, token: str) -> int:
        """Return the id of a token, or the default id."""
        return self.tokens_to_ids.get(token, self.default_id)

    def lookup_index(self, index: int) -> str:
        """Return the token of an id, ``<unk>`` if it is out of range."""
        return self.ids_to_tokens[index] if 0 <= index < len(self) else UNKNOWN

    def __call__(self, tokens: Iterable[str]) -> list[int]:
        """Return the ids of a sentence."""
        return [self.lookup_token(token) for token in tokens]

    __getitem__ = lookup_token

    def __contains__(self, token: str) -> bool:
        return token in self.tokens_to_ids

    def __len__(self) -> int:
        return len(self.ids_to_tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocab) and self.ids_to_tokens == other.ids_to_tokens

    __hash__ = None  # type: ignore[assignment]


def build_vocab_from_tokens(
    tokens: Iterable[str],
    maximum_size: int = 0,
    minimum_frequency: int = 1,
    special_tokens: Iterable[str] | None = None,
) -> Vocab:
    """Build a vocabulary of the special tokens followed by the others, most frequent first.

    It has at most `maximum_size` tokens, including all special ones; 0 keeps all. Each token counts once, so
    that a `minimum_frequency` of more than 1 keeps special tokens only.
    """
    specials = list(special_tokens or ())
    ordinary = list(tokens) if minimum_frequency <= 1 else []
    if maximum_size > 0:
        ordinary = ordinary[: max(0, maximum_size - len(specials))]
    return Vocab([*specials, *ordinary])


def _missing(what: str, package: str, remedy: str) -> Callable[..., None]:
    """A function that stands for one of a package that is not installed."""

    def fail(*args: object, **kwargs: object) -> None:
        wheels = "" if package == "spacy" else " (it has wheels for Python 3.10 to 3.12)"
        raise UserError(f"{what}: {missing_module(package)}{wheels}, or {remedy}")

    return fail


def _add_stub(package: str, members: dict[str, object]) -> None:
    """Register a stub module for a package that is not installed."""
    if package in sys.modules or importlib.util.find_spec(package) is not None:
        return
    module = types.ModuleType(package)
    module.__spec__ = importlib.machinery.ModuleSpec(package, None)
    for name, member in members.items():
        setattr(module, name, member)
    sys.modules[package] = module


class _LazySpacy(importlib.abc.MetaPathFinder):
    """Finds spaCy and imports it lazily, which saves a second."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the specification of spaCy if it is installed; None for other modules."""
        spec = importlib.machinery.PathFinder.find_spec(name) if name == "spacy" else None
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def provide_missing_packages() -> None:
    """Make OpenNMT-py, which imports them, work without pyonmttok, fasttext and spaCy; import spaCy lazily.

    Features that need a missing package fail with an error that names it.
    """
    needed = ("Tokenizer", "set_random_seed", "BPELearner", "SentencePieceLearner")
    stubs = {
        name: _missing("transform onmt_tokenize", "pyonmttok", "use bpe or sentencepiece") for name in needed
    }
    _add_stub("pyonmttok", {"Vocab": Vocab, "build_vocab_from_tokens": build_vocab_from_tokens, **stubs})
    _add_stub("fasttext", {"load_model": _missing("transform clean", "fasttext", "remove it")})
    sys.meta_path.insert(0, _LazySpacy())
    _add_stub("spacy", {"load": _missing("transform terminology", "spacy", "remove it")})


def read_vocabulary(path: str, minimum_count: int) -> list[str]:
    """Read the tokens of a vocabulary file that have at least a count.

    It is UTF-8 text with one token per line, optionally followed by a tab or space and its count.
    """
    lines = _read_lines(path)
    if split_count(lines[0]) is None:
        return lines
    entries = [split_count(line) for line in lines]
    if None in entries:
        number = entries.index(None)
        raise UserError(
            f"vocabulary {path}: line {number + 1} is {lines[number]!r}, expected a token, a tab and its "
            "count; create it again with onmt_build_vocab"
        )
    return [entry[0] for entry in entries if entry is not None and entry[1] >= minimum_count]


def vocabulary_counts(path: str) -> dict[str, int]:
    """Return the count of every token of a vocabulary file; empty if it has no counts."""
    entries = [split_count(line) for line in _read_lines(path)]
    return dict(entry for entry in entries if entry is not None)


def _read_lines(path: str) -> list[str]:
    if not Path(path).is_file():
        raise UserError(f"vocabulary {path}: no such file; create it with onmt_build_vocab")
    try:
        # "-sig": some editors put a byte order mark at the start.
        lines = Path(path).read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"vocabulary {path}: is not UTF-8 at byte {error.start}; convert it") from error
    lines = [line.rstrip("\r") for line in lines]
    if lines and lines[-1] == "":
        lines.pop()
    if not lines:
        raise UserError(f"vocabulary {path}: is empty; create it with onmt_build_vocab")
    return lines
