"""Tests of rounding with feedback, and of the calibration that says what errors count."""

from __future__ import annotations

import importlib.util
import resource
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shared_embeddings as se
import shared_embeddings.modules.quantized  # noqa: F401  # registers the codecs
from shared_embeddings.compress import session
from shared_embeddings.compress.calibration import Calibration, calibrate, write_calibration
from shared_embeddings.compress.measure import Batch, Samples
from shared_embeddings.quant import kernels, metric
from shared_embeddings.quant.codec import codecs
from shared_embeddings.quant.metric import Metric
from shared_embeddings.utils.errors import UserError
from shared_embeddings.words import general

WORDS, DIM = 256, 96
CODECS = sorted(codecs())


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def uneven_metric(dim: int) -> Tensor:
    """A metric in which a few directions count much more than the others."""
    factor = drawn(dim, dim) * torch.logspace(0, -2, dim)
    return factor @ factor.t()


def weighted_error(actual: Tensor, wanted: Tensor, matrix: Tensor) -> float:
    missed = actual - wanted
    return float(((missed @ matrix) * missed).sum() / ((wanted @ matrix) * wanted).sum())


def test_the_second_number_makes_up_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.4 becomes 0; the best second number is then 0.4 + 0.4 * 1 / 1 = 0.8, which becomes 1."""
    monkeypatch.setattr(metric, "RIDGE", 0.0)
    measure = Metric(torch.tensor([[2.0, 1.0], [1.0, 1.0]]))
    rounded = measure.round(torch.tensor([[0.4, 0.4]]), [1, 2], lambda left, _: left[:, :1].round())
    assert rounded.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("width", [1, 8, 40])
def test_rounding_equals_that_number_by_number(width: int) -> None:
    """The reference solves for the best numbers that are left, after every run."""
    dim, rows, matrix = 72, drawn(5, 72), uneven_metric(72)
    ends = [*range(width, dim, width), dim]
    rounded = Metric(matrix).round(rows, ends, lambda left, _: left[:, :width].round())
    full = matrix.double() + metric.RIDGE * matrix.double().diagonal().mean() * torch.eye(dim)
    wanted, first = rows.double().clone(), 0
    for last in ends:
        block, rest = slice(first, last), slice(last, dim)
        wanted[:, block] = wanted[:, block].round()
        missed = rows[:, :last] - wanted[:, :last]
        best = torch.linalg.solve(full[rest, rest], full[rest, :last] @ missed.t())
        wanted[:, rest] = rows[:, rest] + best.t()
        first = last
    assert (rounded == wanted).float().mean() > 0.98  # a number may be halfway between two


@pytest.mark.parametrize("codec", [name for name in CODECS if name != "iq4_nl"])
@pytest.mark.parametrize("bits", [2.0, 2.5, 4.0])
def test_feedback_lowers_the_weighted_error_at_equal_bytes(codec: str, bits: float) -> None:
    table, matrix = drawn(WORDS, DIM), uneven_metric(DIM)
    plain, calibrated = (
        se.fit("quantized", table, bits=bits, codec=codec, metric=measure, progress=False)[0]
        for measure in (None, matrix)
    )
    errors = [weighted_error(emb.table().detach(), table, matrix) for emb in (plain, calibrated)]
    assert errors[1] < 0.75 * errors[0]
    assert calibrated.counts()["stored_bits"] == plain.counts()["stored_bits"]


@pytest.mark.parametrize("codec", ["trellis", "spectral"])
def test_feedback_without_compiled_loops(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, matrix, errors = drawn(200, 64), uneven_metric(64), []
    for is_usable in (True, False):
        monkeypatch.setattr(kernels, "usable", lambda *_, use=is_usable: use)
        embedding, _ = se.fit("quantized", table, bits=2.0, codec=codec, metric=matrix, progress=False)
        errors.append(weighted_error(embedding.table().detach(), table, matrix))
    assert errors[0] == pytest.approx(errors[1], rel=0.02)


@pytest.mark.parametrize("codec", sorted(codecs()))
def test_some_words_are_encoded_as_in_the_whole_table(codec: str) -> None:
    table, counts, ids = drawn(WORDS, DIM), torch.arange(WORDS) % 50, torch.arange(3, WORDS, 7)
    options = {"bits": 2.5, "codec": codec, "token_counts": counts, "metric": uneven_metric(DIM)}
    whole, _ = se.fit("quantized", table, **options, progress=False)
    part, report = se.fit("quantized", table, **options, only=ids, progress=False)
    torch.testing.assert_close(part(ids), whole(ids))
    assert part.counts() == whole.counts() and part.stored_options() == whole.stored_options()
    missed, norm = (part(ids) - table[ids]).norm(), table[ids].norm()
    assert report.relative_error == pytest.approx(float(missed / norm), rel=1e-4)


@pytest.mark.parametrize("size", [DIM - 1, DIM + 1])
def test_a_metric_of_another_size(size: int) -> None:
    with pytest.raises(UserError, match=rf"\({size}, {size}\).*\({DIM}, {DIM}\)"):
        se.fit("quantized", drawn(8, DIM), bits=4.0, metric=torch.eye(size), progress=False)


class Linear:
    """A model whose scores are a matrix times the vector of a word, which is also what it scores."""

    def __init__(self, number: int) -> None:
        self.table, self.matrix, self.number = nn.Embedding(20, 6), drawn(20, 6), number
        self.is_scored = True

    def tables(self) -> list[Any]:
        table = self.table.weight
        words = [str(number) for number in range(len(table))]
        return [types.SimpleNamespace(name="words", table=table, words=words, is_scored=self.is_scored)]

    def samples(self, texts: object, seed: int, tokens: int) -> Samples:
        ids = torch.randint(20, (self.number,), generator=torch.Generator().manual_seed(seed))

        def predict(batch: Tensor) -> Batch:
            vectors = self.table(batch)
            return Batch(vectors @ self.matrix.t(), vectors)

        lookups = {"words": {self.table: 0.5}}
        return Samples("ids", ids.split(500) if self.number else [], predict, lookups=lookups)


def test_calibration_worked_out_for_a_linear_model() -> None:
    """The Fisher information is exact here: U' (diag p - p p') U, and the factor of look-ups is squared."""
    model = Linear(60_000)
    fisher, of_words = calibrate(model, model.tables(), None, 3, progress=False)["words"]  # type: ignore[arg-type]
    ids = torch.randint(20, (model.number,), generator=torch.Generator().manual_seed(3))
    vectors = model.table.weight.detach()[ids]
    shares = (vectors @ model.matrix.t()).softmax(dim=1)
    doubts = 1 - shares.square().sum(dim=1, keepdim=True)
    mean = shares @ model.matrix
    second = torch.einsum("nv,vd,ve->de", shares, model.matrix, model.matrix) - mean.t() @ mean
    output = (vectors * doubts).t() @ vectors / model.number
    torch.testing.assert_close(fisher, output + 0.25 * second / model.number, rtol=0.03, atol=0.02)
    torch.testing.assert_close(of_words, (shares * (1 - shares)).mean(dim=0))
    assert not model.table._forward_hooks


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    path, model, limits = tmp_path / "calibration", Linear(10), resource.getrlimit(resource.RLIMIT_FSIZE)
    measured = {"words": Calibration(torch.eye(6), torch.ones(20))}
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            write_calibration(path, model.tables(), measured)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.filename == str(path) and not list(tmp_path.iterdir())


def test_tables_that_nothing_reads_have_no_metric() -> None:
    model = Linear(0)
    assert calibrate(model, model.tables(), None, 3, progress=False) == {}  # type: ignore[arg-type]


def test_words_are_drawn_as_often_as_they_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in ten is "b": place 100 of a list has what is used a tenth as often as place 0."""
    monkeypatch.setattr("wordfreq.get_frequency_list", lambda *_: [["a"], *[[] for _ in range(99)], ["b"]])
    texts = []
    for seed in (1, 1, 2):
        general.write_words(tmp_path / "text", "en", 111, seed)
        texts.append((tmp_path / "text").read_text())
    counts = Counter(word.lower() for word in texts[0].replace(".", " ").split())
    assert counts["a"] + counts["b"] == 111 and counts["b"] in (10, 11)
    assert texts[0] == texts[1] != texts[2]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert general.languages() == []


def test_importance_is_worked_out_from_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text 0.1, predictions 0.4 and code 0.15 of 0.65: tokens have 0.1 / 0.65 of the text and so on."""
    known = object.__new__(session.Session)
    usage = {"text": torch.tensor([1.0, 0.0, 0.0]), "code": torch.tensor([0.0, 0.5, 0.5])}
    vars(known)["usage"] = {"words": usage}
    table: Any = types.SimpleNamespace(name="words")
    counts = known.counts_of(table, torch.tensor([0.0, 0.0, 7.0]))
    assert counts is not None
    wanted = torch.tensor([0.1, 0.075, 0.475], dtype=torch.float64) / 0.65
    torch.testing.assert_close(counts / counts.sum(), wanted)
