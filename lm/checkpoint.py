"""Checkpoints of plain values and tensors, written atomically and read without running code."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import shared_embeddings as se
from lm import models
from lm.models import LanguageModel
from lm.models.ngrams import NGramOptions
from shared_embeddings.accounting import distinct_state
from shared_embeddings.checkpoints import check_sizes, load_tensors, with_checksum
from shared_embeddings.quant.packed_tensor import install
from shared_embeddings.quant.storage import (
    Packing,
    StorageError,
    default_packing,
    hold,
    packed_as,
    packing_of,
    unpack,
)
from shared_embeddings.utils.errors import UserError, first_line
from shared_embeddings.utils.files import replacing

FORMAT = "shared-embeddings-lm"
VERSION = 1


class Trained(NamedTuple):
    """A loaded checkpoint."""

    model: LanguageModel  # in evaluation mode
    words: list[str]  # in the order of their ids
    config: dict[str, Any]  # flat; its embedding refers to no files
    training: dict[str, Any] | None
    packing: Packing | None  # storage format of the weights; None for plain tensors


def save_model(
    path: Path,
    model: LanguageModel,
    words: Sequence[str],
    config: Mapping[str, Any],
    training: Mapping[str, Any] | None,
) -> None:
    """Write a checkpoint of the distinct tensors of a model, atomically.

    Args:
        words: in the order of their ids.
        config: the flat configuration. File options of its embedding are replaced by their contents, and
            options chosen by a fit to a teacher are added.
        training: training state of plain values and tensors; None for the model only, with its embedding in
            the default storage of its method.
    """
    embedding, settings = model.embedding, dict(config["embedding"])
    is_fitted = config.get("embedding_distillation") is not None
    if is_fitted or any(name in settings for name in se.get_method_config(embedding.method).file_options):
        settings = {"method": embedding.method, **embedding.stored_options()}
    state = distinct_state(model)
    if training is None:
        state = packed_as(state, default_packing(model))
    save_state(path, state, words, {**config, "embedding": settings}, training)


def save_state(
    path: Path,
    state: Mapping[str, Tensor],
    words: Sequence[str],
    config: Mapping[str, Any],
    training: Mapping[str, Any] | None,
) -> None:
    """Write the result of `distinct_state`, optionally packed; see `save_model`.

    The embedding of the configuration refers to no files.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "config": dict(config),
        "words": list(words),
        "model": dict(state),
        "training": None if training is None else dict(training),
    }
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.save(with_checksum(content), file)


def load_model(path: Path, device: str | torch.device = "cpu") -> Trained:
    """Read a checkpoint and build its model on `device`; packed weights stay packed.

    Raises:
        UserError: the file is missing, truncated, unsupported or inconsistent.
    """
    content = read_checkpoint(path, hold)
    config, words = content["config"], content["words"]
    try:
        kind = config["model"]
        options, ngrams = (
            {field.name: config[field.name] for field in dataclasses.fields(group) if field.name in config}
            for group in (models.options_class(kind), NGramOptions)
        )
        check_sizes("its settings", {**options, **ngrams, "embedding": config["embedding"]}, content["model"])
        with torch.device("meta"):
            empty = models.build(kind, words, config["embedding"], options, ngrams)
    except Exception as error:  # models and embeddings raise many kinds for other configurations
        raise UserError(f"checkpoint {path}: its model cannot be built ({first_line(error)})") from error
    check_state(empty, content["model"], path)
    model = models.build(kind, words, config["embedding"], options, ngrams)
    load_state(model, content["model"], path)
    return Trained(model.to(device).eval(), words, config, content["training"], content["packing"])


def read_checkpoint(
    path: Path, opened: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = unpack
) -> dict[str, Any]:
    """Read a checkpoint to the CPU; ``packing`` is the storage format of its weights.

    Packed weights are loaded by `opened`, see `shared_embeddings.quant.storage`.

    Raises:
        UserError: the file is missing, truncated or unsupported.
    """
    if not os.path.isfile(path):
        raise UserError(f"checkpoint {path}: no such file; check the path")
    content = load_tensors(path, f"checkpoint {path}")
    parts = {"config", "words", "model", "training"}
    if (content.get("format"), content.get("version")) != (FORMAT, VERSION) or not parts <= content.keys():
        raise UserError(f"checkpoint {path}: was not written by lm_train; use a checkpoint of lm_train")
    try:
        state, packing = opened(content["model"]), packing_of(content["model"])
    except StorageError as error:
        raise UserError(f"checkpoint {path}: {error}") from error
    return {**{name: content[name] for name in parts}, "model": state, "packing": packing}


def check_state(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Raise UserError if the result of `distinct_state` lacks a tensor, or has others or other shapes.

    `path` is for messages.
    """
    expected = distinct_state(model)
    for name in sorted(expected.keys() | state.keys()):
        theirs, ours = (tuple(part[name].shape) if name in part else "missing" for part in (state, expected))
        if theirs != ours:
            raise UserError(
                f"checkpoint {path}: belongs to another model ({name} is {theirs}, expected {ours}); use its "
                "configuration and vocabulary"
            )


def load_state(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Load the result of `distinct_state` into a model; see `check_state`."""
    check_state(model, state, path)
    # strict=False: aliases of these tensors are not in the state.
    model.load_state_dict(install(model, state), strict=False)
