"""Saving and restoring the complete state of training, including all random number generators."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lm.checkpoint import load_state, read_checkpoint, save_model
from lm.train.config import FREE_TO_CHANGE
from lm.train.loop import Trainer
from lm.train.optim import Averages
from shared_embeddings.utils.errors import UserError, first_line


def save_run(
    path: Path, trainer: Trainer, words: list[str], settings: Mapping[str, Any], corpus_checksum: str
) -> None:
    """Write last.pt: the model with the parameters for evaluation, and the state that `restore_run` needs.

    Every process calls this; the first one writes.
    """
    name, keys, *position = np.random.get_state(legacy=True)
    process = {
        "random": {
            "python": _generator_state(random._inst),  # type: ignore[attr-defined]
            "numpy": [name, torch.from_numpy(np.array(keys).astype(np.int64)), *position],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        },
        # On the CPU, so that no process puts tensors on the device of another.
        "states": [tuple(tensor.cpu() for tensor in state) for state in trainer.states],
        "window": trainer.window.cpu(),
    }
    processes = trainer.group.gather(process)
    if not trainer.group.is_first:
        return
    averages = None
    if trainer.averages is not None:
        averages = {"steps": trainer.averages.steps, "parameters": trainer.averages.current()}
    training = {
        "settings": dict(settings),
        "corpus": corpus_checksum,
        "step": trainer.step,
        "epoch": trainer.epoch,
        "position": trainer.position,
        "scores": trainer.scores,
        "optimizer": trainer.optimizer.state_dict(),
        "averages": averages,
        "lengths": _generator_state(trainer.lengths),
        "processes": processes,
    }
    with trainer.evaluated_parameters():
        save_model(path, trainer.model, words, settings, training)


def restore_run(path: Path, trainer: Trainer, settings: Mapping[str, Any], corpus_checksum: str) -> None:
    """Restore the state saved by `save_run`.

    Raises:
        UserError: the file cannot be read, or its run has other settings, data or processes.
    """
    content = read_checkpoint(path)
    training = content["training"]
    if training is None:
        raise UserError(f"checkpoint {path}: has a model only; choose another output_dir")
    try:
        changed = _changed_settings(training["settings"], settings)
        if training["corpus"] != corpus_checksum:
            changed.append("the corpus in 'data' has changed")
        processes, world_size = training["processes"], trainer.group.world_size
        if len(processes) != world_size:
            changed.append(f"it had {len(processes)} processes and now has {world_size}")
        if changed:
            raise UserError(
                f"{path} belongs to a run with other settings ({'; '.join(changed[:8])}); change them back "
                "to resume, or choose another output_dir"
            )
        load_state(trainer.model, content["model"], path)
        _restore(trainer, training)
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"checkpoint {path}: its training state does not match the model ({first_line(error)}); use "
            "another one, or train from scratch with another output_dir"
        ) from error


def _changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Describe the settings that changed, except those that may; the file of the teacher may have moved."""
    before, now = dict(old), dict(new)
    for settings in (before, now):
        if settings.get("embedding_distillation"):
            settings["embedding_distillation"] = {**settings["embedding_distillation"], "teacher": None}
    return [
        f"{key} was {before.get(key)!r} and is now {now.get(key)!r}"
        for key in sorted({*before, *now} - FREE_TO_CHANGE)
        if before.get(key) != now.get(key)
    ]


def _restore(trainer: Trainer, training: Mapping[str, Any]) -> None:
    """Restore everything but the model."""
    if training["averages"] is not None:
        trainer.averages = Averages(trainer.parameters)
        trainer.averages.load(training["averages"]["steps"], training["averages"]["parameters"])
    trainer.optimizer.load_state_dict(training["optimizer"])
    trainer.step, trainer.epoch, trainer.position = (training[key] for key in ("step", "epoch", "position"))
    trainer.scores = list(training["scores"])
    _restore_generator(trainer.lengths, training["lengths"])
    process, device = training["processes"][trainer.group.rank], trainer.group.device
    trainer.states = [tuple(part.to(device) for part in state) for state in process["states"]]
    trainer.window = process["window"].to(device)
    generators = process["random"]
    _restore_generator(random._inst, generators["python"])  # type: ignore[attr-defined]
    name, keys, *position = generators["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *position))
    torch.set_rng_state(generators["torch"])
    if generators["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(generators["cuda"])


def _generator_state(generator: random.Random) -> list[Any]:
    """Return the state of a Python generator as plain values, which `torch.load` reads safely."""
    version, numbers, gauss = generator.getstate()
    return [version, list(numbers), gauss]


def _restore_generator(generator: random.Random, state: list[Any]) -> None:
    version, numbers, gauss = state
    generator.setstate((version, tuple(numbers), gauss))
