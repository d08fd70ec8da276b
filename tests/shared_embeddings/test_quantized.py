"""Codecs, the bits of words, packed rows and scores of `quantized`, and rounding in training."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shared_embeddings as se
from shared_embeddings.accounting import distinct_state
from shared_embeddings.compress.fit import fit
from shared_embeddings.modules.quantized import QuantizedEmbedding, rotate
from shared_embeddings.quant import kernels
from shared_embeddings.quant.allocation import rates_within
from shared_embeddings.quant.bits import pack_bits, read_windows
from shared_embeddings.quant.codec import Codec, codecs
from shared_embeddings.quant.codecs import trellis
from shared_embeddings.quant.codecs.spectral import SpectralCodec
from shared_embeddings.quant.codecs.trellis import TrellisCodec
from shared_embeddings.quant.codecs.uniform import UniformCodec
from shared_embeddings.quant.decoder import RATES, factors_of
from shared_embeddings.quant.metric import Metric
from shared_embeddings.quant.packed_tensor import install, unfreeze
from shared_embeddings.quant.storage import hold, pack
from shared_embeddings.utils.options import OptionError

DIM = 128


def correlated_rows(dim: int, count: int = 9000) -> Tensor:
    """Rows whose variance decreases along the directions of a random basis."""
    generator = torch.Generator().manual_seed(3)
    basis = torch.linalg.qr(torch.randn(dim, dim, generator=generator)).Q
    return torch.randn(count, dim, generator=generator) * 0.9 ** torch.arange(dim) @ basis


def normal_rows(count: int = 384, dim: int = DIM) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(5))


def recoded(codec: Codec, rows: Tensor, rate: float) -> tuple[Tensor, float]:
    """Decoded rows, and the bits of a number with the scales as stored."""
    books = codec.learn(rows, torch.full((len(rows),), float(rate)))
    books |= codec.derived(books, [rate])
    codes, scales = codec.encode(rows, rate, books)
    assert codes.dtype == torch.uint8 and codes.shape == (len(rows), codec.row_bytes(rate))
    assert scales.shape == (len(rows), codec.num_scales)
    values = codec.project(codec.decode(codes, scales, rate, books), books, is_inverted=True)
    bits_of_scale = 16 if codec.has_groups else 8
    return values, (8 * codec.row_bytes(rate) + bits_of_scale * codec.num_scales) / codec.dim


def error(values: Tensor, rows: Tensor) -> float:
    return float((values - rows).norm() / rows.norm())


# The least error is 2**-bits.
BOUNDS: list[tuple[Codec, dict[float, float]]] = [
    (TrellisCodec(DIM), {0.25: 0.84, 0.5: 0.715, 1: 0.515, 2: 0.268, 3: 0.140, 4: 0.075}),
    (UniformCodec(DIM, 32), {1: 0.61, 2: 0.34, 3: 0.17, 4: 0.085, 8: 0.0055}),
]


@pytest.mark.parametrize(
    ("codec", "rate", "bound"),
    [(codec, rate, bound) for codec, bounds in BOUNDS for rate, bound in bounds.items()],
    ids=lambda value: getattr(value, "name", None),
)
def test_errors_are_near_the_theoretical_limit(codec: Codec, rate: float, bound: float) -> None:
    rows = normal_rows()
    values, bits = recoded(codec, rows, rate)
    assert 2.0**-bits < error(values, rows) <= bound
    assert bits <= rate + (0.5 if codec.has_groups else 0.13)


@pytest.mark.parametrize("codec", [UniformCodec(20, 32), TrellisCodec(20)])
def test_rows_of_zeros_and_of_any_scale(codec: Codec) -> None:
    rows = normal_rows(6, 20) * torch.tensor([0.0, 1e-20, 1e-3, 1.0, 1e3, 1e15]).unsqueeze(1)
    values, _ = recoded(codec, rows, 4)
    assert bool(values.isfinite().all()) and bool((values[0] == 0).all())
    for row, wanted in zip(values[2:], rows[2:]):
        assert error(row, wanted) < 0.3


@pytest.mark.parametrize(("threads", "lanes"), [(1, True), (2, True), (2, False)])
def test_compiled_loops_agree_with_torch(threads: int, lanes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not lanes:
        monkeypatch.setattr("shared_embeddings.quant.lanes.INSTRUCTIONS", None)
    monkeypatch.setattr(kernels, "_NUMBERS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    fitted = SpectralCodec(95).fit(correlated_rows(95), 2.0, None, None, lambda codec, counts: True)[0]
    sizes = (96, 32), (96, 96), (90, 32), (90, 3), (20, 32)
    for codec in (*(UniformCodec(*size) for size in sizes), fitted, TrellisCodec(96), TrellisCodec(95)):
        rows, hidden = normal_rows(37, codec.dim), normal_rows(3, codec.dim)
        for rate in filter(None, codec.rates):
            books = codec.initial_books()
            books |= codec.derived(books, [rate])
            codes, scales = codec.encode(rows, rate, books)
            results = []
            for is_usable in (True, False):
                monkeypatch.setattr(kernels, "usable", lambda *_, use=is_usable: use)
                vectors = codec.project(codec.decode(codes, scales, rate, books), books, is_inverted=True)
                scores = codec.scores(codec.project(hidden, books), codes, scales, rate, books)
                first = codec.scores(codec.project(hidden[:1], books), codes, scales, rate, books)
                # Some loops read hidden states in 16 bits.
                near = {"rtol": 1e-4, "atol": 1e-4 * float(scores.abs().max())}
                torch.testing.assert_close(scores, hidden @ vectors.t(), **near)
                torch.testing.assert_close(first, scores[:1], **near)
                results.append((vectors, scores))
            torch.testing.assert_close(*results, **near)


@pytest.mark.parametrize("codec", [TrellisCodec(96), SpectralCodec(96)])
def test_compiled_search_is_as_accurate_as_torch(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.usable(torch.zeros(1)), "numba is not installed"
    rows = normal_rows(37, 96)
    for rate in (1, 2, 4, 8, *codec.rates[1:3]):
        compiled = error(recoded(codec, rows, rate)[0], rows)
        with monkeypatch.context() as patched:
            patched.setattr(kernels, "usable", lambda *_: False)
            plain = error(recoded(codec, rows, rate)[0], rows)
        assert compiled == pytest.approx(plain, rel=3e-3)


def test_gradients_of_codebooks_do_not_use_compiled_loops() -> None:
    codec, hidden = SpectralCodec(32), normal_rows(2, 32)
    books = codec.initial_books()
    books |= codec.derived(books, [3])
    codes, scales = codec.encode(normal_rows(4, 32), 3, books)
    spread = books["spread"].requires_grad_()
    books |= codec.derived(books, [3])
    codec.scores(hidden, codes, scales, 3, books).sum().backward()
    assert spread.grad is not None
    # Scores are linear in the sizes, which are one.
    total = codec.scores(hidden, codes, scales, 3, books).detach().sum()
    torch.testing.assert_close(spread.grad.sum(), total)


@pytest.mark.parametrize(
    ("rate", "dim", "bits", "gain"),
    [(1, 5, 12, 0.9), (0.5, 8, 11, 0.7), (0.5, 7, 11, 0.7), (0.25, 11, 10, 0.55)],
)
@pytest.mark.parametrize("is_usable", [False, True])
def test_the_path_is_optimal(
    rate: float, dim: int, bits: int, gain: float, is_usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against all streams of a few numbers."""
    monkeypatch.setattr(kernels, "usable", lambda *_: is_usable)
    rows = normal_rows(4, dim)
    codec = TrellisCodec(dim)
    values, _ = recoded(codec, rows, rate)
    numbers = torch.arange(2**bits) << 16 - bits
    streams = torch.stack([numbers >> 8, numbers & 0xFF], dim=1).to(torch.uint8)
    every = codec.decode(streams, torch.ones(len(streams), 1), rate, {})
    # Paths are chosen at a size that 8 bits can store, before the scale is fitted.
    exponents = (rows.square().mean(dim=1, keepdim=True).log2() / 2 * 16).round() / 16
    sized = rows / (gain * 2**exponents)
    best = every[(sized.unsqueeze(1) - every).square().sum(-1).argmin(dim=1)]
    scale = (rows * best).sum(1, keepdim=True) / best.square().sum(1, keepdim=True)
    torch.testing.assert_close(values, best * scale)


def least_errors(rows: Tensor, rate: float) -> Tensor:
    """The least squared error of each row ``(n, D)`` by all paths of a rate, in 64 bits."""
    books, bits, size = torch.from_numpy(trellis.path_books()).double(), max(1, int(rate)), round(1 / rate)
    costs = torch.full((len(rows), 2**11), torch.inf, dtype=torch.float64)
    costs[:, : 2**8] = 0.0
    for first in range(0, rows.size(1), max(1, size)):
        if first:
            costs = costs.unflatten(1, (2**bits, -1)).amin(dim=1).repeat_interleave(2**bits, dim=1)
        for number, column in enumerate(rows[:, first : first + max(1, size)].double().unbind(1)):
            costs = costs + (column.unsqueeze(1) - books[number]).square()
    return costs.amin(dim=1)


@pytest.mark.parametrize("dim", [160, 256, 638])
def test_paths_of_whole_numbers_are_as_near_as_others(dim: int) -> None:
    """Also those to numbers far beyond the largest entry."""
    outlier = F.pad(torch.full((8, 1), 9.0), (70, dim - 71))
    for rate in (0.25, 0.5, 1.0, 2.0, 3.0, 4.0):
        steps, rows = trellis.steps_for(((rate, dim),)), normal_rows(8, dim) / trellis.path_gain(rate)
        for targets in (rows, rows + outlier):
            codes = trellis.nearest_codes(targets, rate, steps)
            assert codes is not None
            errors = (trellis.read_entries(codes, steps) - targets).square().sum(dim=1)
            least = least_errors(targets, rate)
            assert bool((errors > 0.99999 * least).all())
            assert float(errors.sum()) < 1.005 * float(least.sum())
            together = trellis.nearest_codes(targets[3:4], rate, steps)
            assert together is not None and torch.equal(together, codes[3:4])


@pytest.mark.parametrize("dim", [1, 2, 31, 33, 640])
def test_paths_are_read_in_any_number_of_rows(dim: int) -> None:
    """Of every rate, and of all of them in one row; codes start anywhere in memory."""
    mixed = tuple((rate, dim) for rate in sorted(TrellisCodec(dim).rates[1:], reverse=True))
    for runs in (*((run,) for run in mixed), mixed):
        steps = trellis.steps_for(runs)
        size = trellis.stream_bytes(steps)
        stream = torch.randint(256, (7 + 50 * size,), dtype=torch.uint8)
        codes = stream[7:].view(50, size)
        wanted, scales = trellis.read_entries(codes, steps), torch.rand(50, 1)
        sizes, center = torch.rand(wanted.size(1) + 3), torch.randn(wanted.size(1) + 3)
        hidden, rows = torch.randn(5, wanted.size(1)), F.pad(wanted, (0, 3)) * sizes + center
        scores = hidden @ (wanted * scales).t()
        for count in (0, 1, 15, 16, 17, 50):
            plan = trellis.entry_plan(runs)
            read = kernels.decode_rows(codes[:count], scales[:count], plan, sizes, center)
            torch.testing.assert_close(read, (rows * scales)[:count])
            actual = trellis.path_scores(hidden, codes[:count], steps, scales[:count])
            torch.testing.assert_close(
                actual, scores[:, :count], rtol=1e-4, atol=1e-4 * float(scores.abs().max())
            )


@pytest.mark.parametrize("codec", codecs())
@pytest.mark.parametrize("dim", [48, 160, 134])
def test_compiled_look_ups_agree_with_torch(codec: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one rate and several, and padding; with numbers along an odd factor of D, of which 67 is large."""
    ids = torch.tensor([[5, 0, 3], [29, 0, 5]])
    for bits in (2.0, 2.5):
        words = {"num_embeddings": 30, "embedding_dim": dim, "padding_idx": 0}
        embedding = se.build("quantized", **words, codec=codec, bits=bits).eval()
        rows = []
        for is_usable in (True, False):
            monkeypatch.setattr(kernels, "usable", lambda *_, use=is_usable: use)
            with torch.no_grad():
                rows += [
                    embedding(ids),
                    torch.stack([embedding(word) for word in ids.view(-1)]).view(2, 3, dim),
                ]
        for others in rows[1:]:
            torch.testing.assert_close(others, rows[0])
        assert not rows[0][0, 1].any()
        with pytest.raises(IndexError):
            embedding(torch.tensor([30]))


def test_uniform_codes_worked_by_hand() -> None:
    codec = UniformCodec(5, 4)
    rows = torch.tensor([[-8.0, 7.0, 0.0, 3.0, 16.0]])
    encoded = codec.encode(rows, 4, {})
    # The scale of a group is that of -8, so it is negative where the largest number is positive.
    assert encoded.scales.tolist() == [[1.0, -2.0]]
    assert encoded.codes.tolist() == [[0x0F, 0x8B, 0x00]]
    assert codec.decode(encoded.codes, encoded.scales, 4, {}).tolist() == rows.tolist()


def test_packing_worked_by_hand() -> None:
    numbers = torch.tensor([[1, 2, 3, 4, 5], [7, 0, 7, 0, 7]])
    packed = pack_bits(numbers, 3)
    assert packed.tolist() == [[0b00101001, 0b11001010], [0b11100011, 0b10001110]]
    assert read_windows(packed, 5, 3, 3).tolist() == numbers.tolist()
    # Four bits at a stride of two, from one bit before the beginning.
    assert read_windows(packed[:1], 4, 4, 2, start=-1).tolist() == [[0b0001, 0b0101, 0b0100, 0b0011]]


@pytest.mark.parametrize("dim", [1, 2, 7, 24, 128, 200, 257, 300, 384, 640])
def test_rotations_are_orthogonal(dim: int) -> None:
    assert math.prod(factors_of(dim)) == dim
    signs = torch.randint(2, (dim,), dtype=torch.uint8)
    rows = torch.randn(3, dim, dtype=torch.float64)
    matrix = rotate(torch.eye(dim, dtype=torch.float64), signs)
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(dim, dtype=torch.float64))
    torch.testing.assert_close(rotate(rows, signs), rows @ matrix)
    torch.testing.assert_close(rotate(rotate(rows, signs), signs, is_inverted=True), rows)
    # A compiled loop, for all types but this one.
    torch.testing.assert_close(rotate(rows.float(), signs, is_inverted=True), (rows @ matrix.t()).float())
    if dim > 100 and dim != 257:  # single numbers are spread over all
        assert float(matrix.abs().max()) < 2 / math.sqrt(dim)


def allocated(
    importance: list[float], limit: int, rates: list[float], sizes: list[int], errors: list[float]
) -> Tensor:
    """The rates of words within a number of bytes."""
    size = dict(zip(rates, sizes))

    def is_small(counts: Mapping[float, int]) -> bool:
        return sum(size[rate] * count for rate, count in counts.items()) <= limit

    shares = torch.tensor(errors, dtype=torch.float64)
    return rates_within(torch.tensor(importance), is_small, rates, sizes, shares)


WHOLE = [0, 1, 2, 3], [0, 1, 2, 3], [1, 1 / 4, 1 / 16, 1 / 64]


def test_bits_of_words_worked_by_hand() -> None:
    """Gains are 16 1; 4 1/4; 1 1/16 for the bits of three words, so the first gets most."""
    widths = [allocated([16.0, 4.0, 1.0], bits, *WHOLE).tolist() for bits in range(7)]
    assert widths == [[0, 0, 0], [1, 0, 0], [2, 0, 0], [2, 1, 0], [3, 1, 0], [3, 2, 0], [3, 2, 1]]
    # The second rate lowers the error by 1/8 for each byte, the third one by 5/16 from the first.
    fractions = [0, 0.5, 3, 4], [0, 1, 2, 4], [1.0, 0.875, 0.375, 0.25]
    widths = [allocated([4.0, 1.0], limit, *fractions).tolist() for limit in (0, 2, 4, 6, 8)]
    assert widths == [[0, 0], [3, 0], [3, 3], [4, 3], [4, 4]]
    for bits, counts in ((3.0, {3: 10}), (2.3, {2: 7, 3: 3}), (0.5, {0: 5, 1: 5})):
        assert se.QuantizedOptions(bits=bits).layout(10, 8)[1] == counts


def test_bits_of_words_are_optimal() -> None:
    importance = torch.rand(5, generator=torch.Generator().manual_seed(1)) ** 3
    every = torch.tensor(list(itertools.product(range(4), repeat=5))).double()
    for limit in range(2, 15):
        widths = allocated(importance.tolist(), limit, *WHOLE).double()
        least = (importance * 4.0 ** -every[every.sum(dim=1) <= limit]).sum(dim=1).min()
        assert float((importance * 4.0**-widths).sum()) == pytest.approx(float(least))


def test_principal_directions_get_bits_by_their_variance() -> None:
    """Rows with a mean and a spectrum that falls lose less than rotated rows with the same bits."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(2000, 24, generator=generator) * 0.7 ** torch.arange(24) + 1.0
    errors = {}
    for codec in ("spectral", "trellis"):
        embedding = fit("quantized", rows, bits=2.0, codec=codec)[0].eval()
        with torch.no_grad():
            errors[codec] = float((embedding.table() - rows).norm() / rows.norm())
            hidden = torch.randn(3, 24, generator=generator)
            wanted = hidden @ embedding.table().t()
            # Loops for paths read hidden states in 16 bits.
            near = {"rtol": 1e-4, "atol": 1e-4 * float(wanted.abs().max())}
            torch.testing.assert_close(embedding.logits(hidden), wanted, **near)
    assert errors["spectral"] < 0.3 * errors["trellis"]


def test_long_rows_are_as_exact_without_compiled_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, steps, errors = normal_rows(16, 2048), trellis.steps_for(((8.0, 2048),)), []
    targets = rows / trellis.path_gain(8.0)
    for is_usable in (True, False):
        monkeypatch.setattr(kernels, "usable", lambda *_, use=is_usable: use)
        states = trellis.nearest_states(targets, steps, torch.ones(2048))
        errors.append(float((trellis.entries_of(states, steps) - targets).square().sum()))
    assert errors[1] == pytest.approx(errors[0], rel=1e-3)


def test_words_without_codes_are_multiples_of_their_mean() -> None:
    """Half of the words are small, near one direction, along which others vary most."""
    main = torch.eye(64)[0]
    small = 0.02 * normal_rows(2000, 64) + torch.linspace(0.5, 1.5, 2000).unsqueeze(1) * main
    rows = torch.cat([10 * normal_rows(2000, 64) * (1 + 5 * main), small, torch.zeros(1, 64)])
    made, _ = fit("quantized", rows, codec="spectral", bits=0.5, progress=False)
    assert isinstance(made, QuantizedEmbedding)
    absent = made.widths == RATES.index(0.0)
    assert bool(absent[2000:].all())
    decoded = made.table().detach()
    assert float((decoded - rows)[2000:].norm() / rows[2000:].norm()) < 0.25
    assert bool((decoded[-1] == 0).all())
    with torch.no_grad():
        # The largest number is 214; loops round it otherwise than torch.
        rounding = 2 * torch.finfo(torch.float32).eps * float(decoded.abs().max())
        torch.testing.assert_close(made(torch.arange(4001)), decoded, rtol=1e-5, atol=rounding)
        states = normal_rows(3, 64)
        torch.testing.assert_close(made._block_scores(states), states @ decoded.t(), rtol=1e-3, atol=0.1)


@pytest.mark.parametrize("codec", codecs())
def test_a_rate_may_have_none_of_the_words_that_matter(codec: str) -> None:
    rows = correlated_rows(COLUMNS, WORDS) * torch.linspace(4, 0.1, WORDS).unsqueeze(1)
    only = torch.arange(5)
    made, report = fit("quantized", rows, codec=codec, bits=2.5, only=only, progress=False)
    assert isinstance(made, QuantizedEmbedding) and len(made.word_counts) > len(made.widths[only].unique())
    assert report.relative_error < 0.2


def test_directions_whose_errors_count_little_get_few_bits() -> None:
    """Most of the table's energy is along one of them."""
    rows = normal_rows(500, 40) * (1 + 19 * torch.eye(40)[0])
    matrix = torch.eye(40) - (1 - 1e-4) * torch.diag(torch.eye(40)[0])
    errors = []
    for metric in (None, matrix):
        codec = SpectralCodec(40).fit(rows, 2.0, None, metric, lambda codec, counts: True)[0]
        books = codec.learn(rows, torch.full((len(rows),), 2.0))
        books |= codec.derived(books, [2.0])
        seen = Metric(matrix).seen_by(functools.partial(codec.project, books=books))
        encoded = codec.encode(rows, 2.0, books, seen)
        decoded = codec.decode(encoded.codes, encoded.scales, 2.0, books)
        missed = codec.project(decoded, books, is_inverted=True) - rows
        errors.append(float((missed @ matrix * missed).sum()))
    assert errors[1] < 0.7 * errors[0]


WORDS, COLUMNS = 300, 48
CODECS = sorted(codecs())
OF_ANY_RATE = [name for name in CODECS if len(codecs()[name].rates) > 2]
COUNTS = 1e6 / torch.arange(1, WORDS + 1).double().square()


def table() -> Tensor:
    return torch.randn(WORDS, COLUMNS, generator=torch.Generator().manual_seed(2))


def fitted(counts: Tensor | None = None, **options: object) -> QuantizedEmbedding:
    embedding, _ = se.fit("quantized", table(), token_counts=counts, progress=False, **options)
    assert isinstance(embedding, QuantizedEmbedding)
    return embedding


def stored_bits(embedding: se.SharedEmbedding) -> int:
    return embedding.counts()["stored_bits"]


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_a_fit_takes_at_most_the_bytes_of_its_options(codec: str) -> None:
    for bits in (0.75, 2, 2.6):
        options = {"bits": bits, "codec": codec}
        plain = se.build("quantized", num_embeddings=WORDS, embedding_dim=COLUMNS, **options)
        for counts in (None, COUNTS.float()):
            size = stored_bits(fitted(counts, **options))
            assert 0.93 * stored_bits(plain) < size <= stored_bits(plain), (bits, counts is None)


def test_frequent_words_get_more_bits() -> None:
    """The rows all have about the same norm."""
    embedding, plain = fitted(COUNTS, bits=2.0), fitted(COUNTS, bits=2.0, count_exponent=0.0)
    widths, weights = embedding.widths.float(), COUNTS.unsqueeze(1)
    errors = [((emb.table() - table()).square() * weights).sum() for emb in (embedding, plain)]
    assert errors[0] < 0.5 * errors[1] and stored_bits(embedding) <= stored_bits(plain)
    assert float(widths[:30].mean()) > 3 > float(widths[100:200].mean()) >= 1 >= float(widths[200:].min())
    assert len(plain.word_counts) == 1
    assert len(fitted(None, bits=2.0).word_counts) == 1
    few = fitted(COUNTS, bits=0.75)
    is_zero = few.widths == 0
    assert 0 < int(is_zero.sum()) < WORDS
    assert torch.equal((few.table() == 0).all(dim=1), is_zero)


@pytest.mark.parametrize("codec", codecs())
def test_all_widths_in_every_dtype(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and packed form, in blocks, among them words without bits and with fractions of a bit."""
    monkeypatch.setattr(sys.modules[Codec.__module__], "BLOCK", 64)
    targets = torch.arange(0, WORDS, 20)
    for bits in (0.75, 2.5):
        made = fitted(COUNTS, bits=bits, codec=codec)
        assert len(made.word_counts) > 1 and (bits > 1 or 0 in made.word_counts)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            rounded = copy.deepcopy(made).to(dtype).eval()
            held = copy.deepcopy(rounded)
            state = distinct_state(held)
            held.load_state_dict(install(held, hold(pack(state, state, "fp16"))), strict=False)
            loose = {"rtol": 0.1, "atol": 0.3} if dtype.itemsize == 2 else {"rtol": 1e-3, "atol": 1e-3}
            for embedding in (rounded, held):
                exact = copy.deepcopy(embedding)
                unfreeze(exact)
                exact.double()
                for number in (1, 15):
                    hidden = torch.randn(number, COLUMNS).to(dtype)
                    wanted = exact.logits(hidden.double()).detach()
                    with torch.no_grad():
                        logits = embedding.logits(hidden)
                        assert logits.dtype == embedding(targets).dtype == embedding.table().dtype == dtype
                        torch.testing.assert_close(logits.double(), wanted, **loose)
                    hidden.requires_grad_()
                    loss = embedding.cross_entropy(hidden, targets[:number])
                    loss.backward()
                    assert hidden.grad is not None and hidden.grad.dtype == dtype
                    exact_loss = torch.nn.functional.cross_entropy(wanted, targets[:number])
                    torch.testing.assert_close(loss.double(), exact_loss, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("codec", OF_ANY_RATE)
def test_tables_of_any_size_and_content(codec: str) -> None:
    """Among them some in which no word has codes, since one codebook takes more bytes than the table."""
    for words, dim in ((1, 1), (1, 8), (2, 1), (2, 64), (3, 5), (50, 1)):
        for rows in (torch.randn(words, dim), torch.zeros(words, dim), torch.ones(words, dim)):
            for bits in (0.25, 8.0):
                for counts in (None, torch.arange(words, 0, -1)):
                    options = {"bits": bits, "codec": codec, "padding_idx": 0 if bits < 1 else None}
                    made, _ = se.fit("quantized", rows, token_counts=counts, progress=False, **options)
                    assert made.table().isfinite().all()
                    with torch.no_grad():
                        assert made.eval().logits(torch.randn(2, dim)).isfinite().all()


@pytest.mark.parametrize(
    ("method", "options"),
    [("quantized", {"bits": 2.0}), ("group_reduce", {"num_groups": 2, "min_rank": 3})],
)
def test_training_works_after_inference_mode(method: str, options: dict[str, Any]) -> None:
    """What both share is cached as a tensor that gradients may use; of an unusual width, not yet cached."""
    table = se.build(method, num_embeddings=101, embedding_dim=44, **options)
    hidden = torch.randn(3, 44)
    with torch.inference_mode():
        table.eval()(torch.arange(5))
        table.logits(hidden)
    table.train()
    (table(torch.arange(5)).sum() + table.logits(hidden).sum() + table.table().sum()).backward()
    assert all(parameter.grad is not None for parameter in table.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("codec", OF_ANY_RATE)
def test_words_can_be_removed(codec: str) -> None:
    embedding = fitted(COUNTS, bits=1.5, codec=codec)
    # Then one of the widths only, then one word.
    for ids in (torch.arange(0, WORDS, 3), (embedding.widths == 2).nonzero().flatten(), torch.tensor([299])):
        part = embedding.select_rows(ids)
        torch.testing.assert_close(part.table(), embedding.table()[ids], rtol=1e-5, atol=1e-6)


def test_training_moves_scales_and_levels_but_no_codes() -> None:
    embedding, _ = fit("quantized", correlated_rows(COLUMNS), bits=2.0, codec="spectral")
    before = {name: tensor.clone() for name, tensor in embedding.state_dict().items()}
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    embedding.cross_entropy(torch.randn(20, COLUMNS), torch.randint(WORDS, (20,))).backward()
    optimizer.step()
    changed = {
        name for name, tensor in embedding.state_dict().items() if not torch.equal(tensor, before[name])
    }
    assert changed == {"row_scales", "axes", "spread", "center"}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bits": 9}, "has 8 at most"),
        ({"bits": 4, "group_size": 64}, "no effect with codec trellis"),
        ({"bits": 4, "count_exponent": 2}, "from 0 to 1"),
        ({"bits": 4, "words_per_width": [0, 0, 0, 0, 299, 0, 0, 0, 0]}, "11 numbers that add up to 300"),
    ],
)
def test_option_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        se.build("quantized", num_embeddings=WORDS, embedding_dim=COLUMNS, **options)


# Any table: more bits leave a smaller error, and no codec a larger one than rounding

ANY_WORDS, ANY_DIM = 60, 24
ANY_RATES = (0.25, 0.5, 1, 2, 3, 4, 5, 6, 7, 8)
# What 8 bits leave of normal numbers is 0.005; in a table of few numbers up to 0.009. Differences of less are
# those of codebooks and of paths, not of bits.
FINEST = 0.009


def normal(words: int = ANY_WORDS, dim: int = ANY_DIM) -> Tensor:
    return torch.randn(words, dim, generator=torch.Generator().manual_seed(words * dim))


def scaled(*parts: tuple[int, float]) -> Tensor:
    """A table whose first rows have other scales, each given with how many rows have it."""
    counts, scales = zip(*parts)
    rest = ANY_WORDS - sum(counts)
    return (
        normal()
        * torch.cat([torch.tensor(scales).repeat_interleave(torch.tensor(counts)), torch.ones(rest)])[:, None]
    )


def large_rows_alike() -> Tensor:
    table = normal()
    table[:6] = 100 * normal(1) * (1 + 0.01 * table[:6])
    return table


TABLES: dict[str, Callable[[], Tensor]] = {
    "a fifth zero": lambda: 0.05 * scaled((12, 0.0)),
    "most zero": lambda: scaled((50, 0.0)),
    "all zero": lambda: torch.zeros(ANY_WORDS, ANY_DIM),
    "tiny": lambda: 1e-30 * normal(),
    "zero, tiny and huge": lambda: scaled((15, 1e29), (15, 1e-30), (5, 0.0)),
    "large rows alike": large_rows_alike,
    "constant": lambda: torch.full((ANY_WORDS, ANY_DIM), 0.3),
    "one number": lambda: normal(1, 1),
    "two rows of 3": lambda: normal(2, 3),
    "three rows": lambda: normal(3),
    "two columns": lambda: normal(dim=2),
}


@pytest.mark.slow_except("a fifth zero-plain", "zero, tiny and huge-weighted", "two columns-plain")
@pytest.mark.parametrize(
    ("rates", "is_weighted"), [(ANY_RATES, False), (ANY_RATES[1::3], True)], ids=["plain", "weighted"]
)
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
def test_more_bits_are_better_and_rounding_is_not(
    table: Callable[[], Tensor], rates: tuple[float, ...], is_weighted: bool
) -> None:
    """Weights are a metric and the importance of words, as a calibration measures them."""
    rows, weights, costs = table(), torch.ones(1), torch.eye(1)
    known: dict[str, Tensor] = {}
    if is_weighted:
        states = normal(2 * rows.size(1), rows.size(1))
        costs, weights = states.t() @ states, normal(len(rows), 1)[:, 0].abs()
        known = {"metric": costs, "token_counts": 1e6 * weights.square()}

    def size(values: Tensor) -> float:
        return float((values.double() * weights.double().sqrt()[:, None]).norm())

    errors: dict[str, list[float]] = {}
    for codec in OF_ANY_RATE:
        for bits in rates:
            embedding = se.fit("quantized", rows, bits=bits, codec=codec, progress=False, **known)[0].eval()
            decoded = embedding.table().detach()
            assert bool(decoded.isfinite().all()), (codec, bits)
            missed = size(decoded.double() - rows.double()) / (size(rows) or 1.0)
            errors.setdefault(codec, []).append(missed)
        for place, (fewer, more) in enumerate(zip(errors[codec], errors[codec][1:])):
            # Other programs read rounded numbers of one rate, so words do not get bits by their norms.
            is_single = codecs()[codec].has_groups and rates[place + 1] >= 1 > rates[place]
            assert is_single or more <= 1.05 * fewer + FINEST, (codec, rates[place + 1], errors[codec])
    for codec, of_codec in errors.items():
        for bits, missed, rounded in zip(rates, of_codec, errors["uniform"]):
            # Rounding is exact where the numbers of a row are equal, or there is one: then no codec may leave
            # more than rounding leaves of normal numbers.
            assert missed <= max(1.1 * rounded, 1.5 * 2.0**-bits, FINEST), (codec, bits, missed, rounded)


@pytest.mark.slow_except("spectral-one direction", "uniform-two directions")
@pytest.mark.parametrize("metric", ["one direction", "one number", "two directions", "nearly one direction"])
@pytest.mark.parametrize("codec", OF_ANY_RATE)
def test_metrics_of_few_directions(codec: str, metric: str) -> None:
    """Their errors fall, and those of all directions, which were several times those of rows, hardly rise."""
    rows = normal(200)
    states = normal(1 + (metric == "two directions"))
    matrix = torch.diag(torch.eye(ANY_DIM)[0]) if metric == "one number" else states.t() @ states
    if metric == "nearly one direction":
        matrix += 1e-4 * torch.eye(ANY_DIM)
    for bits in (1.0, 2.0, 2.5, 4.0, 8.0):
        plain, cost = [], []
        for known in (None, matrix):
            embedding = se.fit("quantized", rows, bits=bits, codec=codec, metric=known, progress=False)[0]
            missed = (embedding.eval().table().detach() - rows).double()
            plain.append(float(missed.norm()))
            cost.append(float((missed @ matrix.double() * missed).sum().sqrt()))
        # The scale of a group serves the numbers that matter.
        most = 1.6 if codecs()[codec].has_groups else 1.3
        assert cost[1] <= 1.01 * cost[0] and plain[1] <= most * plain[0], (bits, plain, cost)
