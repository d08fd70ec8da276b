"""Positions of models that count them from the id of padding, as RoBERTa and M2M100 do."""

from __future__ import annotations

from torch import nn


def first_position(model: nn.Module) -> int:
    """The position of the first token: one more than the id of padding where that is counted from, else 0.

    Which tokens are padding is then seen from their ids, so that this id, and how many there are before it,
    are part of the model.
    """
    first = 0
    for path, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if padding is not None and "position" in f"{path.rpartition('.')[2]} {type(module).__name__}".lower():
            first = max(first, int(padding) + 1)
    return first
