"""Training that diverged ends before it is saved, so that the last good checkpoint stays the last one."""

from __future__ import annotations

import math

import torch
from torch import nn

from shared_embeddings.errors import UserError


def check_finite(model: nn.Module, step: int, loss: float = 0.0) -> None:
    """Check that a model can still be trained.

    Args:
        model: all ranks have the same one, so that they agree.
        step: how many steps it has been trained.
        loss: the mean of the last steps.

    Raises:
        UserError: the loss or a parameter is not a finite number.
    """
    if not math.isfinite(loss):
        what = f"the loss is {loss}"
    elif any(not bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
        what = "a parameter is not finite"
    else:
        return
    raise UserError(
        f"{what} at step {step}; the checkpoints that were saved before are unchanged; lower learning_rate "
        "or max_grad_norm and train with another save_model, with train_from to begin with one of them"
    )
