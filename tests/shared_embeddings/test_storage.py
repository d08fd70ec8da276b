"""Packed tensors: their errors, exact cases, and invalid data."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import shared_embeddings as se
from shared_embeddings import accounting
from shared_embeddings.quant.packed_tensor import install
from shared_embeddings.quant.storage import (
    HEADER,
    STORES,
    StorageError,
    default_packing,
    hold,
    pack,
    packed_bytes,
    packing_of,
    unpack,
)
from tests.helpers import example


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, rows of very different lengths."""
    draw = torch.Generator().manual_seed(seed)
    lengths = 10 ** torch.empty(shape[0], *[1] * (len(shape) - 1)).uniform_(-4, 3, generator=draw)
    return torch.randn(shape, generator=draw) * lengths


def stored(packed: dict[str, Tensor]) -> int:
    """The bytes of the packed tensors, without their description."""
    return sum(tensor.nbytes for name, tensor in packed.items() if name != HEADER)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether two packed states have the same bytes."""
    views = [{name: tensor.view(torch.uint8) for name, tensor in state.items()} for state in (first, second)]
    return views[0].keys() == views[1].keys() and all(
        torch.equal(part, views[1][name]) for name, part in views[0].items()
    )


def test_int8_by_hand() -> None:
    table = torch.zeros(16, 16)
    table[0, :3] = torch.tensor([254.0, -3.0, 1.1])  # a scale of 2: 127, -1.5 to the even -2, 0.55 to 1
    table[1, :2] = torch.tensor([-127.0, 63.5])  # a scale of 1: -127, 63.5 to the even 64
    packed = pack({"a.table": table}, ["a"], "int8")
    assert packed["a.table"].dtype == torch.int8 and packed["a.table.scale"].shape == (16, 1)
    found = unpack(packed)["a.table"]
    wanted = torch.zeros(16, 16)
    wanted[0, :3] = torch.tensor([254.0, -4.0, 2.0])
    wanted[1, :2] = torch.tensor([-127.0, 64.0])
    assert torch.equal(found, wanted) and found.dtype == torch.float32
    assert stored(packed) == 256 + 2 * 16 == packed_bytes(table, "int8", "t")


@pytest.mark.parametrize(
    ("shape", "scales"),
    [((300, 20), 300), ((300, 3), 300), ((4, 50, 16), 200), ((6, 40, 2), 6), ((1, 5, 9, 8), 5)],
)
def test_no_value_moves_by_more_than_half_a_step(shape: tuple[int, ...], scales: int) -> None:
    """Each row has a scale of its own."""
    table = numbers(*shape)
    packed = pack({"t": table}, ["t"], "int8")
    assert packed["t.scale"].numel() == scales
    assert packed_bytes(torch.empty(shape, device="meta"), "int8", "t") == stored(packed)
    found = unpack(packed)["t"]
    largest = table.abs().flatten(1).amax(dim=1).view(-1, *[1] * (len(shape) - 1))
    # The relative error of a scale is at most 2**-9, which moves the largest value by a quarter of a step.
    assert bool(((found - table).abs() <= 0.51 * largest / 127).all())
    assert not torch.equal(found, table)


@pytest.mark.parametrize("store", STORES)
def test_packing_again_gives_the_same_bytes(store: str) -> None:
    state = {"t": numbers(200, 30), "u": numbers(64, 5, seed=1) * 1e-38, "codes": torch.arange(600) % 37}
    state["t"][3], state["t"][4] = 0.0, 1e-44
    first = pack(state, state, store)
    found = unpack(first)
    assert same(first, pack(found, state, store))
    assert torch.equal(found["t"][3], state["t"][3]) and bool((found["t"][4] <= 1e-44).all())


def test_int4_by_hand() -> None:
    table = torch.zeros(20, 33)
    table[0, :4] = torch.tensor([-16.0, 14.0, 2.0, -6.0])  # a scale of 2: -8, 7, 1, -3
    table[1, :3] = torch.tensor([8.0, -7.0, 3.0])  # a scale of -1: -8, 7, -3
    table[1, 32] = 5.0  # a group of one value: 8 times 5/8
    packed = pack({"a.table": table}, ["a"], "int4")
    codes, scales = packed["a.table"], packed["a.table.scale"]
    assert codes.dtype == torch.uint8 and codes.shape == (20, 17) and scales.shape == (20, 2)
    assert scales[:2].tolist() == [[2.0, 0.0], [-1.0, -0.625]]
    assert codes[0].tolist() == [0x0F, 0x95, *[0x88] * 14, 0x80]
    assert codes[1].tolist() == [0x0F, 0x58, *[0x88] * 14, 0x00]
    assert torch.equal(unpack(packed)["a.table"], table)
    assert stored(packed) == 20 * (17 + 2 * 2) == packed_bytes(table, "int4", "t")


def test_scales_of_rows_by_hand() -> None:
    scales = torch.zeros(256, 1)
    # Steps of 1/16: 2**2 is the power that no number exceeds; 3.0 is 2**1.585, nearest to 2**(25/16).
    scales[:6, 0] = torch.tensor([3.0, 2.0, 1.01, -1.0, 1e-30, 2.0**-13.875])
    packed = pack({"a.row_scales": scales}, ["a"], "int4")
    assert packed["a.row_scales"].dtype == torch.uint8 and packed["a.row_scales.scale"].tolist() == [[4.0]]
    assert packed["a.row_scales"][:7, 0].tolist() == [248, 239, 223, 0, 0, 1, 0]
    found = unpack(packed)["a.row_scales"][:7, 0].tolist()
    assert found == pytest.approx([2 ** (25 / 16), 2.0, 1.0, 0.0, 0.0, 2.0**-13.875, 0.0])
    assert stored(packed) == 256 + 2 == packed_bytes(scales, "fp16", "a.row_scales")
    assert packing_of(packed) == (["a.row_scales"], "fp16")
    assert pack({"a.row_scales": scales}, ["a"], "fp32").keys() == {"a.row_scales"}


@pytest.mark.parametrize("size", [1e-35, 1e-3, 1.0, 1e34])
def test_scales_of_rows_are_stable(size: float) -> None:
    scales = 2 ** (12 * torch.rand(1000, 1, generator=torch.Generator().manual_seed(0))) * size
    first = pack({"row_scales": scales}, ["row_scales"], "fp16")
    found = unpack(first)["row_scales"]
    assert bool(((found / scales).log2().abs() <= 0.5 / 16 + 1e-5).all())
    assert same(pack({"row_scales": found}, ["row_scales"], "fp16"), first)
    zeros = pack({"row_scales": torch.zeros(300, 1)}, ["row_scales"], "fp16")
    assert torch.equal(unpack(zeros)["row_scales"], torch.zeros(300, 1))


def test_int4_has_the_documented_error() -> None:
    table = torch.randn(4000, 128, generator=torch.Generator().manual_seed(0))
    found = unpack(pack({"t": table}, ["t"], "int4"))["t"]
    assert float((found - table).norm() / table.norm()) == pytest.approx(0.082, abs=0.001)


@pytest.mark.parametrize("shape", [(300, 64), (300, 3), (90, 33), (5, 20, 17), (6, 40, 2), (5, 10, 8, 3)])
@pytest.mark.parametrize("size", [1e-38, 1e-20, 1.0, 1e20, 1e34])
def test_int4_is_stable_for_numbers_of_any_size(shape: tuple[int, ...], size: float) -> None:
    table = numbers(*shape, seed=len(shape)) * size
    table[1] = 0.0
    table[2] = table[2].sign() * size  # largest numbers of both signs
    table[3] = table[3].bfloat16().float()
    table[4] = table[4].flatten()[0] * torch.randint(-4, 4, table[4].shape)  # half of the levels
    first = pack({"t": table}, ["t"], "int4")
    found = unpack(first)["t"]
    assert packed_bytes(torch.empty(shape, device="meta"), "int4", "t") == stored(first)
    assert bool(found.isfinite().all()) and found.shape == table.shape
    assert same(pack({"t": found}, ["t"], "int4"), first)
    if 1e-20 <= size <= 1e20:
        assert float((found - table).double().norm() / table.double().norm()) < 0.12


def test_int4_of_the_largest_numbers_is_finite() -> None:
    table = torch.full((16, 40), torch.finfo(torch.float32).max)
    table[::2] *= -1
    table[:, 3] *= 0.3
    assert bool(((unpack(pack({"t": table}, ["t"], "int4"))["t"] / table - 1).abs() < 0.2).all())


def test_fp16_is_that_of_torch() -> None:
    table = numbers(30, 30)
    packed = pack({"t": table}, ["t"], "fp16")
    assert stored(packed) == 2 * 900
    assert torch.equal(unpack(packed)["t"], table.half().float())


def test_tensors_that_are_not_packed() -> None:
    state = {
        "e.bias": torch.full((500,), -math.inf),
        "e.short_bias": numbers(255),
        "e.half_bias": numbers(500).bfloat16(),
        "e.small": numbers(15, 17),
        "e.size": torch.tensor(7),
        "e.signed": torch.arange(-300, 300),
        "other.weight": numbers(300, 5),
        "embedding.weight": numbers(300, 5),
    }
    packed = pack(state, ["e"], "int8")
    assert packed.keys() == state.keys() and all(packed[name] is state[name] for name in state)
    assert unpack(state) == state


@pytest.mark.parametrize("store", ["fp16", "int8", "int4"])
def test_biases_are_in_fp16(store: str) -> None:
    state = {"e.bias": 20 * torch.randn(500), "e.weight": numbers(500, 40)}
    packed = pack(state, ["e"], store)
    assert torch.equal(packed["e.bias"], state["e.bias"].half())
    assert packing_of(packed) == (["e.bias", "e.weight"], store)
    assert pack(state, ["e"], "fp32") == state
    module = torch.nn.Linear(40, 500)
    install(module, {name.removeprefix("e."): tensor for name, tensor in hold(packed).items()})
    hidden = torch.randn(3, 40)
    wanted = hidden @ unpack(packed)["e.weight"].T + packed["e.bias"].float()
    torch.testing.assert_close(module(hidden), wanted, rtol=1e-4, atol=1e-2)


def test_default_packing_is_that_of_the_methods() -> None:
    parts = {"plain": "standard", "codes": "structured"}
    module = torch.nn.ModuleDict(
        {
            name: se.build(method, num_embeddings=300, embedding_dim=16, **example(method, 300, 16))
            for name, method in parts.items()
        }
    )
    assert default_packing(module) == (["codes"], "fp16")
    assert default_packing(module["plain"]) is None


def test_user_errors() -> None:
    table = numbers(30, 30)
    with pytest.raises(StorageError, match="unknown storage 'int2'; choose one of fp32, fp16, int8, int4"):
        pack({"t": table}, ["t"], "int2")
    for broken in (float("nan"), float("inf")):
        wrong = table.clone()
        wrong[3, 4] = broken
        for store in ("fp16", "int8", "int4"):
            with pytest.raises(StorageError, match="tensor a.t contains NaN or infinity"):
                pack({"a.t": wrong}, ["a"], store)
    with pytest.raises(StorageError, match="tensor t has values up to 70000, but fp16 is limited to 65504"):
        pack({"t": torch.full((30, 30), 7e4)}, ["t"], "fp16")
    packed = pack({"t": table}, ["t"], "int8")
    with pytest.raises(StorageError, match="already packed"):
        pack(packed, ["t"], "int8")


def described(text: str) -> Tensor:
    """A header."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


SHAPES = ("[]", "[30]", "[30,0]", "[31,30]", "[30,40]", "[-30,-30]", '"x"', "null")
NO_WIDTHS = '{"version":1,"tensors":{"codes":{"as":"bits","type":"int64","shape":[300],"widths":[]}}}'
MISMATCHES = [f'{{"version":1,"tensors":{{"t":{{"as":"int4","shape":{one}}}}}}}' for one in SHAPES]
MISMATCHES += ['{"version":1,"tensors":{"t":{"as":"int2"}}}', '{"version":1,"tensors":{"t":7}}', NO_WIDTHS]
HEADERS = {
    '{"version": 2, "tensors": {}}': "packed in version 2, but this program supports 1",
    **dict.fromkeys(("", "[]", "{", '{"version": 1}', '{"version": 1, "tensors": 3}'), "does not describe"),
    **dict.fromkeys(MISMATCHES, "does not match"),
}
Edit = Callable[[dict[str, Tensor]], object]
EDITS: list[Edit] = [
    lambda state: state.pop("t"),
    lambda state: state.pop("t.scale"),
    lambda state: state.update({"t": state["t"].float()}),
    lambda state: state.update({"t": state["t"][1:]}),
    lambda state: state.update({"t.scale": state["t.scale"].float()}),
    lambda state: state.update({"t.scale": state["t.scale"][:7]}),
    lambda state: state.update({"codes": state["codes"][:7]}),
]


@pytest.mark.parametrize("store", ["int8", "int4"])
@pytest.mark.parametrize(
    ("message", "edit"),
    [
        *(
            (message, lambda state, text=text: state.update({HEADER: described(text)}))
            for text, message in HEADERS.items()
        ),
        *(("the packed tensor .* does not match its description", edit) for edit in EDITS),
    ],
)
def test_damaged_and_newer_states_fail(message: str, edit: Edit, store: str) -> None:
    packed = pack({"t": numbers(30, 30), "codes": torch.arange(300) % 7}, ["t", "codes"], store)
    edit(packed)
    with pytest.raises(StorageError, match=message):
        unpack(packed)


@pytest.mark.parametrize("method", se.methods())
def test_stored_bits_match_the_file(method: str) -> None:
    emb = se.build(method, num_embeddings=1200, embedding_dim=32, **example(method, 1200, 32))
    state = accounting.distinct_state(emb)
    for store in STORES:
        found, wanted = stored(pack(state, state, store)), accounting.stored_bits(emb, store) / 8
        assert found == pytest.approx(wanted, rel=0.01, abs=8), store
