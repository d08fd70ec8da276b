"""Leaving words out of an embedding: the words that stay keep their vectors and their scores."""

from __future__ import annotations

import pytest
import torch

import shared_embeddings as se
from tests.shared_embeddings.cases import CASES, PADDING, Case, by_name
from tests.shared_embeddings.contract.checks import each_of

# Of 37 words: the padding word, and some of every band, group and class.
KEPT = torch.tensor([0, PADDING, 4, 8, 9, 10, 19, 20, 21, 29, 30, 35, 36])
SELECTABLE = [case for case in CASES if case.method != "tensor_train"]
BANDS = tuple(
    case.name
    for case in CASES
    if case.name.startswith(("adaptive-padding-in-a-tail", "adaptive-tails-of-one-word"))
)


@each_of([case for case in SELECTABLE if case.name not in BANDS])
def test_kept_words_keep_their_vectors_and_scores(case: Case) -> None:
    old = case.build().eval()
    before = {name: tensor.clone() for name, tensor in old.state_dict().items()}
    with torch.no_grad():
        new = old.select_rows(KEPT)
        assert new.num_embeddings == len(KEPT) and not new.training
        assert new.padding_idx == (None if case.padding_idx is None else 1)
        torch.testing.assert_close(new.table(), old.table()[KEPT], rtol=0, atol=1e-6)
        if case.output and not case.adaptive:
            hidden = case.hidden(5).detach()
            torch.testing.assert_close(new.logits(hidden), old.logits(hidden)[:, KEPT], rtol=0, atol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in old.state_dict().items())
    again = se.build(
        new.method,
        num_embeddings=len(KEPT),
        embedding_dim=case.embedding_dim,
        padding_idx=new.padding_idx,
        **new.stored_options(),
    )
    again.load_state_dict(new.state_dict())
    assert torch.equal(again.eval().table(), new.table())
    assert sum(p.numel() for p in new.parameters()) <= sum(p.numel() for p in old.parameters())


@pytest.mark.parametrize("bias", [False, True])
def test_a_band_keeps_its_share_of_the_probability(bias: bool) -> None:
    case = by_name("adaptive-no-padding")
    old = case.build(options={**case.options, "output_bias": bias}, bias="bias" if bias else None).eval()
    kept = torch.tensor([*range(9), 12, 15, 20, 31, 36])
    hidden = torch.randn(6, old.score_dim)
    with torch.no_grad():
        new, before = old.select_rows(kept), old.log_prob(hidden)
        assert new.options.cutoffs == (9, 11)
        expected = before[:, kept].clone()
        for band, words in ((slice(9, 11), slice(9, 20)), (slice(11, 14), slice(20, 37))):
            all_of_it = before[:, words].logsumexp(dim=1, keepdim=True)
            of_kept = expected[:, band].logsumexp(dim=1, keepdim=True)
            expected[:, band] += all_of_it - of_kept
        torch.testing.assert_close(new.log_prob(hidden), expected, rtol=0, atol=1e-5)


def test_padding_that_is_left_out_is_gone() -> None:
    assert by_name("projective").build().select_rows(torch.tensor([0, 1, 7])).padding_idx is None


def test_type_and_mode_stay() -> None:
    old = by_name("funnel").build().to(torch.bfloat16)
    new = old.select_rows(KEPT)
    assert new.training and new.codes.dtype == torch.bfloat16


@pytest.mark.parametrize("ids", [[], [3, 3], [5, 2], [-1, 4], [0, 37]], ids=str)
def test_ids_that_are_no_choice_of_words(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="must be an ascending list|the embedding has words 0 to 36"):
        by_name("standard").build().select_rows(torch.tensor(ids))


@pytest.mark.parametrize("name", ["tensor-train", "tensor-train-two-cores"])
def test_methods_without_rows_say_what_to_do(name: str) -> None:
    with pytest.raises(ValueError, match="trim the plain model first, then compress it"):
        by_name(name).build().select_rows(KEPT)


def test_a_band_needs_a_word() -> None:
    with pytest.raises(ValueError, match="no word of band 1 of this adaptive embedding, words 9 and on"):
        by_name("adaptive").build().select_rows(torch.tensor([0, 3, 25]))


def test_centroids_and_classes_without_words_go() -> None:
    few = torch.tensor([2, 3, 11])
    structured = by_name("structured").build().select_rows(few)
    assert structured.options.num_clusters <= 3
    uncle = by_name("uncle-sub-classes").build().select_rows(few)
    assert max(uncle.num_classes) <= 3
