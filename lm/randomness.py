"""States of all random number generators as plain values, for checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

# Seeds must be below this. torch allows twice as many; the rest is for seeds derived by counting up.
SEEDS = 2**63


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
