"""No operation mixes tensors of two devices, checked without a GPU on "meta", a device without data."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shared_embeddings as se
from benchmarks.layers import SETTINGS, Row, build, rows
from tests.helpers import in_turn

TINY = SETTINGS["tiny"]
# Methods whose lookup, or both sides, have sizes that depend on data: they end at the first such operation.
DATA_DEPENDENT = {
    "input": {"adaptive", "alone", "compositional_code", "define", "group_reduce", "tensor_train"},
    "output": {"adaptive", "group_reduce"},
}


class OneDevice(TorchDispatchMode):
    """Fails at an operation on tensors of several devices; copies and single numbers may differ."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs or {})) if isinstance(each, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors if tensor.dim() > 0}
        assert len(devices) <= 1 or "copy" in str(func), f"{func} mixes {devices}"
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no autocast on this device."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)


def test_the_check_notices_two_devices() -> None:
    with pytest.raises(AssertionError, match="mixes"), OneDevice():
        torch.empty(2, device="meta") + torch.ones(2)


@pytest.mark.parametrize("side", ["input", "output"])
@in_turn("row", rows(TINY, se.methods()))
def test_forward_and_backward_pass_stay_on_the_device(side: str, row: Row) -> None:
    module = build(row, TINY).to("meta")
    ids = torch.empty(64, dtype=torch.long, device="meta")
    try:
        with OneDevice():
            if side == "input":
                result = module(ids)
            else:
                hidden = torch.empty(64, module.score_dim, device="meta", requires_grad=True)
                result = module.cross_entropy(hidden, ids, ignore_index=1)
            result.sum().backward()
    except NotImplementedError:
        assert row.method in DATA_DEPENDENT[side]
    else:
        assert row.method not in DATA_DEPENDENT[side]
