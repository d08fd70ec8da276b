"""Positions in models that count from the padding id, such as RoBERTa and M2M100."""

from __future__ import annotations

from torch import nn


def first_position(model: nn.Module) -> int:
    """The position of the first token: the padding id + 1 in models that count from it, else 0.

    Such models recognize padding by its id, so trimming the vocabulary must not change that id.
    """
    first = 0
    for path, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if padding is not None and "position" in f"{path.rpartition('.')[2]} {type(module).__name__}".lower():
            first = max(first, int(padding) + 1)
    return first
