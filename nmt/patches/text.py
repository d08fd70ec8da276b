"""Patches of transforms and of reading text."""

from __future__ import annotations

import contextlib
import io
import os
import urllib.error
from argparse import Namespace
from importlib.metadata import entry_points
from typing import Any

import onmt.transforms.clean
from onmt.constants import CorpusName, DefaultTokens
from onmt.transforms.tokenize import TokenizerTransform

from nmt.data.transforms import TOKENIZER_OPTIONS, parse_tokenizer
from nmt.options.checks import SUBWORD_FILES
from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import UNREADABLE, first_line


def with_optional_features(original: Any) -> Any:
    """Allow the feature separator in text without features, where OpenNMT-py raises an error."""

    def parse_features(line: str, n_feats: int = 0, defaults: Any = None) -> tuple[str, list[str] | None]:
        if n_feats == 0:
            return line.strip("\n"), None
        return original(line, n_feats, defaults)  # type: ignore[no-any-return]

    return parse_features


def with_fasttext_errors(original: Any) -> Any:
    """Report when the transform `clean` lacks fasttext or cannot download its model."""

    def warm_up(self: Any, vocabs: Any = None) -> None:
        needed = onmt.transforms.clean.fasttext
        if needed.__spec__.origin is None:
            needed.load_model()  # a stub, which raises an error
        try:
            original(self, vocabs)
        except urllib.error.URLError as error:
            folder = os.path.dirname(onmt.transforms.clean.__file__)
            raise UserError(
                f"transforms: clean: its language model lid.176.ftz cannot be downloaded ({error.reason}); "
                f"put the file into {folder} or remove the transform"
            ) from error

    return warm_up


def validate_tokenizer_options(cls: Any, opts: Namespace) -> None:
    """Parse the options of pyonmttok as literals; OpenNMT-py evaluates them as Python code."""
    TokenizerTransform._validate_options(opts)
    for name in TOKENIZER_OPTIONS:
        setattr(opts, name, parse_tokenizer(name, getattr(opts, name)))


def with_subword_errors(original: Any) -> Any:
    """Name the subword files that cannot be used; some libraries end the process instead."""

    def warm_up(self: Any, vocabs: Any = None) -> None:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stderr(printed):
                original(self, vocabs)
        except UserError:
            raise
        except (SystemExit, *UNREADABLE) as error:
            reason = first_line(ValueError(printed.getvalue()) if isinstance(error, SystemExit) else error)
            given = [getattr(self.opts, name, None) for name in SUBWORD_FILES]
            files = " and ".join(dict.fromkeys(str(path) for path in given if path)) or "these options"
            raise UserError(
                f"transforms: subwords cannot be made with {files} ({reason}); use the files of the "
                "training data"
            ) from error

    return warm_up


def with_installed_spacy_models(original: Any) -> Any:
    """Load installed spaCy models only; spaCy itself imports packages of any name and reads any folder."""

    def warm_up(self: Any, vocabs: Any = None) -> None:
        installed = sorted(entry.name for entry in entry_points(group="spacy_models"))
        for name in ("src_spacy_language_model", "tgt_spacy_language_model"):
            given = getattr(self.opts, name)
            if given not in installed:
                raise UserError(
                    f"{name}: {given!r} is not an installed spaCy model; "
                    f"installed: {', '.join(installed) or 'none'}"
                )
        original(self, vocabs)

    return warm_up


def in_reverse_order(original: Any) -> Any:
    """Undo the transforms of a text in reverse order."""

    def apply_reverse(self: Any, translated: Any) -> Any:
        for transform in reversed(self.transforms):
            translated = transform.apply_reverse(translated)
        return translated

    return apply_reverse


def with_empty_lines(original: Any) -> Any:
    """Translate lines that are empty after the transforms as an unknown word; OpenNMT-py drops them."""

    def batch_apply(self: Any, batch: Any, is_train: bool = False, **kwargs: Any) -> Any:
        batch = original(self, batch, is_train=is_train, **kwargs)
        if kwargs.get("corpus_name") == CorpusName.INFER:
            for example, *_ in batch:
                example["src"] = example["src"] if any(example["src"]) else [DefaultTokens.UNK]
        return batch

    return batch_apply
