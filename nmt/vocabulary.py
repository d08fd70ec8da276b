"""Vocabulary files, and replacements of packages that OpenNMT-py imports but that may lack a wheel."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterable
from typing import NoReturn

from shared_embeddings.utils.errors import UserError, missing_module
from shared_embeddings.utils.reading import read_lines
from shared_embeddings.words.token_counts import split_count

UNKNOWN = "<unk>"
# Part of each sentence, but not of vocabulary files.
SENTENCE_MARKS = ("<s>", "</s>")


class Vocab:
    """A list of tokens with their ids; the part of ``pyonmttok.Vocab`` that OpenNMT-py uses.

    `default_id` is the id of unknown tokens.
    """

    def __init__(self, tokens: Iterable[str] = ()) -> None:
        self.ids_to_tokens: list[str] = []
        self.tokens_to_ids: dict[str, int] = {}
        for token in tokens:
            self.add_token(token)
        self.default_id = self.tokens_to_ids.get(UNKNOWN, len(self))

    def add_token(self, token: str) -> None:
        """Append a token unless it exists."""
        if token not in self.tokens_to_ids:
            self.tokens_to_ids[token] = len(self.ids_to_tokens)
            self.ids_to_tokens.append(token)

    def lookup_token(self, token: str) -> int:
        """Return the id of a token, or the default id."""
        return self.tokens_to_ids.get(token, self.default_id)

    __getitem__ = lookup_token

    def __call__(self, tokens: Iterable[str]) -> list[int]:
        """Return the ids of a sentence."""
        return [self.lookup_token(token) for token in tokens]

    def __contains__(self, token: str) -> bool:
        return token in self.tokens_to_ids

    def __len__(self) -> int:
        return len(self.ids_to_tokens)


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


def provide_missing_packages() -> None:
    """Make OpenNMT-py, which imports them, work without pyonmttok, fasttext and spaCy; import spaCy lazily.

    Features that need a missing package fail with an error that names it.
    """
    vocabulary = {"Vocab": Vocab, "build_vocab_from_tokens": build_vocab_from_tokens}
    for package, members in {"pyonmttok": vocabulary, "fasttext": {}, "spacy": {}}.items():
        if package in sys.modules:
            continue
        spec = importlib.util.find_spec(package)
        if spec is None:
            module = types.ModuleType(package)
            module.__spec__ = importlib.machinery.ModuleSpec(package, None)
            vars(module).update(members, __getattr__=functools.partial(_fail_without, package))
            sys.modules[package] = module
        elif package == "spacy" and spec.loader is not None:  # its import takes a second
            spec.loader = importlib.util.LazyLoader(spec.loader)
            sys.modules[package] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[package])


def _fail_without(package: str, name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise UserError(f"{missing_module(package)}, or use other transforms")


def read_vocabulary(path: str, minimum_count: int) -> list[str]:
    """Read the tokens of a vocabulary file that have at least a count.

    It is UTF-8 text with one token per line, optionally followed by a tab or space and its count.
    """
    counts = vocabulary_counts(path)
    if not counts:
        return list(read_lines(path))
    return [token for token, count in counts.items() if count >= minimum_count]


def vocabulary_counts(path: str) -> dict[str, int]:
    """Return the count of every token of a vocabulary file; empty if its first line has none."""
    counts = {}
    for number, line in enumerate(read_lines(path), 1):
        entry = split_count(line)
        if entry is None and number == 1:
            return {}
        if entry is None:
            raise UserError(
                f"vocabulary {path}: line {number} is {line!r}, expected a token, a tab and its count; "
                "create it again with onmt_build_vocab"
            )
        counts[entry[0]] = entry[1]
    return counts
