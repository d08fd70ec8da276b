"""GroupReduce and GroupFunneling: by hand, by plain loops, and with published sizes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import shared_embeddings as se
from shared_embeddings.fitting.factorization import truncated_svd
from shared_embeddings.modules import group_reduce as group_reduction

from .cases import CASES, Case
from .support import ACTIVATIONS, assert_same_gradients, dense_loss, dense_scores, gradients, zero_row

SIZES: dict[str, Any] = {"num_embeddings": 37, "embedding_dim": 24}


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
    reduction = group_reduction.group_reduce(torch.randn(200, 8), 1.0 / torch.arange(1.0, 201.0), 2, 6)
    assert len(reduction.bases[-1]) == 6


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
    expected, scores = dense_loss(emb, hidden, targets, **options), dense_scores(emb, hidden)
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


def test_only_requested_gradients_are_computed() -> None:
    emb, hidden = build(num_groups=3, min_rank=5), torch.randn(30, 24, requires_grad=True)
    emb.codes[1].requires_grad_(False)
    emb.bases[0].requires_grad_(False)
    targets = torch.randint(37, (30,))
    grads = gradients(emb, emb.cross_entropy(hidden, targets))
    assert len(grads) == 4
    assert_same_gradients(grads, gradients(emb, dense_loss(emb, hidden, targets)))


# The factorization


def clustered_table(words: int = 2000, dim: int = 32) -> tuple[Tensor, Tensor]:
    """A table whose words of four kinds lie near four different subspaces, and their Zipfian counts."""
    generator = torch.Generator().manual_seed(1)
    subspaces = torch.randn(4, 6, dim, generator=generator)
    kinds = torch.randint(4, (words,), generator=generator)
    codes = torch.randn(words, 1, 6, generator=generator)
    table = (codes @ subspaces[kinds]).squeeze(1) * dim**-0.5
    counts = 100_000 / torch.arange(1, words + 1)
    shuffled = torch.randperm(words, generator=generator)
    return table + 0.05 * torch.randn(words, dim, generator=generator), counts.floor()[shuffled]


def weighted_error(table: Tensor, approximation: Tensor, weights: Tensor) -> float:
    """The sum over words of weight times squared error, in a plain loop."""
    return sum(
        float(weight) * float((row.double() - near.double()).square().sum())
        for row, near, weight in zip(table, approximation, weights)
    )


def test_groups_by_frequency_worked_by_hand() -> None:
    """Counts 6 | 3, 3 | 1 * 6 are three groups of 6; averages 6, 3, 1 make ranks 12, 6 and 2 before the caps.

    In 100 dimensions, one word can use rank one and two words rank two; with six words, 2 is below the cap.
    """
    layout = group_reduction.group_layout(np.array([6.0, 3, 3, 1, 1, 1, 1, 1, 1]), 100, 3, 2)
    assert layout == ((1, 2, 6), (1, 2, 2))


def test_ranks_grow_with_the_average_frequency_up_to_the_highest() -> None:
    counts = np.repeat([8.0, 4, 2, 1], [100, 200, 400, 800])
    assert group_reduction.group_layout(counts, 500, 4, 5) == (
        (100, 200, 400, 800),
        (40, 20, 10, 5),
    )
    assert group_reduction.group_layout(counts, 500, 4, 5, 12).ranks == (12, 12, 10, 5)
    # Half of 40 dimensions, with enough words.
    assert group_reduction.group_layout(counts, 40, 4, 5).ranks == (20, 20, 10, 5)


@pytest.mark.parametrize("words", [1, 2, 5, 30])
def test_every_group_has_a_word(words: int) -> None:
    for groups in range(1, words + 1):
        sizes, ranks = group_reduction.group_layout(1.0 / np.arange(1, words + 1) ** 2, 16, groups, 3)
        assert len(sizes) == len(ranks) == groups
        assert sum(sizes) == words and min(sizes) >= 1 and min(ranks) >= 1


def rebuilt(reduction: group_reduction.GroupReduction) -> Tensor:
    """The table of a group reduction, word by word."""
    used = [0] * len(reduction.codes)
    rows = []
    for group in reduction.groups.tolist():
        rows.append(reduction.codes[group][used[group]] @ reduction.bases[group])
        used[group] += 1
    assert used == [len(codes) for codes in reduction.codes]
    return torch.stack(rows)


def parameters(reduction: group_reduction.GroupReduction) -> int:
    return sum(part.numel() for part in (*reduction.codes, *reduction.bases))


def test_group_reduce_is_a_weighted_svd_for_each_group() -> None:
    table, counts = clustered_table(300, 16)
    reduction = group_reduction.group_reduce(table, counts, 3, 2, refinements=0)
    order = counts.argsort(descending=True, stable=True)
    layout = group_reduction.group_layout(counts[order].clamp(min=1).numpy(), 16, 3, 2)
    start = 0
    for group, (size, rank) in enumerate(zip(*layout)):
        members = order[start : start + size].sort().values
        start += size
        assert (reduction.groups == group).nonzero().flatten().tolist() == members.tolist()
        codes, basis = truncated_svd(table[members], rank, counts[members])
        torch.testing.assert_close(
            reduction.codes[group] @ reduction.bases[group], codes @ basis, rtol=0, atol=1e-5
        )
    assert reduction.errors[0] == pytest.approx(weighted_error(table, rebuilt(reduction), counts), rel=1e-4)


def test_refinements_lower_the_error_and_never_add_parameters() -> None:
    table, counts = clustered_table()
    reduction = group_reduction.group_reduce(table, counts, 5, 4, refinements=6)
    assert len(reduction.errors) > 1 and reduction.errors == sorted(reduction.errors, reverse=True)
    assert reduction.errors[-1] < 0.95 * reduction.errors[0] and min(map(len, reduction.codes)) >= 1
    assert reduction.errors[-1] == pytest.approx(weighted_error(table, rebuilt(reduction), counts), rel=1e-4)
    before = group_reduction.group_reduce(table, counts, 5, 4, refinements=0)
    assert parameters(reduction) <= parameters(before)


def test_no_word_is_moved_below_the_minimum_rank() -> None:
    """The first groups are too small for it, so their words do not move."""
    table, counts = clustered_table()
    before = group_reduction.group_reduce(table, counts, 8, 5, refinements=0)
    after = group_reduction.group_reduce(table, counts, 8, 5, refinements=3)
    ranks = torch.tensor([len(basis) for basis in before.bases])
    assert (ranks < 5).any() and len(after.errors) > 1
    small = (ranks < 5)[before.groups]
    assert torch.equal(after.groups[small], before.groups[small])
    assert not (ranks < 5)[after.groups[~small]].any()


@pytest.mark.parametrize(("groups", "min_rank"), [(2, 3), (5, 4), (10, 3)])
@pytest.mark.parametrize("kind", ["clustered", "low rank", "noise"])
def test_group_reduce_beats_plain_svd_of_the_same_size(groups: int, min_rank: int, kind: str) -> None:
    table, counts = clustered_table()
    if kind == "low rank":
        table = torch.randn(len(table), 10) @ torch.randn(10, 32) + 0.1 * torch.randn(len(table), 32)
    elif kind == "noise":
        table = torch.randn_like(table)
    reduction = group_reduction.group_reduce(table, counts, groups, min_rank, refinements=2)
    rank = -(-parameters(reduction) // sum(table.shape))
    for weights in (None, counts):
        codes, basis = truncated_svd(table, rank, weights)
        assert reduction.errors[-1] <= weighted_error(table, codes @ basis, counts)


def test_unseen_words_work() -> None:
    table, counts = clustered_table(200, 16)
    counts[counts < counts.median()] = 0
    reduction = group_reduction.group_reduce(table, counts, 4, 2)
    assert rebuilt(reduction).isfinite().all() and len(reduction.codes) == 4


def test_group_reduce_of_one_group_is_a_weighted_svd() -> None:
    table, counts = clustered_table(100, 16)
    reduction = group_reduction.group_reduce(table, counts, 1, 5)
    codes, basis = truncated_svd(table, 5, counts)
    torch.testing.assert_close(rebuilt(reduction), codes @ basis, rtol=0, atol=1e-5)
