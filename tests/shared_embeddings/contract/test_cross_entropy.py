"""The contract of the loss, against the dense computation."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.shared_embeddings.cases import PADDING, VOCABULARY, Case
from tests.shared_embeddings.support import (
    assert_same_gradients,
    dense_loss,
    each_output_case,
    each_softmax_case,
    gradients,
    some_targets,
)


@each_softmax_case
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_the_dense_one(case: Case, reduction: str, smoothing: float) -> None:
    emb = case.build()
    hidden = case.hidden(3, 7, scale=3.0)
    targets = some_targets(case, 3, 7)
    weight = torch.randn(targets.shape) if reduction == "none" else torch.tensor(1.7)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    some = targets.clone()
    some[0, :4] = PADDING
    for labels, ignored in (
        (targets, {}),
        (some, {"ignore_index": PADDING}),
        (torch.full_like(targets, PADDING), {"ignore_index": PADDING}),
    ):
        actual = emb.cross_entropy(hidden, labels, **options, **ignored)
        expected = dense_loss(emb, hidden, labels, **options, **ignored)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert_same_gradients(
            gradients(emb, (actual * weight).sum(), hidden), gradients(emb, (expected * weight).sum(), hidden)
        )


@each_output_case
def test_any_ignore_index_works(case: Case) -> None:
    emb = case.build()
    hidden = case.hidden(8)
    kept = torch.arange(8) % 3 != 0
    for index in (-100, -1, 0, VOCABULARY - 1, VOCABULARY, 10**6):
        targets = some_targets(case, 8)
        targets[targets == index] = 1
        targets[~kept] = index
        actual = emb.cross_entropy(hidden, targets, ignore_index=index, label_smoothing=0.1)
        expected = emb.cross_entropy(hidden[kept], targets[kept], label_smoothing=0.1)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        assert_same_gradients(gradients(emb, actual, hidden), gradients(emb, expected, hidden))


@each_softmax_case
def test_cross_entropy_equals_the_dense_one_in_double_precision(case: Case) -> None:
    emb = case.build().double()
    hidden = case.hidden(50).detach().double().requires_grad_()
    targets = some_targets(case, 50)
    actual = emb.cross_entropy(hidden, targets, label_smoothing=0.1)
    expected = dense_loss(emb, hidden, targets, label_smoothing=0.1)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-7)
    assert_same_gradients(
        gradients(emb, actual, hidden), gradients(emb, expected, hidden), rtol=1e-5, atol=1e-7
    )


@each_softmax_case
def test_gradients_of_both_sides_are_summed(case: Case) -> None:
    emb = case.build()
    ids, targets = some_targets(case, 2, 6), some_targets(case, 2, 6)
    mixing = torch.randn(case.embedding_dim, case.score_dim)
    actual = emb.cross_entropy(emb(ids).tanh() @ mixing, targets)
    expected = dense_loss(emb, emb.table()[ids].tanh() @ mixing, targets)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert_same_gradients(gradients(emb, actual), gradients(emb, expected))


@each_output_case
def test_cross_entropy_takes_any_number_of_tokens(case: Case) -> None:
    emb = case.build()
    for shape in [(1,), (1, 1), (2, 3, 4), (0,), (2, 0)]:
        hidden, targets = case.hidden(*shape), some_targets(case, *shape)
        each = emb.cross_entropy(hidden, targets, reduction="none")
        assert each.shape == shape
        total = emb.cross_entropy(hidden, targets, reduction="sum")
        torch.testing.assert_close(total, each.sum(), rtol=1e-4, atol=1e-5)
        total.backward()
        assert hidden.grad is not None and hidden.grad.isfinite().all()
        _, predictions = emb.cross_entropy_and_predictions(hidden, targets, reduction="sum")
        assert predictions.shape == shape
    swapped, targets = case.hidden(6, 4).transpose(0, 1), some_targets(case, 4, 6)
    torch.testing.assert_close(
        emb.cross_entropy(swapped, targets), emb.cross_entropy(swapped.contiguous(), targets)
    )


@each_output_case
def test_cross_entropy_works_with_one_side_frozen(case: Case) -> None:
    emb = case.build()
    hidden, targets = case.hidden(6), some_targets(case, 6)
    full = gradients(emb, emb.cross_entropy(hidden, targets), hidden)
    without_hidden = gradients(emb, emb.cross_entropy(hidden.detach(), targets))
    assert_same_gradients(without_hidden, {name: full[name] for name in without_hidden})
    emb.requires_grad_(False)
    only_hidden = gradients(emb, emb.cross_entropy(hidden, targets), hidden)
    torch.testing.assert_close(only_hidden["input 0"], full["input 0"], rtol=1e-4, atol=1e-6)
    assert not emb.cross_entropy(hidden.detach(), targets).requires_grad


@each_output_case
def test_the_backward_pass_can_be_repeated(case: Case) -> None:
    """Gradients formed in the forward pass must not be used up by the first backward pass."""
    emb = case.build()
    hidden, targets = case.hidden(6), some_targets(case, 6)
    loss = emb.cross_entropy(hidden, targets)
    tensors = [hidden, *(p for p in emb.output_parameters() if p.requires_grad)]
    first = torch.autograd.grad(loss * 2, tensors, retain_graph=True)
    second = torch.autograd.grad(loss * 3, tensors)
    for one, other in zip(first, second):
        torch.testing.assert_close(other, one * 1.5, rtol=1e-4, atol=1e-6)


@each_output_case
def test_inputs_are_not_modified(case: Case) -> None:
    emb = case.build()
    hidden, targets = case.hidden(6), some_targets(case, 6)
    kept = [hidden.clone(), targets.clone(), *(value.clone() for value in emb.state_dict().values())]
    emb.cross_entropy(hidden, targets, ignore_index=1, label_smoothing=0.1).backward()
    emb.log_prob(hidden)
    for before, after in zip(kept, [hidden, targets, *emb.state_dict().values()]):
        assert torch.equal(before, after)


@each_output_case
def test_scores_of_another_width_fail(case: Case) -> None:
    emb = case.build()
    for wrong, targets in (
        (torch.randn(4, case.score_dim + 1), some_targets(case, 4)),
        (torch.tensor(1.0), some_targets(case)),
    ):
        for call in (
            functools.partial(emb.logits, wrong),
            functools.partial(emb.log_prob, wrong),
            functools.partial(emb.cross_entropy, wrong, targets),
        ):
            with pytest.raises(ValueError, match=str(case.score_dim)):
                call()


@each_output_case
def test_invalid_targets_fail(case: Case) -> None:
    emb = case.build()
    hidden = case.hidden(2, 3)
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        emb.cross_entropy(hidden, some_targets(case, 2, 2))
    with pytest.raises(ValueError):
        emb.cross_entropy(hidden, some_targets(case, 6))
    with pytest.raises(TypeError, match="targets are of type torch.float32"):
        emb.cross_entropy(hidden, some_targets(case, 2, 3).float())
    for smoothing in (-0.1, 1.5):
        with pytest.raises(ValueError, match="smoothing"):
            emb.cross_entropy(hidden, some_targets(case, 2, 3), label_smoothing=smoothing)
    for wrong in (VOCABULARY, -5):
        targets = some_targets(case, 2, 3)
        targets[1, 1] = wrong
        with pytest.raises(IndexError):
            emb.cross_entropy(hidden, targets)


@each_output_case
def test_any_block_size_gives_the_same_loss(case: Case) -> None:
    emb = case.build()
    hidden, targets = case.hidden(11, scale=3.0), some_targets(case, 11)
    wanted = emb.cross_entropy(hidden, targets, label_smoothing=0.1)
    expected = gradients(emb, wanted, hidden)
    for size in (1, 4, 100):
        found = emb.cross_entropy(hidden, targets, label_smoothing=0.1, block_size=size)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert_same_gradients(gradients(emb, found, hidden), expected)
    with pytest.raises(ValueError, match="block_size is 0"):
        emb.cross_entropy(hidden, targets, block_size=0)
