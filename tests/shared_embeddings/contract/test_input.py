"""The contract: what an embedding is, and its input side."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import shared_embeddings as se
from tests.helpers import in_turn
from tests.shared_embeddings.cases import CASES, VOCABULARY, Case
from tests.shared_embeddings.contract.checks import all_ids, each_case
from tests.shared_embeddings.support import assert_same_gradients, gradients

# The registry


def test_names_of_rows_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("method", sorted({case.method for case in CASES}))
def test_options_are_a_documented_dataclass(method: str) -> None:
    options = se.options(method)
    assert dataclasses.is_dataclass(options)
    assert options.__doc__
    assert all(field.metadata["description"].endswith((".", "?")) for field in dataclasses.fields(options))


@each_case
def test_describes_itself(case: Case) -> None:
    emb = case.build()
    assert isinstance(emb, se.SharedEmbedding) and isinstance(emb, nn.Module)
    assert emb.method == case.method
    assert emb.num_embeddings == case.num_embeddings
    assert emb.embedding_dim == case.embedding_dim
    assert emb.padding_idx == case.padding_idx
    assert emb.score_dim == case.score_dim
    assert emb.has_output is case.output
    assert isinstance(emb.options, se.options(case.method))
    for name, value in case.options.items():
        stored = getattr(emb.options, name)
        assert (list(stored) if isinstance(value, list) else stored) == value
    with pytest.raises(dataclasses.FrozenInstanceError):
        emb.options.anything = 1


# The input side


@each_case
def test_table_has_one_row_per_word(case: Case) -> None:
    table = case.build().table()
    assert table.shape == (case.num_embeddings, case.embedding_dim)
    assert table.dtype == torch.float32
    assert table.isfinite().all()
    kept = table[torch.arange(len(table)) != case.padding_idx]
    assert torch.unique(kept, dim=0).shape[0] > len(kept) / 2


@each_case
@in_turn("training", [True, False])
def test_lookup_is_a_row_of_the_table(case: Case, training: bool) -> None:
    emb = case.build().train(training)
    ids = torch.randint(case.num_embeddings, (4, 9))
    torch.testing.assert_close(emb(ids), emb.table()[ids], rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(emb(ids), emb.table()[ids], rtol=1e-4, atol=1e-6)


@each_case
def test_lookup_has_the_gradients_of_a_row_of_the_table(case: Case) -> None:
    emb = case.build()
    ids = torch.randint(case.num_embeddings, (4, 9))
    weight = torch.randn(4, 9, case.embedding_dim)
    actual = gradients(emb, (emb(ids) * weight).sum())
    assert_same_gradients(actual, gradients(emb, (emb.table()[ids] * weight).sum()))


@each_case
@in_turn("shape", [(), (1,), (1, 1), (2, 3, 4), (0,), (2, 0)])
def test_lookup_takes_ids_of_any_shape(case: Case, shape: tuple[int, ...]) -> None:
    emb = case.build()
    ids = torch.randint(case.num_embeddings, shape)
    found = emb(ids)
    assert found.shape == (*shape, case.embedding_dim)
    torch.testing.assert_close(found, emb.table()[ids], rtol=1e-4, atol=1e-6)
    found.sum().backward()
    with torch.no_grad():
        assert emb.eval()(ids).shape == (*shape, case.embedding_dim)


@each_case
def test_lookup_takes_ids_in_strange_memory(case: Case) -> None:
    emb = case.build()
    ids = torch.randint(case.num_embeddings, (5, 4, 3)).transpose(0, 2)[:, ::2]
    torch.testing.assert_close(emb(ids), emb.table()[ids], rtol=1e-4, atol=1e-6)


@each_case
def test_lookup_takes_short_integers(case: Case) -> None:
    emb = case.build()
    ids = torch.randint(case.num_embeddings, (3, 4))
    assert torch.equal(emb(ids.int()), emb(ids))


@each_case
@in_turn("wrong", [VOCABULARY, -1])
def test_an_id_that_is_no_word_is_an_error(case: Case, wrong: int) -> None:
    emb = case.build()
    for training in (True, False):
        emb.train(training)
        with pytest.raises(IndexError):
            emb(torch.tensor([1, wrong]))
        with pytest.raises(IndexError), torch.no_grad():
            emb(torch.tensor([1, wrong]))


@each_case
@in_turn("kind", [torch.float32, torch.bool, torch.uint8])
def test_ids_of_another_type_are_refused(case: Case, kind: torch.dtype) -> None:
    emb = case.build()
    with pytest.raises(TypeError, match=r"ids are of type torch\.\w+"):
        emb(torch.ones(2).to(kind))


@each_case
def test_changing_a_result_changes_nothing_else(case: Case) -> None:
    emb = case.build().eval()
    ids = all_ids(case)
    with torch.no_grad():
        before = emb(ids).clone()
        emb(ids).zero_()
        assert torch.equal(emb(ids), before)


@each_case
def test_table_entries_have_the_common_spread(case: Case) -> None:
    stds = []
    for seed in range(4):
        table = case.build(seed).table().detach()
        stds.append(table[torch.arange(len(table)) != case.padding_idx].std().item())
    expected = case.embedding_dim**-0.5
    assert expected / 2 < sum(stds) / len(stds) < expected * 2
