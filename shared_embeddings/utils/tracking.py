"""Progress of trainings for Weights & Biases, in the interface of a TensorBoard ``SummaryWriter``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from shared_embeddings.utils.extras import require


class Writer(Protocol):
    """The part of ``torch.utils.tensorboard.SummaryWriter`` that trainings use."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Record a value at a step."""

    def close(self) -> None:
        """Write everything."""


class WandbWriter:
    """Sends scalars to a project of Weights & Biases.

    A resumed training is another run of the same group, which is named after its folder. The environment
    variables of wandb apply, such as ``WANDB_MODE=offline``.

    Args:
        project: name of the project.
        folder: of the training, where wandb keeps its files.
        config: settings to show with the run.

    Raises:
        ModuleNotFoundError: wandb is not installed; the message names the extra.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        name = folder.absolute().name
        self._run = require("wandb").init(
            project=project, group=name, name=name, dir=str(folder), config=dict(config)
        )

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Record a value at a step."""
        self._run.log({tag: scalar_value}, step=global_step)

    def close(self) -> None:
        """Send the remaining values."""
        self._run.finish()


class Writers:
    """Several writers as one."""

    def __init__(self, writers: Iterable[Writer]) -> None:
        self._writers = list(writers)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Record a value at a step."""
        for writer in self._writers:
            writer.add_scalar(tag, scalar_value, global_step)

    def close(self) -> None:
        """Close all writers."""
        for writer in self._writers:
            writer.close()
