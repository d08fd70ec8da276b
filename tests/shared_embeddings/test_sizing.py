"""Parameter counts and breakdowns of embeddings, and options within a budget."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
import yaml

import shared_embeddings as se
from shared_embeddings import accounting
from shared_embeddings.cli.catalog import storage_breakdown
from shared_embeddings.compress import sizing
from tests.shared_embeddings.cases import Case
from tests.shared_embeddings.support import each_case


def by_name(embedding: se.SharedEmbedding) -> dict[str, tuple[str, tuple[int, ...], int, list[int]]]:
    """Name -> kind, shape, count and bytes in fp32, fp16 and int8."""
    return {
        part.name: (part.kind, part.shape, part.count, [part.bytes[t] for t in ("fp32", "fp16", "int8")])
        for part in storage_breakdown(embedding)
    }


def test_low_rank_by_hand() -> None:
    """In int8, a row has a scale of 16 bits; tensors with fewer than 256 values stay as they are."""
    embedding = se.build("projective", num_embeddings=200, embedding_dim=60, rank=4)
    assert by_name(embedding) == {
        "codes": ("parameter", (200, 4), 800, [3200, 1600, 800 + 400]),
        "basis": ("parameter", (4, 60), 240, [960, 960, 960]),
        "total": ("sum", (), 1040, [4160, 2560, 2160]),
        "plain table": ("sum", (), 12_000, [48_000, 24_000, 12_000 + 400]),
    }
    assert [part.compression for part in storage_breakdown(embedding)] == [None, None, 48_000 / 4160, 1.0]


ALONE = {"num_embeddings": 10, "embedding_dim": 6, "hidden_dim": 30, "base_dim": 20}


def test_real_codebooks_shrink_and_codes_do_not() -> None:
    """30 codes of 3 bits (c = 5) take 90 bits, 12 bytes; codebooks 3 x 5 x 20 are real numbers."""
    parts = by_name(se.build("alone", **ALONE, codebooks=3, codebook_size=5))
    assert parts["codes"] == ("buffer", (10, 3), 30, [12, 12, 12])
    assert parts["codebooks"] == ("buffer", (3, 5, 20), 300, [1200, 600, 300 + 2 * 15])
    assert parts["base"] == ("parameter", (20,), 20, [80, 80, 80])
    # 30 x 20 weights are packed, 6 x 30 are too few.
    trained = 20 + 30 * (20 + 6)
    assert parts["total"][2:4] == (
        trained,
        [12 + 4 * (300 + trained), 12 + 600 + 80 + 1200 + 720, 12 + 330 + 80 + 660 + 720],
    )


def test_binary_codebooks_take_a_bit_each() -> None:
    parts = by_name(
        se.build("alone", **ALONE, codebooks=3, codebook_size=5, filter="binary", train_base=False)
    )
    assert parts["codebooks"] == ("buffer", (3, 5, 20), 300, [38, 38, 38])
    assert parts["base"] == ("buffer", (20,), 20, [80, 80, 80])


@each_case
def test_everything_is_counted_once(case: Case) -> None:
    emb = case.build()
    *parts, total, dense = storage_breakdown(emb)
    names = [part.name for part in parts]
    assert len(names) == len(set(names))
    assert set(names) == set(emb.state_dict())
    assert total.count == emb.counts()["total"] == sum(p.count for p in parts if p.kind == "parameter")
    assert dense.count == case.num_embeddings * case.embedding_dim
    # Each buffer is rounded up to whole bytes.
    stored = accounting.stored_bits(emb, "fp32")
    assert 0 <= total.bytes["fp32"] - math.ceil(stored / 8) <= len(parts)
    assert total.bytes["int8"] <= total.bytes["fp16"] <= total.bytes["fp32"]


def test_a_tensor_with_two_names_counts_once() -> None:
    emb = se.build("standard", num_embeddings=100, embedding_dim=4)
    emb.twin = emb.weight
    emb.register_buffer("marks", torch.zeros(4, dtype=torch.int16))
    emb.register_buffer("same_marks", emb.marks)
    emb.register_buffer("passing", torch.zeros(9), persistent=False)
    parts = by_name(emb)
    assert list(parts) == ["weight", "marks", "total", "plain table"]
    assert parts["total"][2:] == (400, [1600 + 8, 800 + 8, 400 + 200 + 8])


def test_no_weights_are_needed() -> None:
    with torch.device("meta"):
        emb = se.build("funnel", num_embeddings=10**9, embedding_dim=512, rank=64)
    assert by_name(emb)["codes"][2] == 64 * 10**9


VOCABULARY, DIMENSION = 3000, 64

each_method = pytest.mark.parametrize("method", se.methods())


def count(method: str, options: dict[str, Any], v: int = VOCABULARY, d: int = DIMENSION) -> int:
    """The size that is compared with the budget."""
    return se.get_method_config(method).resolve(v, d, options).search_size(v, d)


def suggestion(method: str, budget: int, v: int = VOCABULARY, d: int = DIMENSION) -> sizing.Suggestion:
    """The suggestion for one method."""
    return next(candidate for candidate in sizing.suggest(v, d, budget) if candidate.method == method)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2M", 2_000_000),
        ("0.5M", 500_000),
        ("500k", 500_000),
        ("1.5e6", 1_500_000),
        (" 123456 ", 123_456),
        ("1", 1),
    ],
)
def test_budgets_are_read(text: str, expected: int) -> None:
    suggestions = json.loads(sizing.describe_suggestions(3000, 64, text, as_json=True))
    assert suggestions["budget"] == expected


@pytest.mark.parametrize(
    ("text", "limit"), [("8x", 8000), ("1.6x", 40_000), ("500B", 500), ("2kB", 2000), ("0.5 MB", 500_000)]
)
def test_sizes_are_factors_or_bytes(text: str, limit: int) -> None:
    table = torch.zeros(1000, 16)
    assert sizing.parse_size(text).limit(table, [table]) == limit


@pytest.mark.parametrize("text", ["", "8", "1x", "0.5x", "-2x", "8 MiB", "x", "nanMB"])
def test_invalid_sizes_fail(text: str) -> None:
    with pytest.raises(ValueError, match="size is '"):
        sizing.parse_size(text)


@pytest.mark.parametrize("text", ["", "-2M", "2MB", "0.2", "1e300", "nan"])
def test_invalid_budgets_fail(text: str) -> None:
    with pytest.raises(ValueError, match="budget"):
        sizing.describe_suggestions(3000, 64, text)


@pytest.mark.parametrize("budget", [4_000, 12_345, 50_000, 191_999])
@each_method
def test_suggestions_build_within_budget_and_the_next_step_does_not(method: str, budget: int) -> None:
    suggested = suggestion(method, budget)
    grids = list(se.get_method_config(method).presets(VOCABULARY, DIMENSION).grids)
    if suggested.options is None:
        # The smallest size of the method exceeds the budget, on every grid.
        assert suggested.parameters == min(count(method, grid.options_at(0)) for grid in grids) > budget
        assert f"{suggested.parameters:,}" in suggested.remark
        return
    with torch.device("meta"):
        built = se.build(method, num_embeddings=VOCABULARY, embedding_dim=DIMENSION, **suggested.options)
    codes = sum(
        bits for name, _, bits in se.accounting.stored_buffers(built) if name.startswith(("codes", "streams"))
    )
    is_counted = method in ("quantized", "structured")
    parameters = built.counts()["total"] + (-(-codes // 32) if is_counted else 0)
    assert parameters == suggested.parameters <= budget
    grid = next(grid for grid in grids if count(method, grid.options_at(0)) <= budget)
    step = max(step for step in range(grid.steps) if grid.options_at(step) == suggested.options)
    assert step + 1 == grid.steps or count(method, grid.options_at(step + 1)) > budget


@each_method
@pytest.mark.parametrize(("v", "d"), [(200, 32), (97, 30)])
def test_grids_ascend(method: str, v: int, d: int) -> None:
    for grid in se.get_method_config(method).presets(v, d).grids:
        counts = [count(method, grid.options_at(step), v, d) for step in range(grid.steps)]
        assert counts == sorted(counts) and len(counts) >= 1


@pytest.mark.parametrize(("budget", "rank"), [(30_640, 10), (30_639, 9), (3_064, 1), (192_000, 62)])
@pytest.mark.parametrize("method", ["projective", "funnel"])
def test_ranks_by_hand(method: str, budget: int, rank: int) -> None:
    """R (3000 + 64)."""
    assert suggestion(method, budget).options == {"rank": rank}


def test_grids_by_hand() -> None:
    """R (3000 + 64); 64 + H * 128; the last of three bands has 4 dimensions per word, with factor 8 one."""
    suggested = suggestion("funnel", 3_063)
    assert suggested.options is None and suggested.parameters == 3_064
    assert suggestion("projective", 10**9).options == {"rank": DIMENSION}
    assert suggestion("alone", 64 + 128 * 20).options == {"hidden_dim": 20}
    assert suggestion("alone", 64 + 128 * 20 - 1).options == {"hidden_dim": 19}
    assert suggestion("adaptive", 20_000).options["factor"] == 4
    assert suggestion("adaptive", 6_000).options["factor"] == 8


@pytest.mark.parametrize(("v", "d"), [(1, 1), (2, 1), (3, 7), (16, 16)])
def test_tiny_sizes_work(v: int, d: int) -> None:
    for suggested in sizing.suggest(v, d, v * d):
        if suggested.options is not None:
            assert count(suggested.method, suggested.options, v, d) <= v * d


@pytest.mark.parametrize(("v", "d", "named"), [(0, 4, "num_"), (10**30, 4, "num_"), (4, -1, "embedding_dim")])
def test_impossible_sizes(v: int, d: int, named: str) -> None:
    with pytest.raises(se.OptionError, match=named):
        sizing.describe_suggestions(v, d, "10")


def test_every_line_can_be_pasted() -> None:
    text = sizing.describe_suggestions(VOCABULARY, DIMENSION, "50k")
    pasted = [yaml.safe_load(line) for line in text.splitlines() if line.startswith("embedding:")]
    rows = [row for row in sizing.suggest(VOCABULARY, DIMENSION, 50_000) if row.options is not None]
    assert [entry["embedding"] for entry in pasted] == [{"method": row.method, **row.options} for row in rows]
    assert len(pasted) >= 4
    for entry in pasted:
        with torch.device("meta"):
            se.build(num_embeddings=VOCABULARY, embedding_dim=DIMENSION, **entry["embedding"])
    assert yaml.safe_load(text) is not None


def test_a_budget_above_the_table_needs_nothing() -> None:
    text = sizing.describe_suggestions(VOCABULARY, DIMENSION, "192k")
    assert text.startswith("Nothing is needed") and "192,000" in text
    assert "embedding:" not in text
    assert "embedding:" in sizing.describe_suggestions(VOCABULARY, DIMENSION, "191999")


def test_json() -> None:
    report = json.loads(sizing.describe_suggestions(VOCABULARY, DIMENSION, "30640", as_json=True))
    assert (report["budget"], report["dense"]) == (30_640, 192_000)
    methods = {entry["method"]: entry for entry in report["suggestions"]}
    assert sorted(methods) == se.methods()
    assert methods["funnel"]["parameters"] == 10 * (3000 + 64)
    assert methods["funnel"]["options"] == {"rank": 10} and methods["funnel"]["compression"] == 6.27
    assert methods["standard"]["options"] is None and methods["standard"]["compression"] is None


@pytest.mark.parametrize("number", [1, 2, 7, 37, 1000, 32_000, 37_000, 40_724, 267_735])
def test_factors_are_similar_and_waste_little(number: int) -> None:
    factors = se.TensorTrainOptions.presets(number, 8).examples[""]["vocab_shape"]
    assert factors == sorted(factors)
    assert number <= math.prod(factors) <= max(1.005 * number, number + 3)
    assert factors[2] <= 3 * factors[0] or number < 40


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (512, (8, 8, 8)),
        (2**31 - 1, (1, 1, 2**31 - 1)),
        (400, (5, 8, 10)),
        (1, (1, 1, 1)),
    ],
)
def test_factors_of_a_dimension(number: int, expected: tuple[int, int, int]) -> None:
    assert tuple(se.TensorTrainOptions.presets(8, number).examples[""]["dim_shape"]) == expected
