"""Fixes of reading text and of transforms."""

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
from onmt.inputters import inputter, text_corpus, text_utils
from onmt.transforms import TransformPipe, tokenize
from onmt.transforms.clean import CleanTransform
from onmt.transforms.terminology import TerminologyTransform

from nmt.corpora import CleanCorpus
from nmt.fixes import replace, wrap
from nmt.transforms import SUBWORD_FILES, TOKENIZER_OPTIONS, parse_tokenizer
from nmt.vocabulary import read_vocabulary
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import UNREADABLE, first_line

# Handles whitespace of any kind, skips pairs with an empty side, and names the line that is not UTF-8.
replace("ParallelCorpus", text_corpus)(CleanCorpus)
# Names the line of a vocabulary file that is malformed.
replace("_read_vocab_file", inputter)(read_vocabulary)


@wrap("parse_features", text_utils)
def keep_separator(
    original: Any, line: str, n_feats: int = 0, defaults: Any = None
) -> tuple[str, list[str] | None]:
    """Allow the feature separator in text without features, where it raises an error."""
    if n_feats == 0:
        return line.strip("\n"), None
    return original(line, n_feats, defaults)  # type: ignore[no-any-return]


@wrap("process", text_utils)
def allow_dropped_buckets(original: Any, task: str, bucket: Any, **kwargs: Any) -> list[Any]:
    """Return no examples for a bucket whose examples were all dropped by transforms, instead of None."""
    return original(task, bucket, **kwargs) or []


@wrap("apply_reverse", TransformPipe)
def undo_in_reverse_order(original: Any, self: Any, translated: Any) -> Any:
    """Undo the transforms of a text in reverse order."""
    for transform in reversed(self.transforms):
        translated = transform.apply_reverse(translated)
    return translated


@wrap("batch_apply", TransformPipe)
def keep_empty_lines(original: Any, self: Any, batch: Any, is_train: bool = False, **kwargs: Any) -> Any:
    """Translate lines that are empty after the transforms as an unknown word; they are dropped."""
    batch = original(self, batch, is_train=is_train, **kwargs)
    if kwargs.get("corpus_name") == CorpusName.INFER:
        for example, *_ in batch:
            example["src"] = example["src"] if any(example["src"]) else [DefaultTokens.UNK]
    return batch


@wrap("warm_up", CleanTransform)
def explain_missing_fasttext(original: Any, self: Any, vocabs: Any = None) -> None:
    """Report when the transform `clean` lacks fasttext or cannot download its model."""
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


def parse_tokenizer_options(cls: Any, opts: Namespace) -> None:
    """Parse the options of pyonmttok as literals; they are evaluated as Python code."""
    tokenize.TokenizerTransform._validate_options(opts)
    for name in TOKENIZER_OPTIONS:
        setattr(opts, name, parse_tokenizer(name, getattr(opts, name)))


replace("_validate_options", tokenize.ONMTTokenizerTransform)(classmethod(parse_tokenizer_options))


@wrap("warm_up", tokenize.BPETransform, tokenize.SentencePieceTransform, tokenize.ONMTTokenizerTransform)
def name_unusable_files(original: Any, self: Any, vocabs: Any = None) -> None:
    """Name the subword files that cannot be used; some libraries end the process instead."""
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
            f"transforms: subwords cannot be made with {files} ({reason}); use the files of the training data"
        ) from error


@wrap("warm_up", TerminologyTransform)
def load_installed_spacy_models(original: Any, self: Any, vocabs: Any = None) -> None:
    """Load installed spaCy models only; spaCy itself imports packages of any name and reads any folder."""
    installed = sorted(entry.name for entry in entry_points(group="spacy_models"))
    advice = "none; pip install 'shared-embeddings[transforms]', then python -m spacy download NAME"
    for name in ("src_spacy_language_model", "tgt_spacy_language_model"):
        given = getattr(self.opts, name)
        if given not in installed:
            raise UserError(
                f"{name}: {given!r} is not an installed spaCy model; "
                f"installed: {', '.join(installed) or advice}"
            )
    original(self, vocabs)
