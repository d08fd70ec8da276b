"""Saving and restoring the complete state of training, including all random number generators."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lm.checkpoint import load_state, read_checkpoint, save_model
from lm.train.config import FREE_TO_CHANGE
from lm.train.loop import Trainer
from lm.train.optim import Averages
from shared_embeddings.utils.errors import UserError


def save_run(
    path: Path, trainer: Trainer, words: list[str], settings: Mapping[str, Any], corpus_checksum: str
) -> None:
    """Write last.pt: the model with the parameters for evaluation, and the state that `restore_run` needs.

    Every process calls this; the first one writes.
    """
    name, keys, *position = np.random.get_state(legacy=True)
    process = {
        "random": {
            "python": random.getstate(),
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
        "lengths": trainer.lengths.getstate(),
        "processes": processes,
    }
    with trainer.averages.in_place() if trainer.averages else nullcontext():
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
    before, now = dict(training["settings"]), dict(settings)
    for options in (before, now):
        if options.get("embedding_distillation"):  # the file of the teacher may have moved
            options["embedding_distillation"] = {**options["embedding_distillation"], "teacher": None}
    changed = [
        f"{key} was {before.get(key)!r} and is now {now.get(key)!r}"
        for key in sorted({*before, *now} - FREE_TO_CHANGE)
        if before.get(key) != now.get(key)
    ]
    if training["corpus"] != corpus_checksum:
        changed.append("the corpus in 'data' has changed")
    processes, group = training["processes"], trainer.group
    if len(processes) != group.world_size:
        changed.append(f"it had {len(processes)} processes and now has {group.world_size}")
    if changed:
        raise UserError(
            f"{path} belongs to a run with other settings ({'; '.join(changed[:8])}); change them back "
            "to resume, or choose another output_dir"
        )
    load_state(trainer.model, content["model"], path)
    if training["averages"] is not None:  # the model has the means
        trainer.averages = averages = Averages(trainer.parameters)
        averages.steps = training["averages"]["steps"]
        averages.write(training["averages"]["parameters"])
    trainer.optimizer.load_state_dict(training["optimizer"])
    trainer.step, trainer.epoch, trainer.position = (training[key] for key in ("step", "epoch", "position"))
    trainer.scores = list(training["scores"])
    process = processes[group.rank]
    trainer.states = [tuple(part.to(group.device) for part in state) for state in process["states"]]
    trainer.window = process["window"].to(group.device)
    generators = process["random"]
    for generator, state in ((trainer.lengths, training["lengths"]), (random, generators["python"])):
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers), gauss))
    name, keys, *position = generators["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *position))
    torch.set_rng_state(generators["torch"])
    if generators["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(generators["cuda"])
