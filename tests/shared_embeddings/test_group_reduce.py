"""GroupReduce and GroupFunneling: by hand, by plain loops, and with published sizes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shared_embeddings as se
from shared_embeddings.loss import linear_cross_entropy
from shared_embeddings.methods import group_reduce as group_reduction

from .cases import CASES, Case
from .references import with_bias, zero_row
from .support import assert_same_gradients, gradients

SIZES: dict[str, Any] = {"num_embeddings": 37, "embedding_dim": 24}
ACTIVATIONS = {None: lambda codes: codes, "relu": torch.relu, "gelu": F.gelu, "tanh": torch.tanh}


def build(**options: Any) -> se.SharedEmbedding:
    """37 words in 24 dimensions."""
    return se.build("group_reduce", **{**SIZES, **options})


def naive_table(emb: se.SharedEmbedding, activation: str | None, padding_idx: int | None) -> Tensor:
    """Word by word: each takes the next row of its group's codes."""
    used = [0] * len(emb.codes)
    rows = []
    for group in emb.groups.tolist():
        rows.append(ACTIVATIONS[activation](emb.codes[group][used[group]]) @ emb.bases[group])
        used[group] += 1
    return zero_row(torch.stack(rows), padding_idx)


def shuffled(emb: se.SharedEmbedding, seed: int = 0) -> se.SharedEmbedding:
    """The embedding with words in other groups of the same sizes."""
    state = emb.state_dict()
    order = torch.randperm(len(state["groups"]), generator=torch.Generator().manual_seed(seed))
    emb.load_state_dict(state | {"groups": state["groups"][order]})
    return emb


def small_groups(**options: Any) -> se.SharedEmbedding:
    """Words 0 and 3 in group 1, of rank two; 1 and 2 in group 0, of rank one."""
    emb = se.build(
        "group_reduce", num_embeddings=4, embedding_dim=3, group_sizes=[2, 2], ranks=[1, 2], **options
    )
    with torch.no_grad():
        emb.groups.copy_(torch.tensor([1, 0, 0, 1]))
        emb.codes[0].copy_(torch.tensor([[2.0], [-3]]))
        emb.bases[0].copy_(torch.tensor([[1.0, 10, 100]]))
        emb.codes[1].copy_(torch.tensor([[1.0, 2], [-3, 4]]))
        emb.bases[1].copy_(torch.tensor([[1.0, 0, 2], [0, 1, -1]]))
    return emb


def test_worked_example() -> None:
    emb = small_groups()
    expected = [[1.0, 2, 0], [2, 20, 200], [-3, -30, -300], [-3, 4, -10]]
    assert emb.table().tolist() == expected
    assert emb(torch.tensor([[3, 1], [0, 3]])).tolist() == [
        [expected[3], expected[1]],
        [expected[0], expected[3]],
    ]
    assert emb.logits(torch.tensor([1.0, 1, 0])).tolist() == [3, 22, -33, 1]
    _, prediction = emb.cross_entropy_and_predictions(torch.tensor([[-1.0, 0, 0]]), torch.tensor([0]))
    assert prediction.item() in (2, 3)
    _, prediction = emb.cross_entropy_and_predictions(torch.tensor([[1.0, 1, 0]]), torch.tensor([0]))
    assert prediction.item() == 1


def test_a_minimum_rank_above_half_of_the_dimension_is_kept() -> None:
    """The factors of 35 words in 8 dimensions are smaller than their table up to a rank of 6."""
    emb = se.build("group_reduce", num_embeddings=40, embedding_dim=8, num_groups=2, min_rank=6)
    assert (emb.layout.sizes, emb.layout.ranks) == ((5, 35), (4, 6))
    found = group_reduction.group_reduce(torch.randn(200, 8), 1.0 / torch.arange(1.0, 201.0), 2, 6)
    assert len(found.bases[-1]) == 6


def test_group_funneling_worked_example() -> None:
    """With a ReLU, -3 counts as 0 in both groups."""
    emb = small_groups(activation="relu", padding_idx=1)
    assert emb.table().tolist() == [[1.0, 2, 0], [0, 0, 0], [0, 0, 0], [0, 4, -4]]
    assert emb.logits(torch.tensor([1.0, 1, 0])).tolist() == [3, 0, 0, 4]


GROUP_CASES = [case for case in CASES if case.method == "group_reduce"]


@pytest.mark.parametrize("case", GROUP_CASES, ids=str)
@pytest.mark.parametrize("by_frequency", [True, False])
def test_equals_the_naive_products_in_value_and_gradient(case: Case, by_frequency: bool) -> None:
    emb = case.build() if by_frequency else shuffled(case.build())
    expected = naive_table(emb, case.options.get("activation"), case.padding_idx)
    weight = torch.randn_like(expected)
    wanted = gradients(emb, (expected * weight).sum())
    ids = torch.arange(case.num_embeddings).flip(0)
    torch.testing.assert_close(emb.table(), expected)
    torch.testing.assert_close(emb.output_table(), expected)
    torch.testing.assert_close(emb(ids), expected[ids])
    assert_same_gradients(gradients(emb, (emb.table() * weight).sum()), wanted)
    assert_same_gradients(gradients(emb, (emb(ids) * weight[ids]).sum()), wanted)
    # A repeated word, and groups without words.
    ids = torch.tensor([5, 1, 5, 5])
    torch.testing.assert_close(emb(ids), expected[ids])


@pytest.mark.parametrize("case", GROUP_CASES, ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_of_shuffled_groups_equals_the_dense_one(case: Case, smoothing: float) -> None:
    emb = shuffled(case.build())
    hidden, targets = case.hidden(40, scale=3.0), torch.randint(case.num_embeddings, (40,))
    targets[::5] = 7
    options = {"label_smoothing": smoothing, "ignore_index": 7}
    scores = hidden @ naive_table(emb, case.options.get("activation"), case.padding_idx).T
    scores = with_bias(scores, emb.bias, case.padding_idx)
    expected = F.cross_entropy(scores, targets, **options)
    actual, predictions = emb.cross_entropy_and_predictions(hidden, targets, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(emb.logits(hidden), scores, rtol=1e-4, atol=1e-4)
    assert torch.equal(predictions, scores.argmax(-1))
    assert_same_gradients(gradients(emb, actual, hidden), gradients(emb, expected, hidden))


# The groups


def test_sizes_of_the_distilled_embedding_paper() -> None:
    """Appendix A.1 and tables 1 to 3; the frequencies are not in print, so within 5 %."""
    for words, dim, groups, rank, size in [
        (32000, 512, 10, 22, 2.10),
        (37000, 512, 10, 23, 2.40),
        (32000, 256, 15, 30, 2.06),
    ]:
        sizes = {"num_embeddings": words, "embedding_dim": dim, "num_groups": groups, "min_rank": rank}
        assert se.num_parameters("group_reduce", **sizes) / 1e6 == pytest.approx(size, rel=0.05)


def test_count_worked_by_hand() -> None:
    """3 * (7 + 24) + 5 * (30 + 24) = 93 + 270; one bit for each word's group."""
    emb = build(group_sizes=[7, 30], ranks=[3, 5])
    assert emb.counts()["total"] == 363
    assert emb.counts()["stored_bits"] == 363 * 32 + 37
    assert [tuple(codes.shape) for codes in emb.codes] == [(7, 3), (30, 5)]
    assert emb.groups.tolist() == [0] * 7 + [1] * 30


# The assignment


def test_a_new_assignment_takes_effect_immediately() -> None:
    emb = build(num_groups=3, min_rank=5).eval()
    ids, hidden = torch.arange(37), torch.randn(2, 24)
    with torch.no_grad():
        before = emb(ids)
        emb.logits(hidden)
        shuffled(emb)
        expected = naive_table(emb, None, None)
        assert not torch.allclose(before, expected)
        torch.testing.assert_close(emb(ids), expected)
        torch.testing.assert_close(emb.logits(hidden), hidden @ expected.T)
        emb.groups.copy_(emb.groups.flip(0).clone())
        torch.testing.assert_close(emb(ids), naive_table(emb, None, None))
        for twin in (copy.deepcopy(emb), pickle.loads(pickle.dumps(emb))):
            twin.groups.copy_(twin.groups.flip(0).clone())
            torch.testing.assert_close(twin(ids), naive_table(twin, None, None))


def test_an_inconsistent_assignment_fails() -> None:
    emb = build(group_sizes=[7, 30], ranks=[3, 5])
    emb.groups[0] = 1
    with pytest.raises(ValueError, match=r"\[6, 31\].*\[7, 30\]"):
        emb(torch.tensor([0]))


# The loss over segments


def segments(*widths: tuple[int, int], tokens: int = 300) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Random hidden states and codes of segments with V_g words of width R_g, and targets among all words."""
    generator = torch.Generator().manual_seed(0)
    hiddens = [torch.randn(tokens, r, generator=generator).requires_grad_() for _, r in widths]
    codes = [torch.randn(v, r, generator=generator).requires_grad_() for v, r in widths]
    return hiddens, codes, torch.randint(sum(v for v, _ in widths), (tokens,), generator=generator)


@pytest.mark.parametrize("masked", [None, 0, 9, 10, 129])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_segments_share_one_softmax(masked: int | None, smoothing: float, reduction: str) -> None:
    hiddens, codes, targets = segments((10, 3), (1, 5), (119, 2))
    scores = torch.cat([hidden @ code.T for hidden, code in zip(hiddens, codes)], dim=1)
    if masked is not None:
        scores = scores * (torch.arange(130) != masked)
    targets[::7] = -5
    options: Any = {"label_smoothing": smoothing, "ignore_index": -5, "reduction": reduction}
    expected = F.cross_entropy(scores, targets, **options)
    actual, predictions = linear_cross_entropy(hiddens, codes, targets, masked_word=masked, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(predictions, scores.argmax(-1))
    weight = torch.rand_like(expected)
    tensors = [*hiddens, *codes]
    found = torch.autograd.grad((actual * weight).sum(), tensors)
    for one, other in zip(found, torch.autograd.grad((expected * weight).sum(), tensors)):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_only_requested_gradients_are_computed() -> None:
    hiddens, codes, targets = segments((10, 3), (40, 2))
    hiddens[0].requires_grad_(False)
    codes[1].requires_grad_(False)
    loss, _ = linear_cross_entropy(hiddens, codes, targets)
    scores = torch.cat([hidden @ code.T for hidden, code in zip(hiddens, codes)], dim=1)
    tensors = [hiddens[1], codes[0]]
    wanted = torch.autograd.grad(F.cross_entropy(scores, targets), tensors)
    for one, other in zip(torch.autograd.grad(loss, tensors), wanted):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


# Options
