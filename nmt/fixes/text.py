"""Fixes of reading text and of transforms."""

from __future__ import annotations

from argparse import Namespace
from importlib.metadata import entry_points
from typing import Any

from onmt.constants import CorpusName, DefaultTokens
from onmt.inputters import inputter, text_corpus, text_utils
from onmt.transforms import TransformPipe, tokenize
from onmt.transforms.terminology import TerminologyTransform

from nmt.corpora import CleanCorpus
from nmt.fixes import replace, wrap
from nmt.transforms import TOKENIZER_OPTIONS, parse_tokenizer
from nmt.vocabulary import read_vocabulary
from shared_embeddings.utils.errors import UserError

# Handles whitespace of any kind, and skips pairs with an empty side.
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


def parse_tokenizer_options(cls: Any, opts: Namespace) -> None:
    """Parse the options of pyonmttok as literals; they are evaluated as Python code."""
    tokenize.TokenizerTransform._validate_options(opts)
    for name in TOKENIZER_OPTIONS:
        setattr(opts, name, parse_tokenizer(name, getattr(opts, name)))


replace("_validate_options", tokenize.ONMTTokenizerTransform)(classmethod(parse_tokenizer_options))


@wrap("warm_up", TerminologyTransform)
def load_installed_spacy_models(original: Any, self: Any, vocabs: Any = None) -> None:
    """Load installed spaCy models only; spaCy itself imports packages of any name and reads any folder."""
    installed = {entry.name for entry in entry_points(group="spacy_models")}
    for name in ("src_spacy_language_model", "tgt_spacy_language_model"):
        if (model := getattr(self.opts, name)) not in installed:
            raise UserError(f"{name}: {model!r} is not installed; see python -m spacy download --help")
    original(self, vocabs)
