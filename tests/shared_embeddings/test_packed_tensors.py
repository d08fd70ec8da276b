"""Packed tensors: their formats and errors, and results, allocations and storage of those in memory."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shared_embeddings as se
from shared_embeddings import accounting
from shared_embeddings.accounting import distinct_state
from shared_embeddings.quant import kernels
from shared_embeddings.quant.codec import codecs
from shared_embeddings.quant.formats import FORMATS, BitCodes
from shared_embeddings.quant.packed_tensor import PackedTensor, install, unfreeze
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
from shared_embeddings.utils.errors import UserError
from tests.helpers import example
from tests.shared_embeddings.support import MemoryMeter


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
    unpacked = unpack(packed)["a.table"]
    wanted = torch.zeros(16, 16)
    wanted[0, :3] = torch.tensor([254.0, -4.0, 2.0])
    wanted[1, :2] = torch.tensor([-127.0, 64.0])
    assert torch.equal(unpacked, wanted) and unpacked.dtype == torch.float32
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
    unpacked = unpack(packed)["t"]
    largest = table.abs().flatten(1).amax(dim=1).view(-1, *[1] * (len(shape) - 1))
    # The relative error of a scale is at most 2**-9, which moves the largest value by a quarter of a step.
    assert bool(((unpacked - table).abs() <= 0.51 * largest / 127).all())
    assert not torch.equal(unpacked, table)


def test_scales_of_rows_by_hand() -> None:
    scales = torch.zeros(256, 1)
    # Steps of 1/16: 2**2 is the power that no number exceeds; 3.0 is 2**1.585, nearest to 2**(25/16).
    scales[:6, 0] = torch.tensor([3.0, 2.0, 1.01, -1.0, 1e-30, 2.0**-13.875])
    packed = pack({"a.row_scales": scales}, ["a"], "int8")
    assert packed["a.row_scales"].dtype == torch.uint8 and packed["a.row_scales.scale"].tolist() == [[4.0]]
    assert packed["a.row_scales"][:7, 0].tolist() == [248, 239, 223, 0, 0, 1, 0]
    unpacked = unpack(packed)["a.row_scales"][:7, 0].tolist()
    assert unpacked == pytest.approx([2 ** (25 / 16), 2.0, 1.0, 0.0, 0.0, 2.0**-13.875, 0.0])
    assert stored(packed) == 256 + 2 == packed_bytes(scales, "fp16", "a.row_scales")
    assert packing_of(packed) == (["a.row_scales"], "fp16")
    assert pack({"a.row_scales": scales}, ["a"], "fp32").keys() == {"a.row_scales"}


@pytest.mark.parametrize("shape", [(300, 64), (300, 3), (90, 33), (5, 20, 17), (6, 40, 2), (5, 10, 8, 3)])
@pytest.mark.parametrize("store", STORES)
def test_packing_again_gives_the_same_bytes(store: str, shape: tuple[int, ...]) -> None:
    """For numbers of any size that the type can hold."""
    for size in (1e-7, 1.0, 10.0) if store == "fp16" else (1e-38, 1e-20, 1.0, 1e20, 1e34):
        table = numbers(*shape, seed=len(shape)) * size
        table[1] = 0.0
        table[2] = table[2].sign() * size  # largest numbers of both signs
        table[3] = table[3].bfloat16().float()
        table[4] = table[4].flatten()[0] * torch.randint(-4, 4, table[4].shape)  # half of the levels
        state = {"t": table, "row_scales": 2 ** (12 * torch.rand(1000, 1)) * min(max(size, 1e-35), 1e34)}
        state["codes"] = torch.arange(600) % 37
        first = pack(state, state, store)
        unpacked = unpack(first)
        assert packed_bytes(torch.empty(shape, device="meta"), store, "t") == first["t"].nbytes + (
            first["t.scale"].nbytes if "t.scale" in first else 0
        )
        assert bool(unpacked["t"].isfinite().all()) and unpacked["t"].shape == table.shape
        assert same(pack(unpacked, state, store), first)
        assert bool(((unpacked["row_scales"] / state["row_scales"]).log2().abs() <= 0.5 / 16 + 1e-5).all())
    zeros = {"t": torch.zeros(64, 16), "row_scales": torch.zeros(300, 1)}
    assert all(torch.equal(tensor, zeros[name]) for name, tensor in unpack(pack(zeros, zeros, store)).items())


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


@pytest.mark.parametrize("store", ["fp16", "int8"])
def test_biases_are_in_fp16(store: str) -> None:
    state = {"e.bias": 20 * torch.randn(500), "e.weight": numbers(500, 40)}
    packed = pack(state, ["e"], store)
    assert torch.equal(packed["e.bias"], state["e.bias"].half())
    assert packing_of(packed) == (["e.bias", "e.weight"], store)
    if store == "fp16":
        assert stored(packed) == 2 * 500 * 41
        assert torch.equal(unpack(packed)["e.weight"], state["e.weight"].half().float())
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
    with pytest.raises(StorageError, match="unknown storage 'int2'; choose one of fp32, fp16, int8"):
        pack({"t": table}, ["t"], "int2")
    for broken in (float("nan"), float("inf")):
        wrong = table.clone()
        wrong[3, 4] = broken
        for store in ("fp16", "int8"):
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


HEADERS = {
    '{"version": 2, "tensors": {}}': "packed in version 2, but this program supports 1",
    **dict.fromkeys(("[]", "{", '{"version": 1, "tensors": 3}'), "does not describe"),
    '{"version":1,"tensors":{"t":{"as":"int8","shape":[31,30]}}}': "does not match",
}
Edit = Callable[[dict[str, Tensor]], object]
EDITS: list[Edit] = [
    lambda state: state.pop("t"),
    lambda state: state.update({"t": state["t"].float()}),
    lambda state: state.update({"codes": state["codes"][:7]}),
    # A flipped bit of a scale.
    lambda state: state["t.scale"].fill_(math.nan),
]


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
def test_damaged_and_newer_states_fail(message: str, edit: Edit) -> None:
    packed = pack({"t": numbers(30, 30), "codes": torch.arange(300) % 7}, ["t", "codes"], "int8")
    edit(packed)
    with pytest.raises(StorageError, match=message):
        unpack(packed)


def test_states_of_other_sizes_fail() -> None:
    """Packed tensors take the places of those of the module; the bits of words are those of its options."""
    options: dict[str, Any] = {"bits": 2.5, "words_per_width": [0, 0, 150, 150, *[0] * 7]}
    made = se.build("quantized", num_embeddings=300, embedding_dim=32, **options).eval()
    state = made.state_dict()
    held = hold(pack({**state, "row_scales": torch.ones(299, 1)}, state, "fp16"))
    with pytest.raises(UserError, match=r"row_scales is \(299, 1\).*\(300, 1\)"):
        install(made, held)
    made.widths[0] = 5 - int(made.widths[0])
    with pytest.raises(UserError, match="widths has . bits for 1(49|51) words.*150"):
        made(torch.arange(3))


@pytest.mark.parametrize("method", se.methods())
def test_stored_bits_match_the_file(method: str) -> None:
    emb = se.build(method, num_embeddings=1200, embedding_dim=32, **example(method, 1200, 32))
    state = accounting.distinct_state(emb)
    for store in STORES:
        size, wanted = stored(pack(state, state, store)), accounting.stored_bits(emb, store) / 8
        assert size == pytest.approx(wanted, rel=0.01, abs=8), store


ROWS, WIDTH = 700, 48
MODES = (torch.enable_grad, torch.no_grad, torch.inference_mode)


def packed(store: str, *shape: int, seed: int = 0) -> nn.Parameter:
    """A packed parameter."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    form = FORMATS[store](shape)
    return nn.Parameter(PackedTensor(form, form.encode(values)), requires_grad=False)


def plain(tensor: Any) -> Tensor:
    """The decoded tensor."""
    return tensor.decoded()  # type: ignore[no-any-return]


def installed(embedding: se.SharedEmbedding, store: str) -> se.SharedEmbedding:
    """A copy of an embedding with tensors packed as `store`."""
    state = distinct_state(embedding)
    held = copy.deepcopy(embedding)
    held.load_state_dict(install(held, hold(pack(state, state, store))), strict=False)
    return held.eval()


@pytest.mark.parametrize("store", STORES[1:])
def test_operations_equal_those_of_the_decoded_tensor(store: str) -> None:
    for width in (16, 17, 33, WIDTH):
        table = packed(store, ROWS, width)
        values = plain(table)
        ids, hidden, bias = torch.randint(ROWS, (3, 4)), torch.randn(2, 3, width), torch.randn(ROWS)
        for mode in MODES:
            with mode():
                exact: list[Callable[[Any], Tensor]] = [
                    lambda x, ids=ids: F.embedding(ids, x),
                    lambda x, ids=ids: x[ids],
                    lambda x, ids=ids: x.index_select(0, ids[0]),
                    lambda x: torch.cat([x[:5], x[650:]]),
                    lambda x: x[3] + x[-2:].sum(0),
                    lambda x: x.double(),
                    lambda x: x.bfloat16() * 2,
                    lambda x: x.int(),
                    lambda x: x.flatten(),
                ]
                for compute in exact:
                    assert torch.equal(torch.Tensor.add(compute(table), 0), compute(values))
                near: list[Callable[[Any], Tensor]] = [
                    lambda x, hidden=hidden: F.linear(hidden, x),
                    lambda x, hidden=hidden, bias=bias: F.linear(hidden, x, bias),
                    lambda x, hidden=hidden: hidden @ x.t(),
                    lambda x, hidden=hidden: hidden[0, 0] @ x.T,
                    lambda x, width=width: x @ torch.ones(width, 3),
                    lambda x, hidden=hidden: torch.mm(hidden[0], x.transpose(0, 1), out=torch.empty(3, ROWS)),
                ]
                for compute in near:
                    torch.testing.assert_close(compute(table), compute(values), rtol=1e-5, atol=1e-4)
    with pytest.raises(IndexError):
        F.embedding(torch.tensor([ROWS]), packed(store, ROWS, WIDTH))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        F.linear(torch.ones(2, WIDTH + 1), packed(store, ROWS, WIDTH))


@pytest.mark.parametrize("store", STORES[1:])
def test_scores_and_lookups_allocate_no_table(store: str) -> None:
    rows, width = 40_000, 64
    table = packed(store, rows, width)
    hidden, ids = torch.randn(2, width), torch.arange(64)
    with torch.no_grad(), MemoryMeter(table) as meter:
        F.linear(hidden, table)
        F.embedding(ids, table)
    assert meter.peak < 0.8 * 4 * rows * width
    with torch.no_grad(), MemoryMeter(table) as meter:
        F.embedding(ids, table)
    assert meter.largest <= 4 * 64 * width


def test_packed_tensors_are_read_only() -> None:
    table = packed("int8", ROWS, WIDTH)
    for change in (lambda: table.mul_(2), lambda: table.copy_(torch.ones(ROWS, WIDTH)), table.zero_):
        with pytest.raises(RuntimeError, match="frozen"), torch.no_grad():
            change()
    with torch.no_grad():
        other = packed("int8", ROWS, WIDTH, seed=1)
        table.copy_(other)
    assert torch.equal(plain(table), plain(other))
    assert torch.equal(torch.empty(ROWS, WIDTH).copy_(table), plain(other))


@pytest.mark.parametrize("store", STORES[1:])
def test_copies_types_and_files(store: str) -> None:
    layer = nn.Linear(WIDTH, ROWS, bias=False)
    layer.weight = packed(store, ROWS, WIDTH)
    table, values = layer.weight, plain(layer.weight)
    assert repr(table).startswith(f"PackedTensor({store}")
    copied = copy.deepcopy(layer)
    assert isinstance(copied.weight, nn.Parameter) and isinstance(copied.weight, PackedTensor)
    assert copied.weight.codes.data_ptr() != table.codes.data_ptr()  # type: ignore[attr-defined]
    for kind in (torch.float16, torch.bfloat16, torch.float64):
        moved = copy.deepcopy(layer).to(kind)
        assert isinstance(moved.weight, PackedTensor) and moved.weight.dtype == kind
        assert torch.equal(plain(moved.weight), values.to(kind))
    assert layer.to("meta").weight.device.type == "meta"
    file = io.BytesIO()
    torch.save(copied.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["weight"]
    assert isinstance(loaded, PackedTensor) and torch.equal(plain(loaded), values)
    assert copied.load_state_dict({"weight": loaded}).missing_keys == []


@pytest.mark.parametrize("method", se.methods())
def test_packed_models_equal_unpacked_ones(method: str) -> None:
    words, dim = 300, 32
    for label, options in se.get_method_config(method).presets(words, dim).examples.items():
        torch.manual_seed(0)
        embedding = se.build(method, num_embeddings=words, embedding_dim=dim, padding_idx=3, **options).eval()
        ids, hidden = torch.randint(words, (2, 5)), torch.randn(2, 5, embedding.score_dim)
        for store in STORES[1:]:
            held, where = installed(embedding, store), f"{label} {store}"
            state = distinct_state(embedding)
            expected = copy.deepcopy(embedding)
            expected.load_state_dict(unpack(pack(state, state, store)), strict=False)
            assert any(isinstance(parameter, PackedTensor) for parameter in held.parameters()), where
            for mode in MODES:
                with mode():
                    outputs = [held(ids), held.table()]
                    wanted = [expected(ids), expected.table()]
                    if embedding.has_output:
                        losses = [emb.cross_entropy(hidden, ids) for emb in (held, expected)]
                        outputs += [held.log_prob(hidden), losses[0]]
                        wanted += [expected.log_prob(hidden), losses[1]]
                for output, other in zip(outputs, wanted):
                    assert torch.allclose(output, other, rtol=1e-4, atol=1e-4), where
            if embedding.has_output:
                states = hidden.clone().requires_grad_()
                losses = [emb.cross_entropy(states, ids, label_smoothing=0.1) for emb in (held, expected)]
                of_held, of_expected = (torch.autograd.grad(loss, states)[0] for loss in losses)
                torch.testing.assert_close(of_held, of_expected, rtol=1e-4, atol=1e-5)
            # Packing again gives the same bytes.
            first, again = pack(state, state, store), distinct_state(held)
            second = pack(again, again, store)
            assert first.keys() == second.keys()
            assert all(torch.equal(first[name], second[name]) for name in first), where
            assert held.counts()["total"] == embedding.counts()["total"]
            if embedding.per_word:
                few = torch.arange(2, words, 3)
                assert torch.equal(held.select_rows(few).table(), expected.select_rows(few).table()), where
            unfreeze(held)
            assert all(parameter.requires_grad for parameter in held.parameters())
            assert torch.equal(held.table(), expected.table())


def held_bytes(root: object) -> int:
    """The bytes of all tensors and arrays that can be reached from an object, each memory block once."""
    seen: set[int] = set()
    sizes: dict[int, int] = {}
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, PackedTensor):
            waiting += [item.codes, item.scales]
        elif isinstance(item, Tensor):
            sizes[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, np.ndarray):
            sizes[item.ctypes.data] = item.nbytes
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, (list, tuple)):
            waiting += item
        elif isinstance(item, nn.Module) or type(item).__module__.startswith("shared_embeddings."):
            waiting += getattr(item, "__dict__", {}).values()
    return sum(sizes.values())


def cases(words: int, dim: int) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Options of all methods, with more of `quantized`, and storages."""
    for method in se.methods():
        for options in se.get_method_config(method).presets(words, dim).examples.values():
            yield method, options, "int8"
    for name, codec in codecs().items():
        for bits in (1.0, 1.5, 2.0, 3.0, 4.0, 8.0):
            if bits <= max(codec.rates):
                yield "quantized", {"bits": bits, "codec": name}, "fp16"


@pytest.mark.parametrize("codec", ["trellis", "spectral"])
def test_loops_read_packed_signs_of_the_rotation(codec: str) -> None:
    made = se.build("quantized", num_embeddings=300, embedding_dim=512, bits=2.0, codec=codec).eval()
    held: Any = installed(made, "fp16").requires_grad_(False)
    assert isinstance(held.signs, PackedTensor)
    ids = torch.tensor([5, 299])
    with torch.no_grad():
        torch.testing.assert_close(held(ids), made(ids), rtol=0.05, atol=0.01)


# Rows of these take too long to be computed for every token, so their output table is cached.
CACHED = ("alone", "define", "tensor_train")


@pytest.mark.slow
@pytest.mark.parametrize(("words", "dim"), [(4000, 200), (3000, 512)])
def test_memory_stays_that_of_the_file(words: int, dim: int) -> None:
    for method, options, store in cases(words, dim):
        made = se.build(method, num_embeddings=words, embedding_dim=dim, padding_idx=3, **options)
        state = distinct_state(made)
        file = {name: tensor.clone() for name, tensor in pack(state, state, store).items()}
        size = sum(tensor.nbytes for tensor in file.values())
        sizes = {"num_embeddings": words, "embedding_dim": dim, "padding_idx": 3}
        loaded = se.build(method, **sizes, **made.stored_options())
        loaded.load_state_dict(install(loaded, hold(file)), strict=False)
        del made, state, file
        loaded.eval()
        hidden, ids = torch.randn(2, loaded.score_dim), torch.tensor([5, words - 1])
        with torch.no_grad():
            loaded(ids)
            assert held_bytes(loaded) <= 1.2 * size, (method, options, store)
            if loaded.has_output and (method not in CACHED or options.get("output") == "map"):
                loaded.logits(hidden)
                loaded.cross_entropy(hidden, ids, label_smoothing=0.1)
            assert held_bytes(loaded) <= 1.2 * size, (method, options, store)
            assert se.accounting.bytes_in_memory(loaded) <= held_bytes(loaded)


@pytest.mark.parametrize("method", sorted({*se.methods()} - {*CACHED}))
def test_losses_and_scores_allocate_no_table(method: str) -> None:
    words, dim = 40_000, 64
    examples = list(se.get_method_config(method).presets(words, dim).examples.values())
    for options in examples if method == "quantized" else examples[:1]:  # every codec
        held = installed(se.build(method, num_embeddings=words, embedding_dim=dim, **options), "int8")
        hidden, ids = torch.randn(2, dim), torch.tensor([0, words - 1])
        with torch.no_grad(), MemoryMeter(*held.parameters(), *held.buffers()) as meter:
            held(ids)
            held.log_prob(hidden)
            held.cross_entropy(hidden, ids, label_smoothing=0.1)
        assert meter.peak < 0.9 * 4 * words * dim, options


@pytest.mark.parametrize("store", ["fp32", "int8"])
@pytest.mark.parametrize(
    ("kind", "most", "shape"),
    [
        (torch.uint8, 2**4, (700, 6)),
        (torch.int16, 2**11, (700, 5)),
        (torch.int32, 2**25, (700, 3)),
        (torch.int64, 2**50, (300, 2)),
        (torch.uint8, 5, (900,)),
        (torch.bool, 2, (3, 40, 5)),
        (torch.uint8, 1, (256, 2)),
    ],
    ids=str,
)
def test_word_codes_stay_packed(kind: torch.dtype, most: int, shape: tuple[int, ...], store: str) -> None:
    codes = torch.randint(most, shape)
    codes.view(-1)[: codes.size(1) if codes.dim() == 2 else 1] = most - 1
    codes = codes.to(kind)
    state = pack({"codes": codes}, ["codes"], store)
    held: Any = hold(state)["codes"]
    assert isinstance(held, PackedTensor) and held.dtype == kind and held.shape == shape
    assert torch.equal(held.decoded(), codes)
    assert torch.equal(held.form.decode(held.packed).to(kind), codes)
    bits = (most - 1).bit_length() * codes.numel()
    assert held.codes.nbytes == held.form.bytes == state["codes"].nbytes == -(-bits // 8)
    ids = torch.randint(shape[0], (9,))
    assert torch.equal(held.index_select(0, ids), codes.index_select(0, ids))
    assert torch.equal(held[-1], codes[-1]) and torch.equal(held[1:5], codes[1:5])
    for wrong in (-1, shape[0]):
        with pytest.raises(IndexError):
            held.index_select(0, torch.tensor([0, wrong]))
    assert torch.equal(held.long(), codes.long()) and torch.equal(held.float(), codes.float())
    assert isinstance(held.to("cpu", kind), PackedTensor)
    again = pack({"codes": held}, ["codes"], store)
    assert again.keys() == state.keys() and all(torch.equal(again[name], state[name]) for name in state)
    file = io.BytesIO()
    torch.save(held, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True).decoded(), codes)


def test_scores_by_word_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled loop, on one or more threads, agrees with decoded rows, for fields of any width."""
    monkeypatch.setattr(kernels, "_NUMBERS_PER_THREAD", 1)
    for most in (1, 2, 3, 12, 300, 2**20):
        codes = torch.randint(most, (701, 5), dtype=torch.int32)
        codes[:, 3] = 0
        tables = torch.randn(2, 5, most)
        form = BitCodes.of(codes)
        wanted = sum(tables[:, column, codes[:, column].long()] for column in range(5))
        for threads in (1, 3):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            scores = kernels.field_scores(form.encode(codes).codes, form.widths, form.rows, tables)
            torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-5)
    for method in ("structured", "compositional_code"):
        (options,) = se.get_method_config(method).presets(300, 32).examples.values()
        embedding = se.build(method, num_embeddings=300, embedding_dim=32, padding_idx=3, **options)
        held, hidden = installed(embedding, "int8"), torch.randn(2, 32)
        scored = []
        with torch.no_grad():
            for is_usable in (True, False):
                monkeypatch.setattr(kernels, "usable", lambda *_, use=is_usable: use)
                scored.append(held.logits(hidden))
        torch.testing.assert_close(*scored, rtol=1e-4, atol=1e-4)


def test_packed_codes_train() -> None:
    for method in ("structured", "compositional_code", "uncle", "group_reduce"):
        (options,) = se.get_method_config(method).presets(300, 32).examples.values()
        embedding = se.build(method, num_embeddings=300, embedding_dim=32, **options)
        held, ids = installed(embedding, "fp32").train(), torch.randint(300, (4,))
        assert any(isinstance(buffer, PackedTensor) for buffer in held.buffers()), method
        assert all(parameter.requires_grad for parameter in held.parameters())
        for emb in (embedding, held):
            emb.cross_entropy(emb(ids), ids).backward()
        for parameter, other in zip(held.parameters(), embedding.parameters()):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_the_cache_follows_packed_tensors() -> None:
    options = {"num_codebooks": 4, "codebook_size": 16}
    first, second = (
        installed(se.build("compositional_code", num_embeddings=ROWS, embedding_dim=WIDTH, **options), "int8")
        for _ in range(2)
    )
    second.load_state_dict({**first.state_dict(), "codebooks": second.codebooks})
    with torch.no_grad():
        before = first.table().clone()
        install(first, {"codebooks": second.codebooks})
        assert torch.equal(first.table(), second.table()) and not torch.equal(first.table(), before)


@pytest.mark.parametrize("store", STORES[1:])
def test_compiled_and_exported_models(store: str) -> None:
    held = installed(se.build("standard", num_embeddings=ROWS, embedding_dim=WIDTH), store)
    ids, hidden = torch.randint(ROWS, (2, 5)), torch.randn(2, 5, WIDTH)

    def both(ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return held(ids), held.logits(hidden)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = both(ids, hidden)
        outputs = torch.compile(both, backend="aot_eager")(ids, hidden)
        torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-4)
        exported = torch.export.export(held, (ids,))
        torch.testing.assert_close(exported.module()(ids), expected[0])
