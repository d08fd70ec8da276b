"""Saving and restoring the complete state of training, including all random number generators."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

import numpy as np
import torch

from lm.checkpoint import load_state, read_checkpoint, save_model
from lm.train.config import FREE_TO_CHANGE
from lm.train.loop import Trainer
from lm.train.optim import Averages
from shared_embeddings.checkpoints import check_optimizer
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import UNREADABLE, first_line

# The parts of the training state that `save_run` stores, and their types.
PARTS: dict[str, type | UnionType] = {
    "settings": dict,
    "corpus": str,
    "step": int,
    "epoch": int,
    "position": int,
    "scores": list,
    "optimizer": dict,
    "averages": dict | None,
    "lengths": list,
    "processes": list,
}


def save_run(
    path: Path, trainer: Trainer, words: list[str], settings: Mapping[str, Any], corpus_checksum: str
) -> None:
    """Write last.pt: the model with the parameters for evaluation, and the state that `restore_run` needs.

    Every process calls this; the first one writes.
    """
    # On the CPU, so that no process puts tensors on the device of another.
    states = [tuple(tensor.cpu() for tensor in state) for state in trainer.states]
    own = {"random": random_states(), "states": states, "window": trainer.window.cpu()}
    processes = trainer.group.gather(own)
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
        "lengths": generator_state(trainer.lengths),
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
    saved = content["training"]
    if saved is None:
        raise UserError(f"checkpoint {path}: has a model only; choose another output_dir")
    for part, kind in PARTS.items():
        if not isinstance(saved.get(part), kind):
            raise UserError(f"checkpoint {path}: its 'training' has no {part}; use one written by lm_train")
    before, now = _without_path(saved["settings"]), _without_path(settings)
    changed = [
        f"{key} was {before.get(key)!r} and is now {now.get(key)!r}"
        for key in sorted({*before, *now} - FREE_TO_CHANGE, key=str)
        if before.get(key) != now.get(key)
    ]
    if saved["corpus"] != corpus_checksum:
        changed.append("the corpus in 'data' has changed")
    if len(saved["processes"]) != trainer.group.world_size:
        changed.append(f"it had {len(saved['processes'])} processes and now has {trainer.group.world_size}")
    if changed:
        shown = [*changed[:8], *[f"and {len(changed) - 8} more"] * (len(changed) > 8)]
        raise UserError(
            f"{path} belongs to a run with other settings ({'; '.join(shown)}); change them back to resume, "
            "or choose another output_dir"
        )
    load_state(trainer.model, content["model"], path)
    try:
        _restore(trainer, saved)
    except (*UNREADABLE, AttributeError) as error:
        raise UserError(
            f"checkpoint {path}: its 'training' does not match the model ({first_line(error)}); use another "
            "one, or train from scratch with another output_dir"
        ) from error


def _restore(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Restore everything but the model; raises errors of torch if the state does not match."""
    if saved["averages"] is not None:
        trainer.averages = Averages(trainer.parameters)
        trainer.averages.load(saved["averages"]["steps"], saved["averages"]["parameters"])
    trainer.optimizer.load_state_dict(saved["optimizer"])
    check_optimizer(trainer.optimizer)
    trainer.step, trainer.epoch, trainer.position = saved["step"], saved["epoch"], saved["position"]
    trainer.scores = list(map(float, saved["scores"]))
    restore_generator(trainer.lengths, saved["lengths"])
    own = saved["processes"][trainer.group.rank]
    device = trainer.group.device
    if _forms(trainer.states) != _forms(own["states"]):
        raise ValueError("the states of the model have another shape")
    if (own["window"].dtype, own["window"].shape) != (trainer.window.dtype, trainer.window.shape):
        raise ValueError("the window has another shape")
    trainer.states = [tuple(part.to(device) for part in state) for state in own["states"]]
    trainer.window = own["window"].to(device)
    restore_random_states(own["random"])


def _forms(states: Sequence[Sequence[torch.Tensor]]) -> list[list[tuple[torch.dtype, int]]]:
    """What saved states share with those of the model: not the length of memories, nor bf16 by autocast."""
    same = {torch.bfloat16: torch.float32}
    return [[(same.get(part.dtype, part.dtype), part.dim()) for part in state] for state in states]


def _without_path(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without the path of the teacher, which may have been moved."""
    distillation = settings.get("embedding_distillation")
    if distillation is None:
        return dict(settings)
    kept = {key: value for key, value in distillation.items() if key != "teacher"}
    return {**settings, "embedding_distillation": kept}


def random_states() -> dict[str, Any]:
    """The states of the generators of Python, NumPy, torch and the current CUDA device."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": generator_state(random._inst),  # type: ignore[attr-defined]
        "numpy": [name, torch.from_numpy(np.array(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore the states returned by `random_states`."""
    restore_generator(random._inst, states["python"])  # type: ignore[attr-defined]
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def generator_state(generator: random.Random) -> list[Any]:
    """The state of a Python generator as plain values."""
    version, numbers, gauss = generator.getstate()
    return [version, list(numbers), gauss]


def restore_generator(generator: random.Random, state: list[Any]) -> None:
    """Restore a state returned by `generator_state`."""
    version, numbers, gauss = state
    generator.setstate((version, tuple(numbers), gauss))
