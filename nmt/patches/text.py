"""How text is read."""

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

from nmt.data.tokenizer_options import NAMES, parse_tokenizer
from nmt.options.checks import SUBWORD_FILES
from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import UNREADABLE, first_line


def only_with_features(original: Any) -> Any:
    """Take a line as it is where no features are asked for; upstream refuses the mark that separates them."""

    def parse_features(line: str, n_feats: int = 0, defaults: Any = None) -> tuple[str, list[str] | None]:
        if n_feats == 0:
            return line.strip("\n"), None
        return original(line, n_feats, defaults)  # type: ignore[no-any-return]

    return parse_features


def with_clear_needs(original: Any) -> Any:
    """Say what the transform `clean` lacks: fasttext, or the model of it that upstream downloads."""

    def warm_up(self: Any, vocabs: Any = None) -> None:
        needed = onmt.transforms.clean.fasttext
        if needed.__spec__.origin is None:
            needed.load_model()  # a stand-in, which refuses
        try:
            original(self, vocabs)
        except urllib.error.URLError as error:
            folder = os.path.dirname(onmt.transforms.clean.__file__)
            raise UserError(
                f"transforms: clean: its language model lid.176.ftz cannot be downloaded ({error.reason}); "
                f"put the file into {folder}, or leave the transform out"
            ) from error

    return warm_up


def reading_literals(original: Any) -> Any:
    """Read the options of pyonmttok as plain values; upstream evaluates them as Python."""

    def validate_options(cls: Any, opts: Namespace) -> None:
        TokenizerTransform._validate_options(opts)
        for name in NAMES:
            setattr(opts, name, parse_tokenizer(name, getattr(opts, name)))

    return classmethod(validate_options)


def with_readable_subwords(original: Any) -> Any:
    """Say which files make no subwords; the libraries below end the process, or raise what they like."""

    def warm_up(self: Any, vocabs: Any = None) -> None:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                original(self, vocabs)
        except UserError:
            raise
        except (SystemExit, *UNREADABLE) as error:
            reason = first_line(ValueError(said.getvalue()) if isinstance(error, SystemExit) else error)
            given = [getattr(self.opts, name, None) for name in SUBWORD_FILES]
            files = " and ".join(dict.fromkeys(str(path) for path in given if path)) or "these options"
            raise UserError(
                f"transforms: subwords cannot be made with {files} ({reason}); take the files that the data "
                "were made with"
            ) from error

    return warm_up


def with_installed_languages(original: Any) -> Any:
    """Load installed models of spaCy alone: it imports whatever package its name is, and reads any folder."""

    def warm_up(self: Any, vocabs: Any = None) -> None:
        installed = sorted(entry.name for entry in entry_points(group="spacy_models"))
        for name in ("src_spacy_language_model", "tgt_spacy_language_model"):
            given = getattr(self.opts, name)
            if given not in installed:
                raise UserError(
                    f"{name}: {given!r} is no installed model of spaCy; wanted one of "
                    f"{', '.join(installed) or 'them, of which there is none'}"
                )
        original(self, vocabs)

    return warm_up


def undoing_last_first(original: Any) -> Any:
    """Undo the transforms of a text from the last that was applied to the first."""

    def apply_reverse(self: Any, translated: Any) -> Any:
        for transform in reversed(self.transforms):
            translated = transform.apply_reverse(translated)
        return translated

    return apply_reverse


def keeping_every_line(original: Any) -> Any:
    """Translate a line of which the transforms leave nothing as an unknown word; upstream drops it."""

    def batch_apply(self: Any, batch: Any, is_train: bool = False, **kwargs: Any) -> Any:
        batch = original(self, batch, is_train=is_train, **kwargs)
        if kwargs.get("corpus_name") == CorpusName.INFER:
            for example, *_ in batch:
                example["src"] = example["src"] if any(example["src"]) else [DefaultTokens.UNK]
        return batch

    return batch_apply
