"""Transforms in translation: those of the training, which the checkpoint records with its subword files."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from onmt.transforms import AVAILABLE_TRANSFORMS
from onmt.utils.logging import logger
from onmt.utils.parse import ArgumentParser

from nmt.checkpoints import SUBWORDS as STORED
from nmt.options import parse_mapping
from shared_embeddings.utils.errors import UserError

SUBWORD_FILES = ("src_subword_model", "tgt_subword_model", "src_subword_vocab", "tgt_subword_vocab")
TOKENIZER_OPTIONS = ("src_onmttok_kwargs", "tgt_onmttok_kwargs")
NONE = "none"  # value of -transforms for tokenized text
APPLIED = ("normalize", "prefix", "suffix", "inferfeats", "onmt_tokenize", "sentencepiece", "bpe")
NEEDING_TARGETS = ("clean", "filtertoolong", "inlinetags", "terminology")  # not available in translation
SUBWORDS = ("onmt_tokenize", "sentencepiece", "bpe")
# Options that a corpus may set.
OF_CORPUS = {
    "prefix": ("src_prefix", "tgt_prefix"),
    "suffix": ("src_suffix", "tgt_suffix"),
    "normalize": tuple(
        "src_lang tgt_lang penn norm_quote_commas norm_numbers pre_replace_unicode_punct "
        "post_remove_control_chars".split()
    ),
}
# With a shared vocabulary, the target uses these options of the source.
_SHARED = ("subword_model", "subword_type", "onmttok_kwargs")


def parse_tokenizer(name: str, value: Any) -> dict[str, Any]:
    """Parse the options of pyonmttok, a mapping or its text in YAML, JSON or Python, as literals."""
    return {"mode": "none", **(parse_mapping(name, value, "{mode: aggressive}") or {})}


# In checkpoints


def stored_files(opt: Namespace) -> dict[str, Any]:
    """Return the subword files to store in a checkpoint: ``{STORED: {option: bytes as a tensor (n,)}}``."""
    names = {name for names in _names_by_corpus(vars(opt)).values() for name in names}
    if names.isdisjoint(SUBWORDS):
        return {}
    paths = {name: getattr(opt, name, None) for name in SUBWORD_FILES}
    stored = {
        name: torch.tensor(list(Path(path).read_bytes()), dtype=torch.uint8)
        for name, path in paths.items()
        if path and os.path.isfile(path)
    }
    return {STORED: stored} if stored else {}


def record_transforms(opt: Namespace, saved: Namespace) -> None:
    """Set the data and the transforms of a run in the options for its checkpoints, after ``train_from``."""
    kinds = AVAILABLE_TRANSFORMS.values()
    options = {name for kind in kinds for name in vars(ArgumentParser.defaults(kind.add_options))}
    for name in {"data", "transforms", "_all_transform", *options} & vars(opt).keys():
        setattr(saved, name, getattr(opt, name))


class Recorded(NamedTuple):
    """What a translation needs of a checkpoint beside its model."""

    path: str
    options: dict[str, Any]  # of its training
    vocab: dict[str, Any]
    files: dict[str, bytes]  # content of its subword files, by option


# In translation


def complete(opt: Namespace, models: Sequence[Recorded]) -> None:
    """Complete the transforms of a translation with those that its models were trained with.

    Transforms that are asked for, and options that differ from their defaults, take precedence.
    """
    first = models[0]
    for other in models[1:]:
        if other.vocab["tgt"] != first.vocab["tgt"]:  # OpenNMT-py only compares the source words
            raise UserError(
                f"models: {other.path} has another vocabulary than {first.path}; an ensemble needs models "
                "with the same vocabularies"
            )
        is_same = _trained(first) == _trained(other) and first.files == other.files
        if not is_same and NONE not in opt.transforms:
            raise UserError(
                f"models: {other.path} was trained with other transforms than {first.path}; translate "
                f"tokenized text with -transforms {NONE}"
            )
    if NONE in opt.transforms:
        if len(opt.transforms) > 1:
            raise UserError(f"transforms: {' '.join(opt.transforms)}: {NONE} is not combined with others")
        opt.transforms = []
        logger.info(f"transforms: {NONE}: the text is tokenized")
    else:
        of_corpus: dict[str, Any] = {}
        if not opt.transforms:
            opt.transforms, of_corpus = _trained(first)
        _set_options(opt, {**first.options, **of_corpus, **_subword_files(first, opt)})
    if opt.transforms:
        logger.info(
            f"transforms: {', '.join(opt.transforms)} on the source, and undone on the output; "
            f"for tokenized text, add -transforms {NONE}"
        )
    ArgumentParser._get_all_transform_translate(opt)
    ArgumentParser._validate_transforms_opts(opt)
    ArgumentParser.validate_translate_opts_dynamic(opt)


def _names_by_corpus(options: Mapping[str, Any]) -> dict[str, list[str]]:
    default, data = options.get("transforms") or [], options.get("data")
    corpora = data if isinstance(data, dict) and data else {"": {}}
    names = {name: corpus.get("transforms") for name, corpus in corpora.items()}
    return {name: default if transforms is None else transforms for name, transforms in names.items()}


def _trained(recorded: Recorded) -> tuple[list[str], dict[str, Any]]:
    """Return the transforms of a model in translation, and the options that corpora set for them."""
    data = recorded.options.get("data")
    ways: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for name, transforms in _names_by_corpus(recorded.options).items():
        applied = [transform for transform in transforms if transform in APPLIED]
        corpus = data.get(name, {}) if isinstance(data, dict) else {}
        options = [option for transform in applied for option in OF_CORPUS.get(transform, ())]
        ways[name] = applied, {option: corpus[option] for option in options if option in corpus}
    of_training = [way for name, way in ways.items() if name != "valid"] or list(ways.values())
    if all(way == of_training[0] for way in of_training):
        return of_training[0]
    if "valid" in ways:
        return ways["valid"]
    listed = "; ".join(f"{name}: {' '.join(applied)} {options}" for name, (applied, options) in ways.items())
    raise UserError(
        f"checkpoint {recorded.path}: its corpora have different transforms ({listed}); set -transforms and "
        f"their options for this text, or -transforms {NONE} for tokenized text"
    )


def _subword_files(recorded: Recorded, opt: Namespace) -> dict[str, str]:
    """Return the paths of the subword files by option: from the checkpoint, the original, or next to it."""
    if set(opt.transforms).isdisjoint(SUBWORDS):
        return {}
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    paths = {}
    for name in SUBWORD_FILES:
        trained = recorded.options.get(name)
        if getattr(opt, name) or not trained:
            continue
        places = [Path(trained), Path(recorded.path).parent / Path(trained).name]
        if name in recorded.files:
            places = [Path(folder, name)]
            places[0].write_bytes(recorded.files[name])
        existing = next((place for place in places if place.is_file()), None)
        if existing is None:
            raise UserError(
                f"{name}: the file {trained} of the training is not found, nor stored in the checkpoint or "
                f"next to it; name it with -{name}, or add -transforms {NONE} for tokenized text"
            )
        paths[name] = str(existing)
    return paths


def _set_options(opt: Namespace, values: Mapping[str, Any]) -> None:
    """Set the options of transforms that have their defaults to the values of the training."""
    defaults: dict[str, Any] = {}
    for name in opt.transforms:
        defaults.update(vars(ArgumentParser.defaults(AVAILABLE_TRANSFORMS[name].add_options)))
    restrictions = [
        (values.get(f"{side}_subword_vocab"), values.get(f"{side}_vocab_threshold"))
        for side in ("src", "tgt")
    ]
    is_shared = values.get("share_vocab") and restrictions[0] == restrictions[1]
    of_source = {f"tgt_{name}": f"src_{name}" for name in _SHARED} if is_shared else {}
    # Options copied from the source come after those of the source.
    for name in sorted(defaults, key=of_source.__contains__):
        value = getattr(opt, of_source[name]) if name in of_source else values.get(name)
        if value is not None and getattr(opt, name) == defaults[name]:
            setattr(opt, name, value)
    if "prefix" in opt.transforms and opt.tgt_prefix and not opt.tgt:
        opt.tgt_file_prefix = True  # the transform passes it as a target prefix
