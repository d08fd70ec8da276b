"""Transforms, their options and subword files."""

from __future__ import annotations

import contextlib
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from nmt.checkpoints import SUBWORDS as STORED
from nmt.checkpoints import read_checkpoint
from nmt.options import SUBWORD_FILES
from nmt.plan import parse_mapping
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import parse_options

TOKENIZER_OPTIONS = ("src_onmttok_kwargs", "tgt_onmttok_kwargs")
EXAMPLE = "{mode: aggressive, joiner_annotate: true}"
_LONGEST = 10_000


@dataclass(frozen=True)
class TokenizerOptions:
    """Keyword arguments of ``pyonmttok.Tokenizer``, except those that OpenNMT-py's subword options set."""

    mode: Literal["aggressive", "char", "conservative", "none", "space"] = "none"
    allow_isolated_marks: bool = False
    case_feature: bool = False
    case_markup: bool = False
    joiner: str = ""
    joiner_annotate: bool = False
    joiner_new: bool = False
    lang: str = ""
    no_substitution: bool = False
    preserve_placeholders: bool = False
    preserve_segmented_tokens: bool = False
    segment_alphabet: tuple[str, ...] = ()
    segment_alphabet_change: bool = False
    segment_case: bool = False
    segment_numbers: bool = False
    soft_case_regions: bool = False
    spacer_annotate: bool = False
    spacer_new: bool = False
    support_prior_joiners: bool = False
    vocabulary: tuple[str, ...] = ()
    with_separators: bool = False


_OF_SUBWORDS = {
    **dict.fromkeys(("bpe_model_path", "sp_model_path"), "subword_model"),
    **dict.fromkeys(("bpe_dropout", "sp_alpha"), "subword_alpha"),
    **dict.fromkeys(("vocabulary_path", "bpe_vocab_path"), "subword_vocab"),
    **dict.fromkeys(("vocabulary_threshold", "bpe_vocab_threshold"), "vocab_threshold"),
    "sp_nbest_size": "subword_nbest",
}


def parse_tokenizer(name: str, value: Any) -> dict[str, Any]:
    """Parse the options of a tokenizer, a mapping or its text in YAML, JSON or Python, as literals."""
    if isinstance(value, str) and len(value) > _LONGEST:
        raise UserError(f"{name}: has {len(value)} characters; expected a mapping such as {EXAMPLE}")
    try:
        found = parse_mapping(name, value, EXAMPLE) or {}
    except (RecursionError, MemoryError) as error:
        raise UserError(f"{name}: is nested too deeply; expected a mapping such as {EXAMPLE}") from error
    for key in found:
        if key in _OF_SUBWORDS:
            raise UserError(f"{name}: {key} is set by {name[:3]}_{_OF_SUBWORDS[key]}; remove it here")
    parse_options(name, TokenizerOptions, found)
    return {"mode": "none", **found}


NONE = "none"  # value of -transforms for tokenized text
APPLIED = ("normalize", "prefix", "suffix", "inferfeats", "onmt_tokenize", "sentencepiece", "bpe")
NEEDING_TARGETS = ("clean", "filtertoolong", "inlinetags", "terminology")  # not available in translation
SUBWORDS = ("onmt_tokenize", "sentencepiece", "bpe")
# Options that a corpus may set; in translation, the prefix is the only one of the target that is known.
_OF_CORPUS = {
    "prefix": ("src_prefix", "tgt_prefix"),
    "suffix": ("src_suffix",),
    "normalize": tuple(
        "src_lang tgt_lang penn norm_quote_commas norm_numbers pre_replace_unicode_punct "
        "post_remove_control_chars".split()
    ),
}
# With a shared vocabulary, the target uses these options of the source.
_SHARED = ("subword_model", "subword_type", "onmttok_kwargs")


class Recorded(NamedTuple):
    """The transforms recorded in a checkpoint."""

    path: Path
    options: dict[str, Any]  # of its training
    files: dict[str, bytes]  # content of its subword files, by option


def stored_files(opt: Namespace) -> dict[str, Any]:
    """Return the subword files to store in a checkpoint: ``{STORED: {option: bytes as a tensor (n,)}}``."""
    names = {name for names in _names_by_corpus(vars(opt)).values() for name in names}
    if names.isdisjoint(SUBWORDS):
        return {}
    paths = {name: getattr(opt, name, None) for name in SUBWORD_FILES}
    found = {name: Path(path) for name, path in paths.items() if path and os.path.isfile(path)}
    stored = {name: torch.tensor(list(path.read_bytes()), dtype=torch.uint8) for name, path in found.items()}
    return {STORED: stored} if stored else {}


def record_transforms(opt: Namespace, saved: Namespace) -> None:
    """Set the data and the transforms of a run in the options for its checkpoints, after ``train_from``."""
    from onmt.transforms import AVAILABLE_TRANSFORMS
    from onmt.utils.parse import ArgumentParser

    kinds = AVAILABLE_TRANSFORMS.values()
    options = {name for kind in kinds for name in vars(ArgumentParser.defaults(kind.add_options))}
    for name in {"data", "transforms", "_all_transform", *options} & vars(opt).keys():
        setattr(saved, name, getattr(opt, name))


def read_recorded(path: str) -> Recorded:
    """Read the transforms recorded in a checkpoint, without its weights."""
    checkpoint = read_checkpoint(path, mapped=True)
    options, stored = vars(checkpoint["opt"]), checkpoint.get(STORED, {})
    kept = [name for name in SUBWORD_FILES if name in stored]
    files = {name: stored[name].byte().flatten().numpy().tobytes() for name in kept}
    return Recorded(Path(path), dict(options), files)


@contextlib.contextmanager
def applied(opt: Namespace) -> Iterator[str]:
    """Complete the transforms of a translation from the checkpoint, and yield a description of them.

    ``opt.transforms`` and options in ``opt.given`` take precedence over the checkpoint.
    """
    asked = list(opt.transforms)
    if NONE in asked:
        if len(asked) > 1:
            raise UserError(f"transforms: {' '.join(asked)}: {NONE} cannot be combined with others")
        opt.transforms = []
        yield "transforms: none: the text is tokenized"
        return
    recorded = read_recorded(opt.models[0])
    for path in opt.models[1:]:
        other = read_recorded(path)
        if _trained(recorded) != _trained(other) or recorded.files != other.files:
            raise UserError(
                f"model: {path} was trained with other transforms than {recorded.path}; translate tokenized "
                f"text with -transforms {NONE}"
            )
    names, of_corpus = _trained(recorded) if not asked else (asked, {})
    opt.transforms = names
    with tempfile.TemporaryDirectory() as folder:
        values = {**recorded.options, **of_corpus, **_files(recorded, opt, names, Path(folder))}
        _fill(opt, names, values, recorded)
        _check_complete(opt)
        yield _describe(names, recorded, bool(asked))


def _names_by_corpus(options: Mapping[str, Any]) -> dict[str, list[str]]:
    default = options.get("transforms") or []
    data = options.get("data")
    corpora = data if isinstance(data, dict) and data else {"": {}}
    found = {}
    for name, corpus in corpora.items():
        names = corpus.get("transforms") if isinstance(corpus, dict) else None
        found[str(name)] = default if names is None else names
    for names in found.values():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"checkpoint: transforms is {str(names)[:80]!r}; expected a list of names")
    return found


def _trained(recorded: Recorded) -> tuple[list[str], dict[str, Any]]:
    """Return the transforms of a model in translation, and the options that corpora set for them."""
    data = recorded.options.get("data")
    ways: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for corpus, names in _names_by_corpus(recorded.options).items():
        kept = [name for name in names if name in APPLIED]
        own = (data if isinstance(data, dict) else {}).get(corpus)
        options = [option for name in kept for option in _OF_CORPUS.get(name, ())]
        ways[corpus] = kept, {option: own[option] for option in options if own and option in own}
    of_training = [way for corpus, way in ways.items() if corpus != "valid"] or list(ways.values())
    if all(way == of_training[0] for way in of_training):
        return of_training[0]
    if "valid" in ways:
        return ways["valid"]
    listed = "; ".join(
        f"{corpus}: {' '.join(names) or NONE} {own or ''}".rstrip() for corpus, (names, own) in ways.items()
    )
    raise UserError(
        f"checkpoint {recorded.path}: its corpora have different transforms ({listed}); set -transforms and "
        f"their options for this text, or -transforms {NONE} for tokenized text"
    )


def _files(recorded: Recorded, opt: Namespace, names: list[str], folder: Path) -> dict[str, str]:
    """Return the paths of the subword files by option: from the checkpoint, the original, or next to it."""
    if set(names).isdisjoint(SUBWORDS):
        return {}
    found = {}
    for name in SUBWORD_FILES:
        trained = recorded.options.get(name)
        if getattr(opt, name) or not (trained and isinstance(trained, str)):
            continue
        if name in recorded.files:
            (folder / name).write_bytes(recorded.files[name])
            found[name] = str(folder / name)
            continue
        places = [Path(trained), recorded.path.parent / Path(trained).name]
        existing = next((place for place in places if place.is_file()), None)
        if existing is None:
            raise UserError(
                f"{name}: the file {trained} of the training is not found, nor stored in the checkpoint or "
                f"next to it; name it with -{name}, or add -transforms {NONE} for tokenized text"
            )
        found[name] = str(existing)
    return found


def _fill(opt: Namespace, names: list[str], values: Mapping[str, Any], recorded: Recorded) -> None:
    """Set the options of transforms that are not given to the values of the training."""
    from onmt.transforms import AVAILABLE_TRANSFORMS
    from onmt.utils.parse import ArgumentParser

    defaults: dict[str, Any] = {}
    for name in names:
        if name not in AVAILABLE_TRANSFORMS:
            raise UserError(f"checkpoint {recorded.path}: its transform {name[:80]!r} is unknown")
        defaults.update(vars(ArgumentParser.defaults(AVAILABLE_TRANSFORMS[name].add_options)))
    source, target = (
        (recorded.options.get(f"{side}_subword_vocab"), recorded.options.get(f"{side}_vocab_threshold"))
        for side in ("src", "tgt")
    )
    is_shared = values.get("share_vocab") and source == target
    of_source = {f"tgt_{name}": f"src_{name}" for name in _SHARED} if is_shared else {}
    # Options copied from the source come after those of the source.
    for name in sorted(defaults, key=of_source.__contains__):
        default = defaults[name]
        value = getattr(opt, of_source[name]) if name in of_source else values.get(name)
        if value is None or name in opt.given:
            continue
        wanted = (int, float) if type(default) is float else str if default is None else type(default)
        if name not in TOKENIZER_OPTIONS and not isinstance(value, wanted):  # those are checked later
            raise UserError(f"checkpoint {recorded.path}: {name} is {str(value)[:80]!r}, of the wrong type")
        setattr(opt, name, value)
    if "prefix" in names and opt.tgt_prefix and not opt.tgt:
        opt.tgt_file_prefix = True  # the transform passes it as a target prefix


def _check_complete(opt: Namespace) -> None:
    subwords = [name for name in opt.transforms if name in SUBWORDS]
    for name in subwords:
        for side in ("src", "tgt"):
            needed = name != "onmt_tokenize" or getattr(opt, f"{side}_subword_type") != NONE
            if needed and not getattr(opt, f"{side}_subword_model"):
                raise UserError(
                    f"transforms: {name} needs a subword model; name it with -{side}_subword_model"
                )
    if subwords and opt.report_align:
        raise UserError(
            f"report_align: aligns tokens, but {subwords[0]} joins them in the output; translate tokenized "
            f"text with -transforms {NONE}"
        )


def _describe(names: list[str], recorded: Recorded, is_asked: bool) -> str:
    if not names:
        return ""
    left = {name for names in _names_by_corpus(recorded.options).values() for name in names} - set(APPLIED)
    origin = "as requested" if is_asked else f"as in the training of {recorded.path.name}"
    unused = f"; {', '.join(sorted(left))} in training only" if left and not is_asked else ""
    return (
        f"transforms: {', '.join(names)} on the source, {origin}, and undone on the output{unused}; "
        f"for tokenized text, add -transforms {NONE}"
    )
