"""Compositional code: worked by hand, by plain loops, by the sizes in print."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shared_embeddings as se

from .cases import CASES, Case
from .references import zero_row
from .support import assert_same_gradients, gradients

SIZES: dict[str, Any] = {"num_embeddings": 37, "embedding_dim": 24, "num_codebooks": 4, "codebook_size": 5}


def test_worked_example() -> None:
    """Sums of one of [1, 2] and [3, 4], and one of [10, 20] and [30, 40]."""
    emb = se.build("compositional_code", num_embeddings=3, embedding_dim=2, num_codebooks=2, codebook_size=2)
    with torch.no_grad():
        emb.codebooks.copy_(torch.tensor([[[1.0, 2], [3, 4]], [[10, 20], [30, 40]]]))
        emb.codes.copy_(torch.tensor([[0, 1], [1, 1], [1, 0]]))
    expected = [[31.0, 42], [33, 44], [13, 24]]
    assert emb.table().tolist() == expected
    assert emb(torch.tensor([[2, 0]])).tolist() == [[expected[2], expected[0]]]
    assert emb.logits(torch.tensor([2.0, -1])).tolist() == [20, 22, 2]
    assert emb.output_table().tolist() == expected


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.method == "compositional_code"], ids=lambda case: case.name
)
def test_equals_the_naive_sums_in_value_and_gradient(case: Case) -> None:
    emb = case.build()
    number = case.options["num_codebooks"]
    rows = [
        sum(emb.codebooks[book, int(emb.codes[word, book])] for book in range(number))
        for word in range(case.num_embeddings)
    ]
    expected = zero_row(torch.stack(rows), case.padding_idx)
    weight = torch.randn_like(expected)
    wanted = gradients(emb, (expected * weight).sum())
    for table in (emb.table(), emb.output_table()):
        torch.testing.assert_close(table, expected)
        assert_same_gradients(gradients(emb, (table * weight).sum()), wanted)


def test_sizes_of_the_papers_coding() -> None:
    """DeFINE's table 5 takes 32 x 16 codes: 32 * 16 * 512 numbers, and 32 codes of 4 bits for each word."""
    options = se.options("compositional_code")()
    assert (options.num_codebooks, options.codebook_size) == (32, 16)
    sizes = {"num_embeddings": 1000, "embedding_dim": 512}
    assert se.num_parameters("compositional_code", **sizes) == 262_144
    emb = se.build("compositional_code", **sizes)
    assert emb.counts()["stored_bits"] == 262_144 * 16 + 1000 * 32 * 4  # numbers in 16 bits
    assert emb.index_entries(1000, 512, options) == 32_000
    assert [name for name, _ in emb.named_parameters()] == ["codebooks"]


def test_codes_come_from_their_own_seed() -> None:
    first, second = se.build("compositional_code", **SIZES), se.build("compositional_code", **SIZES)
    assert torch.equal(first.codes, second.codes) and not torch.equal(first.codebooks, second.codebooks)
    other = se.build("compositional_code", **SIZES, seed=1)
    assert not torch.equal(first.codes, other.codes)
    other.load_state_dict(first.state_dict())
    assert torch.equal(first.table(), other.table())


@pytest.mark.parametrize("name", ["compositional-code", "compositional-code-table"])
def test_codes_get_no_gradient(name: str) -> None:
    emb = next(case for case in CASES if case.name == name).build()
    codes, basis = emb.output_factors()
    assert codes.requires_grad is (basis is None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_codebooks": 0}, "num_codebooks"),
        ({"codebook_size": 0}, "codebook_size"),
        ({"codebook_size": "16"}, "codebook_size"),
        ({"seed": -1}, "seed"),
        ({"codebooks": 9}, "codebooks.*num_codebooks"),
    ],
    ids=str,
)
def test_bad_options_are_named(changes: dict[str, Any], named: str) -> None:
    for call in (se.build, se.num_parameters):
        with pytest.raises(se.OptionError, match=named) as error:
            call("compositional_code", **{**SIZES, **changes})
        assert "\n" not in str(error.value)
