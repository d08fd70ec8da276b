"""The contract of the loss: against the dense computation, by hand, and in little memory."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shared_embeddings as se
from shared_embeddings import embedding as embedding_module
from tests.shared_embeddings.cases import PADDING, VOCABULARY, Case
from tests.shared_embeddings.support import (
    MemoryMeter,
    assert_same_gradients,
    dense_loss,
    each_output_case,
    each_softmax_case,
    gradients,
    some_targets,
)


@pytest.mark.slow_except("mean-0.0-*", "mean-0.1-*", "none-0.1-*")
@each_output_case
@pytest.mark.parametrize(
    ("reduction", "smoothing", "dtype"),
    [
        ("mean", 0.0, torch.float32),
        ("mean", 0.1, torch.float64),
        ("sum", 0.1, torch.float32),
        ("none", 0.0, torch.float64),
        ("none", 0.1, torch.float32),
    ],
)
def test_cross_entropy_equals_the_dense_one(
    case: Case, reduction: str, smoothing: float, dtype: torch.dtype
) -> None:
    emb = case.build().to(dtype)
    hidden = case.hidden(3, 7, scale=3.0).detach().to(dtype).requires_grad_()
    targets = some_targets(case, 3, 7)
    weight = torch.randn(targets.shape) if reduction == "none" else torch.tensor(1.7)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    loose, close = {"rtol": 1e-4, "atol": 1e-5}, {"rtol": 1e-6, "atol": 1e-7}
    padded = targets.clone()
    padded[0, :4] = PADDING
    for labels, ignored in (
        (targets, {}),
        (padded, {"ignore_index": PADDING}),
        (torch.full_like(targets, PADDING), {"ignore_index": PADDING}),
    ):
        actual = emb.cross_entropy(hidden, labels, **options, **ignored)
        expected = dense_loss(emb, hidden, labels, **options, **ignored)
        is_exact = dtype == torch.float64
        torch.testing.assert_close(
            actual.to(dtype), expected, **(close if is_exact else loose), equal_nan=True
        )
        assert_same_gradients(
            gradients(emb, (actual * weight).sum(), hidden),
            gradients(emb, (expected * weight).sum(), hidden),
            **({"rtol": 1e-5, "atol": 1e-7} if is_exact else {}),
        )


@each_output_case
def test_any_ignore_index_works(case: Case) -> None:
    emb = case.build()
    hidden = case.hidden(8)
    counted = torch.arange(8) % 3 != 0
    for index in (-100, -1, 0, VOCABULARY - 1, VOCABULARY, 10**6):
        targets = some_targets(case, 8)
        targets[targets == index] = 1
        targets[~counted] = index
        actual = emb.cross_entropy(hidden, targets, ignore_index=index, label_smoothing=0.1)
        expected = emb.cross_entropy(hidden[counted], targets[counted], label_smoothing=0.1)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        assert_same_gradients(gradients(emb, actual, hidden), gradients(emb, expected, hidden))


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
        losses = emb.cross_entropy(hidden, targets, reduction="none")
        assert losses.shape == shape
        total = emb.cross_entropy(hidden, targets, reduction="sum")
        torch.testing.assert_close(total, losses.sum(), rtol=1e-4, atol=1e-5)
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
    """Gradients formed in the forward pass must not be used up by it; inputs and parameters stay."""
    emb = case.build()
    hidden, targets = case.hidden(6), some_targets(case, 6)
    originals = [hidden.clone(), targets.clone(), *(value.clone() for value in emb.state_dict().values())]
    loss = emb.cross_entropy(hidden, targets)
    tensors = [hidden, *(p for p in emb.parameters_by_side()[1] if p.requires_grad)]
    first = torch.autograd.grad(loss * 2, tensors, retain_graph=True)
    second = torch.autograd.grad(loss * 3, tensors)
    for doubled, other in zip(first, second):
        size = max(1.0, float(doubled.abs().max()))
        torch.testing.assert_close(other, doubled * 1.5, rtol=1e-4, atol=1e-6 * size)
    for before, after in zip(originals, [hidden, targets, *emb.state_dict().values()]):
        assert torch.equal(before, after)


@each_output_case
def test_invalid_hidden_states_and_targets_fail(case: Case) -> None:
    emb = case.build()
    for wrong in (torch.randn(4, case.score_dim + 1), torch.tensor(1.0)):
        loss = functools.partial(emb.cross_entropy, targets=some_targets(case, *wrong.shape[:-1]))
        for call in (emb.logits, emb.log_prob, loss):
            with pytest.raises(ValueError, match=str(case.score_dim)):
                call(wrong)
    hidden, targets = case.hidden(2, 3), some_targets(case, 2, 3)
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        emb.cross_entropy(hidden, targets[:, :2])
    with pytest.raises(ValueError):
        emb.cross_entropy(hidden, targets.flatten())
    for smoothing in (-0.1, 1.5):
        with pytest.raises(ValueError, match="smoothing"):
            emb.cross_entropy(hidden, targets, label_smoothing=smoothing)
    with pytest.raises(ValueError, match="average"):
        emb.cross_entropy(hidden, targets, reduction="average")
    for wrong_word in (VOCABULARY, -5):
        targets[1, 1] = wrong_word
        with pytest.raises(IndexError):
            emb.cross_entropy(hidden, targets)


@each_output_case
def test_any_block_size_gives_the_same_loss(case: Case) -> None:
    emb = case.build()
    hidden, targets = case.hidden(11, scale=3.0), some_targets(case, 11)
    wanted = emb.cross_entropy(hidden, targets, label_smoothing=0.1)
    expected = gradients(emb, wanted, hidden)
    for size in (1, 4, 100):
        loss = emb.cross_entropy(hidden, targets, label_smoothing=0.1, block_size=size)
        torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-5)
        assert_same_gradients(gradients(emb, loss, hidden), expected)
    with pytest.raises(ValueError, match="block_size is 0"):
        emb.cross_entropy(hidden, targets, block_size=0)


# Worked by hand


def standard_with(*table: float, bias: list[float] | None = None) -> se.SharedEmbedding:
    """A ``standard`` embedding of words with one number each."""
    emb = se.build("standard", num_embeddings=len(table), embedding_dim=1, output_bias=bias is not None)
    state = {"weight": torch.tensor(table).unsqueeze(1)}
    emb.load_state_dict(state if bias is None else {**state, "bias": torch.tensor(bias)})
    return emb


def test_worked_example() -> None:
    """Scores ln 1, ln 2, ln 5 are probabilities 1/8, 2/8, 5/8; smoothing 0.3 gives each word 0.1.

    The gradient of the loss for a score is probability minus one-hot target.
    """
    emb, hidden = standard_with(0.0, math.log(2), math.log(5)), torch.ones(1, 1, requires_grad=True)
    logs = [math.log(8), math.log(4), math.log(8 / 5)]
    for target in range(3):
        targets = torch.tensor([target])
        assert emb.cross_entropy(hidden, targets).item() == pytest.approx(logs[target], rel=1e-5)
        smoothed = emb.cross_entropy(hidden, targets, label_smoothing=0.3)
        assert smoothed.item() == pytest.approx(0.7 * logs[target] + 0.1 * sum(logs), rel=1e-5)
    assert emb.log_prob(hidden).exp().tolist()[0] == pytest.approx([0.125, 0.25, 0.625], rel=1e-5)
    emb.cross_entropy(hidden, torch.tensor([1])).backward()
    assert emb.weight.grad.flatten().tolist() == pytest.approx([0.125, -0.75, 0.625], rel=1e-5)
    assert hidden.grad.item() == pytest.approx(-0.75 * math.log(2) + 0.625 * math.log(5), rel=1e-5)
    targets, ignored = torch.tensor([[0, 7], [2, 7]]), {"ignore_index": 7}
    hidden = torch.ones(2, 2, 1)
    losses = emb.cross_entropy(hidden, targets, reduction="none", **ignored)
    assert losses.flatten().tolist() == pytest.approx([logs[0], 0, logs[2], 0], rel=1e-5)
    total = emb.cross_entropy(hidden, targets, reduction="sum", **ignored)
    assert total.item() == pytest.approx(logs[0] + logs[2], rel=1e-5)
    mean = emb.cross_entropy(hidden, targets, **ignored)
    assert mean.item() == pytest.approx((logs[0] + logs[2]) / 2, rel=1e-5)


def test_worked_example_of_the_bias() -> None:
    """Scores 0 + ln 2, ln 2 + ln 3 and ln 5 - ln 5 are probabilities 2/9, 6/9 and 1/9."""
    bias = [math.log(2), math.log(3), -math.log(5)]
    emb = standard_with(0.0, math.log(2), math.log(5), bias=bias)
    hidden, targets = torch.ones(2, 1), torch.tensor([1, 2])
    assert emb.log_prob(hidden).exp()[0].tolist() == pytest.approx([2 / 9, 6 / 9, 1 / 9], rel=1e-5)
    logs = [math.log(9 / 2), math.log(9 / 6), math.log(9)]
    smoothed = emb.cross_entropy(hidden, targets, label_smoothing=0.3, reduction="none")
    assert smoothed.tolist() == pytest.approx(
        [0.7 * logs[1] + 0.1 * sum(logs), 0.7 * logs[2] + 0.1 * sum(logs)], rel=1e-5
    )
    emb.cross_entropy(hidden, targets, label_smoothing=0.3, reduction="sum").backward()
    # Twice the probabilities, less 0.1 for each token and word, and 0.7 for each target.
    assert emb.bias.grad.tolist() == pytest.approx([4 / 9 - 0.2, 12 / 9 - 0.9, 2 / 9 - 0.9], rel=1e-5)


def test_large_scores_do_not_overflow_and_nan_propagates() -> None:
    """A diverged model must not report a finite loss."""
    emb, hidden = standard_with(1000.0, 999.0, -1000.0), torch.ones(1, 1, requires_grad=True)
    loss = emb.cross_entropy(hidden, torch.tensor([1]))
    assert loss.item() == pytest.approx(1 + math.log1p(math.exp(-1)), rel=1e-4)
    loss.backward()
    assert hidden.grad.isfinite().all()
    diverged, targets = torch.tensor([[1.0], [math.nan]]), torch.tensor([1, 2])
    assert emb.cross_entropy(diverged, targets).isnan()
    assert emb.cross_entropy(diverged, targets, reduction="none").isnan().tolist() == [False, True]


# Many tokens

TOKENS, WORDS, WIDTH = 2048, 4000, 16
LARGE = {"num_embeddings": WORDS, "embedding_dim": WIDTH, "score_dim": WIDTH, "padding_idx": 1}
UNIT = {"map_dim": 8, "expand_dim": 32, "depth": 2, "max_groups": 2}
MEMORY_CASES = [
    Case(name, name.split()[0], options, **LARGE)
    for name, options in {
        "standard": {},
        "projective": {"rank": 4},
        "funnel": {"rank": 4},
        "adaptive": {"cutoffs": [200, 1000], "factor": 2},
        "alone": {"base_dim": 16, "hidden_dim": 32, "codebooks": 4, "codebook_size": 16},
        "define": {**UNIT, "output": "table"},
        "define map": {**UNIT, "output": "map", "output_projection": True},
        "uncle": {"unique_dim": 4, "random_classes": True, "num_classes": 100},
        "uncle levels": {"unique_dim": 4, "random_classes": True, "num_classes": [20, 100]},
        "group_reduce": {"num_groups": 4, "min_rank": 2},
        "group_reduce funneling": {"num_groups": 4, "min_rank": 2, "activation": "relu"},
    }.items()
]


class PlainLayer(nn.Module):
    """A plain table with ``F.cross_entropy`` as the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH))

    def cross_entropy(self, hidden: Tensor, targets: Tensor, **options: float) -> Tensor:
        """The loss from all ``N x V`` scores at once."""
        return F.cross_entropy(hidden @ self.weight.T, targets, **options)


def measured(emb: nn.Module, hidden: Tensor, targets: Tensor, **options: object) -> MemoryMeter:
    """The memory of one forward and backward pass of the loss."""
    loss = emb.cross_entropy  # type: ignore[operator]
    with MemoryMeter(hidden, targets, *emb.parameters(), *emb.buffers()) as meter:
        loss(hidden, targets, **options).sum().backward()
    return meter


@pytest.mark.slow_except("plain-*")
@pytest.mark.parametrize("case", MEMORY_CASES, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "reduction": "none"}], ids=["plain", "smoothed"]
)
def test_scores_of_all_tokens_never_exist_at_once(case: Case, options: dict[str, object]) -> None:
    emb, hidden, targets = case.build(), case.hidden(TOKENS), torch.randint(WORDS, (TOKENS,))
    scores = TOKENS * WORDS * 4
    dense = measured(PlainLayer(), hidden, targets, **options)
    assert dense.largest >= scores and dense.peak >= 2 * scores
    meter = measured(emb, hidden, targets, **options)
    assert meter.largest < scores / 4 and meter.peak < dense.peak / 4
    emb.eval()
    with torch.no_grad(), MemoryMeter(hidden, targets, *emb.parameters(), *emb.buffers()) as meter:
        emb.cross_entropy_and_predictions(hidden, targets)
    assert meter.largest < scores / 4 and meter.peak < scores / 2


@pytest.mark.parametrize("case", MEMORY_CASES, ids=str)
@pytest.mark.parametrize("tokens", [129, 700])
def test_results_do_not_depend_on_the_size_of_a_chunk(case: Case, tokens: int) -> None:
    emb, hidden = case.build(), case.hidden(tokens, scale=3.0)
    targets = torch.randint(WORDS, (tokens,))
    targets[::5] = 1
    options = {"ignore_index": 1, "label_smoothing": 0.1}
    actual, predictions = emb.cross_entropy_and_predictions(hidden, targets, **options)
    expected = dense_loss(emb, hidden, targets, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert_same_gradients(gradients(emb, actual, hidden), gradients(emb, expected, hidden))
    assert torch.equal(predictions, emb.logits(hidden).argmax(-1))


@each_output_case
def test_low_precision_accumulates_in_single_precision(case: Case) -> None:
    """The sum of many small losses, too precise for bfloat16, is exact."""
    emb = case.build()
    hidden = case.hidden(4000)
    targets = some_targets(case, 4000)
    exact = emb.cross_entropy(hidden, targets, reduction="sum")
    with torch.autocast("cpu", torch.bfloat16):
        loss = emb.cross_entropy(hidden, targets, reduction="sum")
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=5e-3)


@pytest.mark.slow_except("compositional-code*")
@each_output_case
def test_tokens_that_even_out_the_number_do_not_count(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    emb = case.build()
    for shape in ((1, 1), (8, 8), (5, 13)):
        hidden, targets = case.hidden(*shape), some_targets(case, *shape)
        results = []
        for even in (64, 1):
            monkeypatch.setattr(embedding_module, "_CPU_EVEN_TOKENS", even)
            with torch.autocast("cpu", torch.bfloat16):
                losses, predictions = emb.cross_entropy_and_predictions(hidden, targets, reduction="none")
                mean, total = (emb.cross_entropy(hidden, targets, reduction=name) for name in ("mean", "sum"))
            assert losses.shape == predictions.shape == shape
            results.append((losses, mean, total, gradients(emb, mean, hidden)))
        (*values, evened), (*expected, wanted) = results
        torch.testing.assert_close(values, expected, rtol=1e-2, atol=1e-2)
        for name, gradient in wanted.items():
            assert (evened[name] - gradient).norm() <= 0.05 * gradient.norm() + 1e-5, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@each_output_case
def test_a_gpu_matches_the_cpu(case: Case) -> None:
    emb = case.build()
    hidden, targets = case.hidden(300, scale=3.0), some_targets(case, 300)
    expected = emb.cross_entropy(hidden, targets, label_smoothing=0.1) + emb(targets).square().sum()
    wanted = gradients(emb, expected, hidden)
    emb = emb.cuda()
    moved = hidden.detach().cuda().requires_grad_()
    targets = targets.cuda()
    actual = emb.cross_entropy(moved, targets, label_smoothing=0.1) + emb(targets).square().sum()
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-3, atol=1e-4)
    grads = {name: gradient.cpu() for name, gradient in gradients(emb, actual, moved).items()}
    assert_same_gradients(grads, wanted, rtol=1e-2, atol=1e-4)
