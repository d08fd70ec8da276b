"""Tensors that stay packed in memory: results, allocations, and storage."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shared_embeddings as se
from shared_embeddings.accounting import distinct_state
from shared_embeddings.quant import kernels
from shared_embeddings.quant.codec import codecs
from shared_embeddings.quant.formats import FORMATS, BitCodes
from shared_embeddings.quant.packed_tensor import (
    PackedTensor,
    column_sums,
    install,
    unfreeze,
    warn_of_frozen,
)
from shared_embeddings.quant.storage import hold, pack, unpack
from tests.shared_embeddings.support import MemoryMeter

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


@pytest.mark.parametrize("store", FORMATS)
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


@pytest.mark.parametrize("store", FORMATS)
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


@pytest.mark.parametrize("store", FORMATS)
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
    for label, options in se.options(method).examples(words, dim).items():
        torch.manual_seed(0)
        embedding = se.build(method, num_embeddings=words, embedding_dim=dim, padding_idx=3, **options).eval()
        ids, hidden = torch.randint(words, (2, 5)), torch.randn(2, 5, embedding.score_dim)
        for store in FORMATS:
            held, where = installed(embedding, store), f"{label} {store}"
            state = distinct_state(embedding)
            expected = copy.deepcopy(embedding)
            expected.load_state_dict(unpack(pack(state, state, store)), strict=False)
            assert any(isinstance(parameter, PackedTensor) for parameter in held.parameters()), where
            for mode in MODES:
                with mode():
                    found = [held(ids), held.table()]
                    wanted = [expected(ids), expected.table()]
                    if embedding.has_output:
                        losses = [one.cross_entropy(hidden, ids) for one in (held, expected)]
                        found += [held.log_prob(hidden), losses[0]]
                        wanted += [expected.log_prob(hidden), losses[1]]
                for one, other in zip(found, wanted):
                    assert torch.allclose(one, other, rtol=1e-4, atol=1e-4), where
            if embedding.has_output:
                states = hidden.clone().requires_grad_()
                losses = [one.cross_entropy(states, ids, label_smoothing=0.1) for one in (held, expected)]
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
    found: dict[int, int] = {}
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, PackedTensor):
            waiting += [one.codes, one.scales]
        elif isinstance(one, Tensor):
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif isinstance(one, np.ndarray):
            found[one.ctypes.data] = one.nbytes
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple)):
            waiting += one
        elif isinstance(one, nn.Module) or type(one).__module__.startswith("shared_embeddings."):
            waiting += getattr(one, "__dict__", {}).values()
    return sum(found.values())


def cases(words: int, dim: int) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Options of all methods, with more of `quantized`, and storages."""
    for method in se.methods():
        for options in se.options(method).examples(words, dim).values():
            yield from ((method, options, store) for store in ("int8", "int4"))
    for codec in codecs():
        for bits in (1.0, 1.5, 2.0, 3.0, 4.0, 8.0):
            yield "quantized", {"bits": bits, "codec": codec}, "fp16"


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
            assert loaded.bytes_in_memory() <= held_bytes(loaded)


@pytest.mark.parametrize("method", sorted({*se.methods()} - {*CACHED}))
def test_losses_and_scores_allocate_no_table(method: str) -> None:
    words, dim = 40_000, 64
    (options, *_) = se.options(method).examples(words, dim).values()
    held = installed(se.build(method, num_embeddings=words, embedding_dim=dim, **options), "int8")
    hidden, ids = torch.randn(2, dim), torch.tensor([0, words - 1])
    with torch.no_grad(), MemoryMeter(*held.parameters(), *held.buffers()) as meter:
        held(ids)
        held.log_prob(hidden)
        held.cross_entropy(hidden, ids, label_smoothing=0.1)
    assert meter.peak < 0.9 * 4 * words * dim


def test_sums_of_packed_rows_are_kept_until_codes_change(monkeypatch: pytest.MonkeyPatch) -> None:
    table, other = packed("int4", ROWS, WIDTH), packed("int4", ROWS, WIDTH, seed=1)
    decoded: list[int] = []
    blocks = PackedTensor.blocks
    monkeypatch.setattr(PackedTensor, "blocks", lambda self: decoded.append(1) or blocks(self))
    for wanted in (table, other):
        with torch.no_grad():
            table.copy_(wanted)
        for matrix in (table, table.detach(), table):
            found = column_sums(matrix, torch.float32)
            torch.testing.assert_close(found, plain(wanted).sum(dim=0), rtol=1e-4, atol=1e-4)
    assert len(decoded) == 2


@pytest.mark.parametrize("store", ["fp32", "int4"])
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
    assert torch.equal(held.long(), codes.long()) and torch.equal(held.float(), codes.float())
    assert isinstance(held.to("cpu", kind), PackedTensor)
    again = pack({"codes": held}, ["codes"], store)
    assert again.keys() == state.keys() and all(torch.equal(again[name], state[name]) for name in state)
    file = io.BytesIO()
    torch.save(held, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True).decoded(), codes)


def test_word_codes_that_hardly_shrink_are_decoded() -> None:
    dense = torch.randint(256, (700, 6), dtype=torch.uint8)
    dense[:, 0] %= 16
    assert not isinstance(hold(pack({"codes": dense}, ["codes"], "fp32"))["codes"], PackedTensor)


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
            found = form.table_scores(form.encode(codes), tables)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for method in ("structured", "compositional_code"):
        (options,) = se.options(method).examples(300, 32).values()
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
        (options,) = se.options(method).examples(300, 32).values()
        embedding = se.build(method, num_embeddings=300, embedding_dim=32, **options)
        held, ids = installed(embedding, "fp32").train(), torch.randint(300, (4,))
        assert any(isinstance(buffer, PackedTensor) for buffer in held.buffers()), method
        assert all(parameter.requires_grad for parameter in held.parameters())
        for one in (embedding, held):
            one.cross_entropy(one(ids), ids).backward()
        for one, other in zip(held.parameters(), embedding.parameters()):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_training_warns_once() -> None:
    warn_of_frozen.cache_clear()
    held = installed(se.build("standard", num_embeddings=ROWS, embedding_dim=WIDTH), "int8")
    with pytest.warns(UserWarning, match="trainable=True") as caught:
        held.train()
        held.train()
    assert len(caught) == 1
    assert not any(parameter.requires_grad for parameter in held.parameters())


def test_the_cache_follows_packed_tensors() -> None:
    options = {"num_codebooks": 4, "codebook_size": 16}
    one, two = (
        installed(se.build("compositional_code", num_embeddings=ROWS, embedding_dim=WIDTH, **options), "int8")
        for _ in range(2)
    )
    two.load_state_dict({**one.state_dict(), "codebooks": two.codebooks})
    with torch.no_grad():
        before = one.table().clone()
        install(one, {"codebooks": two.codebooks})
        assert torch.equal(one.table(), two.table()) and not torch.equal(one.table(), before)


@pytest.mark.parametrize("store", FORMATS)
def test_compiled_and_exported_models(store: str) -> None:
    held = installed(se.build("standard", num_embeddings=ROWS, embedding_dim=WIDTH), store)
    ids, hidden = torch.randint(ROWS, (2, 5)), torch.randn(2, 5, WIDTH)

    def both(ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return held(ids), held.logits(hidden)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = both(ids, hidden)
        found = torch.compile(both, backend="aot_eager")(ids, hidden)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
        exported = torch.export.export(held, (ids,))
        torch.testing.assert_close(exported.module()(ids), expected[0])
