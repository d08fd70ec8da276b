"""The output side: worked examples, and the memory that the loss may take."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shared_embeddings as se
from shared_embeddings import loss as loss_module
from shared_embeddings.loss import pad_to_multiple
from tests.shared_embeddings.cases import Case
from tests.shared_embeddings.support import MemoryMeter, assert_same_gradients, each_output_case, gradients


class Dense(nn.Module):
    """A plain table with ``F.cross_entropy`` as the reference."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, dim))

    def cross_entropy(self, hidden: Tensor, targets: Tensor, **options: float) -> Tensor:
        """The loss from all ``N x V`` scores at once."""
        return F.cross_entropy(hidden @ self.weight.T, targets, **options)


def standard_with(table: list[list[float]]) -> se.SharedEmbedding:
    """A ``standard`` embedding without padding whose table is given."""
    emb = se.build("standard", num_embeddings=len(table), embedding_dim=len(table[0]))
    (parameter,) = emb.parameters()
    with torch.no_grad():
        parameter.copy_(torch.tensor(table))
    return emb


def test_worked_example() -> None:
    """Scores ln 1, ln 2, ln 5 are probabilities 1/8, 2/8, 5/8; smoothing 0.3 gives each word 0.1."""
    emb = standard_with([[0.0], [math.log(2)], [math.log(5)]])
    hidden = torch.ones(1, 1)
    logs = [math.log(8), math.log(4), math.log(8 / 5)]
    for target in range(3):
        targets = torch.tensor([target])
        plain = emb.cross_entropy(hidden, targets)
        smoothed = emb.cross_entropy(hidden, targets, label_smoothing=0.3)
        assert plain.item() == pytest.approx(logs[target], rel=1e-5)
        assert smoothed.item() == pytest.approx(0.7 * logs[target] + 0.1 * sum(logs), rel=1e-5)
    assert emb.log_prob(hidden).exp().tolist()[0] == pytest.approx([0.125, 0.25, 0.625], rel=1e-5)


def test_worked_example_of_the_gradient() -> None:
    """The gradient of the loss for a score is probability minus one-hot target."""
    emb = standard_with([[0.0], [math.log(2)], [math.log(5)]])
    hidden = torch.ones(1, 1, requires_grad=True)
    emb.cross_entropy(hidden, torch.tensor([1])).backward()
    (parameter,) = emb.parameters()
    assert parameter.grad.flatten().tolist() == pytest.approx([0.125, -0.75, 0.625], rel=1e-5)
    assert hidden.grad.item() == pytest.approx(-0.75 * math.log(2) + 0.625 * math.log(5), rel=1e-5)


def test_worked_example_of_the_bias() -> None:
    """Scores 0 + ln 2, ln 2 + ln 3 and ln 5 - ln 5 are probabilities 2/9, 6/9 and 1/9."""
    emb = se.build("standard", num_embeddings=3, embedding_dim=1, output_bias=True)
    with torch.no_grad():
        emb.weight.copy_(torch.tensor([[0.0], [math.log(2)], [math.log(5)]]))
        emb.bias.copy_(torch.tensor([math.log(2), math.log(3), -math.log(5)]))
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


def test_worked_example_with_ignored_words_and_reductions() -> None:
    emb = standard_with([[0.0], [math.log(2)], [math.log(5)]])
    hidden = torch.ones(2, 2, 1)
    targets = torch.tensor([[0, 7], [2, 7]])
    each = emb.cross_entropy(hidden, targets, ignore_index=7, reduction="none")
    assert each.flatten().tolist() == pytest.approx([math.log(8), 0, math.log(8 / 5), 0], rel=1e-5)
    total = emb.cross_entropy(hidden, targets, ignore_index=7, reduction="sum")
    assert total.item() == pytest.approx(math.log(8) + math.log(8 / 5), rel=1e-5)
    mean = emb.cross_entropy(hidden, targets, ignore_index=7)
    assert mean.item() == pytest.approx((math.log(8) + math.log(8 / 5)) / 2, rel=1e-5)


def test_large_scores_do_not_overflow() -> None:
    emb = standard_with([[1000.0], [999.0], [-1000.0]])
    hidden = torch.ones(1, 1, requires_grad=True)
    loss = emb.cross_entropy(hidden, torch.tensor([1]))
    assert loss.item() == pytest.approx(1 + math.log1p(math.exp(-1)), rel=1e-4)
    loss.backward()
    assert hidden.grad.isfinite().all()


def test_nan_propagates() -> None:
    """A diverged model must not report a finite loss."""
    emb = standard_with([[0.0], [1.0], [2.0]])
    hidden = torch.tensor([[1.0], [float("nan")]], requires_grad=True)
    loss = emb.cross_entropy(hidden, torch.tensor([1, 2]))
    assert loss.isnan()
    each = emb.cross_entropy(hidden, torch.tensor([1, 2]), reduction="none")
    assert each.isnan().tolist() == [False, True]


def test_invalid_reductions_are_named() -> None:
    emb = standard_with([[0.0], [1.0]])
    with pytest.raises(ValueError, match="average"):
        emb.cross_entropy(torch.ones(1, 1), torch.tensor([1]), reduction="average")


TOKENS, VOCABULARY, WIDTH = 2048, 4000, 16
LARGE = {"num_embeddings": VOCABULARY, "embedding_dim": WIDTH, "score_dim": WIDTH, "padding_idx": 1}
UNIT = {"map_dim": 8, "expand_dim": 32, "depth": 2, "max_groups": 2}
MEMORY_CASES = [
    Case("standard", "standard", **LARGE),
    Case("projective", "projective", {"rank": 4}, **LARGE),
    Case("funnel", "funnel", {"rank": 4}, **LARGE),
    Case("alone", "alone", {"base_dim": 16, "hidden_dim": 32, "codebooks": 4, "codebook_size": 16}, **LARGE),
    Case("define", "define", {**UNIT, "output": "table"}, **LARGE),
    Case("define-map", "define", {**UNIT, "output": "map", "output_projection": True}, **LARGE),
    Case("uncle", "uncle", {"unique_dim": 4, "random_classes": True, "num_classes": 100}, **LARGE),
    Case(
        "uncle-levels", "uncle", {"unique_dim": 4, "random_classes": True, "num_classes": [20, 100]}, **LARGE
    ),
    Case("group-reduce", "group_reduce", {"num_groups": 4, "min_rank": 2}, **LARGE),
    Case("group-funneling", "group_reduce", {"num_groups": 4, "min_rank": 2, "activation": "relu"}, **LARGE),
]


def measured(emb: nn.Module, hidden: Tensor, targets: Tensor, **options: object) -> MemoryMeter:
    """The memory of one forward and backward pass of the loss."""
    loss = emb.cross_entropy  # type: ignore[operator]
    with MemoryMeter(hidden, targets, *emb.parameters(), *emb.buffers()) as meter:
        loss(hidden, targets, **options).sum().backward()
    return meter


def test_the_meter_sees_the_scores_of_the_dense_loss() -> None:
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    meter = measured(Dense(VOCABULARY, WIDTH), hidden, torch.randint(VOCABULARY, (TOKENS,)))
    assert meter.largest >= TOKENS * VOCABULARY * 4
    assert meter.peak >= 2 * TOKENS * VOCABULARY * 4


@pytest.mark.parametrize("case", MEMORY_CASES, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "reduction": "none"}], ids=["plain", "smoothed"]
)
def test_scores_of_all_tokens_never_exist_at_once(case: Case, options: dict[str, object]) -> None:
    emb, hidden, targets = case.build(), case.hidden(TOKENS), torch.randint(VOCABULARY, (TOKENS,))
    meter = measured(emb, hidden, targets, **options)
    assert meter.largest < TOKENS * VOCABULARY * 4 / 4
    dense = measured(Dense(VOCABULARY, WIDTH), hidden, targets, **options)
    assert meter.peak < dense.peak / 4
    emb.eval()
    with torch.no_grad(), MemoryMeter(hidden, targets, *emb.parameters(), *emb.buffers()) as meter:
        emb.cross_entropy_and_predictions(hidden, targets)
    assert meter.largest < TOKENS * VOCABULARY * 4 / 4
    assert meter.peak < TOKENS * VOCABULARY * 4 / 2


@pytest.mark.parametrize("case", MEMORY_CASES, ids=str)
@pytest.mark.parametrize("tokens", [128, 129, 700])
def test_results_do_not_depend_on_the_size_of_a_chunk(case: Case, tokens: int) -> None:
    emb = case.build()
    hidden = case.hidden(tokens, scale=3.0)
    targets = torch.randint(VOCABULARY, (tokens,))
    targets[::5] = 1
    options = {"ignore_index": 1, "label_smoothing": 0.1}
    actual = emb.cross_entropy(hidden, targets, **options)
    expected = F.cross_entropy(hidden @ emb.output_table().T, targets, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert_same_gradients(gradients(emb, actual, hidden), gradients(emb, expected, hidden))
    _, predictions = emb.cross_entropy_and_predictions(hidden, targets, **options)
    assert torch.equal(predictions, emb.logits(hidden).argmax(-1))


@each_output_case
def test_low_precision_accumulates_in_single_precision(case: Case) -> None:
    """The sum of many small losses, too precise for bfloat16, is exact."""
    emb = case.build()
    hidden = case.hidden(4000)
    targets = torch.randint(case.num_embeddings, (4000,))
    exact = emb.cross_entropy(hidden, targets, reduction="sum")
    with torch.autocast("cpu", torch.bfloat16):
        loss = emb.cross_entropy(hidden, targets, reduction="sum")
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=5e-3)


@pytest.mark.slow_except("compositional-code*")
@each_output_case
def test_ignored_tokens_do_not_count(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    emb = case.build()
    for shape in ((1, 1), (8, 8), (5, 13)):
        hidden = case.hidden(*shape)
        targets = torch.randint(case.num_embeddings, shape)
        results = []
        for even in (64, 1):
            monkeypatch.setattr(loss_module, "_CPU_EVEN_TOKENS", even)
            with torch.autocast("cpu", torch.bfloat16):
                losses, predictions = emb.cross_entropy_and_predictions(hidden, targets, reduction="none")
                mean, total = (emb.cross_entropy(hidden, targets, reduction=name) for name in ("mean", "sum"))
            assert losses.shape == predictions.shape == shape
            results.append((losses, mean, total, gradients(emb, mean, hidden)))
        (*values, evened), (*expected, wanted) = results
        torch.testing.assert_close(values, expected, rtol=1e-2, atol=1e-2)
        for name, gradient in wanted.items():
            assert (evened[name] - gradient).norm() <= 0.05 * gradient.norm() + 1e-5, name


def test_the_number_of_tokens_is_evened_out_where_shapes_cost_time() -> None:
    hidden, targets = torch.randn(70, 3), torch.arange(70)
    assert pad_to_multiple(hidden, targets, -100)[0] is hidden
    padded, ignored = pad_to_multiple(hidden.bfloat16(), targets, -100)
    assert torch.equal(padded[:70], hidden.bfloat16()) and padded.shape == (128, 3)
    assert torch.equal(ignored[:70], targets) and ignored[70:].eq(-100).all() and ignored.shape == (128,)
    assert pad_to_multiple(padded[:0], targets[:0], -100)[1].shape == (0,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@each_output_case
def test_a_gpu_matches_the_cpu(case: Case) -> None:
    emb = case.build()
    hidden = case.hidden(300, scale=3.0)
    targets = torch.randint(case.num_embeddings, (300,))
    expected = emb.cross_entropy(hidden, targets, label_smoothing=0.1) + emb(targets).square().sum()
    wanted = gradients(emb, expected, hidden)
    emb = emb.cuda()
    moved = hidden.detach().cuda().requires_grad_()
    targets = targets.cuda()
    actual = emb.cross_entropy(moved, targets, label_smoothing=0.1) + emb(targets).square().sum()
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-3, atol=1e-4)
    found = {name: gradient.cpu() for name, gradient in gradients(emb, actual, moved).items()}
    assert_same_gradients(found, wanted, rtol=1e-2, atol=1e-4)
