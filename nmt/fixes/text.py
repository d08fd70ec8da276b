"""Fixes of reading text and of transforms."""

from __future__ import annotations

from argparse import Namespace
from importlib.metadata import entry_points
from typing import Any

from onmt.constants import CorpusName, DefaultTokens
from onmt.inputters import inputter, text_corpus, text_utils
from onmt.transforms import TransformPipe, tokenize
from onmt.transforms.misc import PrefixTransform, SuffixTransform
from onmt.transforms.terminology import TerminologyTransform
from onmt.utils.logging import logger
from onmt.utils.parse import DataOptsCheckerMixin

from nmt.corpora import CleanCorpus, check_parallel
from nmt.fixes import replace, wrap
from nmt.transforms import OF_CORPUS, TOKENIZER_OPTIONS, parse_tokenizer
from nmt.vocabulary import read_vocabulary
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.reading import open_bytes

# Handles whitespace of any kind, and skips pairs with an empty side.
replace("ParallelCorpus", text_corpus)(CleanCorpus)
# Names the line of a vocabulary file that is malformed.
replace("_read_vocab_file", inputter)(read_vocabulary)


@wrap("_validate_data", DataOptsCheckerMixin)
def complete_corpora(original: Any, opt: Namespace) -> None:
    """Check that texts are parallel, and apply the options of transforms that are set for all corpora.

    OpenNMT-py ignores what follows the shorter text, and such options.
    """
    original(opt)
    for name, corpus in opt.data.items():
        paths = [corpus.get(f"path_{side}") for side in ("src", "tgt", "align")]
        check_parallel(f"data: {name}", list(filter(None, paths)))
        if str(corpus.get("path_txt")).endswith(".gz"):
            raise UserError(f"data: {name}: path_txt: {corpus['path_txt']} is compressed; decompress it")
        for transform in corpus["transforms"]:
            for option in OF_CORPUS.get(transform, ()):
                corpus.setdefault(option, getattr(opt, option))


@wrap("exfile_open", text_corpus)
def open_corpus(original: Any, path: str | None, *args: Any, **kwargs: Any) -> Any:
    """Read compressed corpora (``.gz``), too."""
    return original(path, *args, **kwargs) if path is None else open_bytes(path)


@wrap("build_vocab", inputter)
def report_limits(original: Any, opt: Namespace, specials: dict[str, list[str]]) -> dict[str, Any]:
    """Report how many words of its file a limited vocabulary has."""
    vocabs: dict[str, Any] = original(opt, specials)
    for side in ("src",) if opt.share_vocab else ("src", "tgt"):
        limit, path = getattr(opt, f"{side}_vocab_size"), getattr(opt, f"{side}_vocab")
        words = read_vocabulary(path, getattr(opt, f"{side}_words_min_frequency"))
        used = sum(word in vocabs[side] for word in words)
        if used < len(words):
            logger.warning(
                f"{side}_vocab_size: {limit:,}, including special tokens; this uses {used:,} of the "
                f"{len(words):,} words of {path}"
            )
    return vocabs


@wrap("get_specials", PrefixTransform, SuffixTransform)
def omit_empty_words(original: Any, opt: Namespace) -> tuple[set[str], set[str]]:
    """Add no empty word to the vocabulary for a side without prefix or suffix."""
    source, target = original(opt)
    return source - {""}, target - {""}


@wrap("_prepend", PrefixTransform)
@wrap("_append", SuffixTransform)
def add_words(original: Any, self: Any, example: dict[str, Any], words: dict[str, str]) -> Any:
    """Add nothing to a side with an empty prefix or suffix, which gets an empty word.

    In translation, the prefix is the beginning of the target; a suffix would be one, too.
    """
    begins = isinstance(self, PrefixTransform)
    sides = [side for side in words if words[side].split() and (begins or example.get(side) is not None)]
    return original(self, example, {side: " ".join(words[side].split()) for side in sides})


@wrap("apply_reverse", SuffixTransform)
def remove_suffix(original: Any, self: Any, translated: str) -> str:
    """Remove the suffix of the target from a translation, as is done with prefixes."""
    suffix = self.suffix_dict["infer"]["tgt"]
    return f" {translated}".removesuffix(f" {suffix}").removeprefix(" ") if suffix else translated


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
