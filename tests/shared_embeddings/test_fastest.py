"""The choice between torch's loss of linear scores and ours, forced or timed on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shared_embeddings as se
from shared_embeddings.losses import fastest
from tests.helpers import in_turn

TOKENS, WORDS, DIM, PADDING = 40, 30, 6, 2
METHODS = ("standard", "projective", "alone", "uncle", "group_reduce")


@pytest.fixture(autouse=True)
def torch_calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Compares losses on this CPU, where torch's always wins; yields the hidden states of its calls."""
    calls: list[Tensor] = []
    own = F.linear_cross_entropy

    def counted(hidden: Tensor, *arguments: Any, **options: Any) -> Tensor:
        calls.append(hidden)
        return own(hidden, *arguments, **options)

    monkeypatch.setattr(F, "linear_cross_entropy", counted)
    monkeypatch.setattr(fastest, "DEVICES", ("cpu",))
    monkeypatch.setattr(fastest, "_torch_is_faster", {})
    monkeypatch.setattr(fastest, "seconds", timer({"by_torch": 1.0, "own": 2.0}))
    return calls


def timer(times: dict[str, float]) -> Callable[..., float]:
    """A timer that returns given seconds by the name of the loss."""
    return lambda loss, _: times[loss.__name__]


def build(method: str, dtype: torch.dtype = torch.float32) -> se.SharedEmbedding:
    """A small embedding with bias and padding; methods have their example's options."""
    torch.manual_seed(0)
    options = {
        "standard": {},
        "projective": {"rank": 3},
        "alone": {"base_dim": 6, "hidden_dim": 8, "codebooks": 2, "codebook_size": 4},
        "uncle": {"unique_dim": 3, "num_classes": 4, "random_classes": True},
        "group_reduce": {"num_groups": 2, "min_rank": 2},
    }[method]
    sizes = {"num_embeddings": WORDS, "embedding_dim": DIM, "padding_idx": PADDING}
    emb = se.build(method, **sizes, output_bias=True, **options)
    with torch.no_grad():
        emb.bias.normal_()
    return emb.to(dtype)


def tokens(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Hidden states and targets, the padding word among them."""
    generator = torch.Generator().manual_seed(1)
    hidden = 2 * torch.randn(TOKENS, DIM, generator=generator)
    targets = torch.randint(WORDS, (TOKENS,), generator=generator)
    return hidden.to(dtype).requires_grad_(), targets


def gradients(emb: se.SharedEmbedding, loss: Tensor, hidden: Tensor) -> list[Tensor]:
    """The gradients of a loss by the hidden states and all parameters that it depends on."""
    found = torch.autograd.grad(loss, [hidden, *emb.parameters()], allow_unused=True)
    return [torch.zeros(()) if gradient is None else gradient for gradient in found]


@in_turn("method", METHODS[:3])
@in_turn("reduction", ["mean", "sum", "none"])
@in_turn("ignored", [5, PADDING])
def test_either_loss_has_the_value_and_gradients_of_dense_scores(method, reduction, ignored) -> None:
    emb, (hidden, targets) = build(method, torch.float64), tokens(torch.float64)
    targets[::7] = ignored
    loss = emb.cross_entropy(hidden, targets, ignored, reduction=reduction)
    log_probabilities = emb.log_prob(hidden)
    expected = F.nll_loss(log_probabilities, targets, ignore_index=ignored, reduction=reduction)
    torch.testing.assert_close(loss, expected)
    weights = torch.linspace(1, 2, TOKENS, dtype=torch.float64) if reduction == "none" else 3.0
    found = gradients(emb, (loss * weights).sum(), hidden)
    wanted = gradients(emb, (expected * weights).sum(), hidden)
    torch.testing.assert_close(found, wanted)


@in_turn("method", METHODS)
def test_linear_scores_use_the_loss_of_torch(method, torch_calls) -> None:
    emb, (hidden, targets) = build(method), tokens()
    torch_calls.clear()
    emb.cross_entropy(hidden, targets)
    assert len(torch_calls) == (method not in ("uncle", "group_reduce"))


def test_our_loss_is_used_where_torchs_differs(torch_calls) -> None:
    emb, (hidden, targets) = build("standard"), tokens()
    emb.cross_entropy(hidden, targets, label_smoothing=0.1)
    emb.cross_entropy(hidden, targets, block_size=8)
    emb.cross_entropy_and_predictions(hidden, targets)
    with torch.no_grad():
        emb.cross_entropy(hidden, targets)
    with torch.autocast("cpu", torch.bfloat16):
        assert emb.cross_entropy(hidden, targets).dtype == torch.float32
    low = build("standard", torch.bfloat16)
    assert low.cross_entropy(hidden.bfloat16(), targets).dtype == torch.float32
    torch.use_deterministic_algorithms(True)
    try:
        emb.cross_entropy(hidden, targets)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch_calls == []


def test_the_faster_loss_is_measured_once_per_shape(torch_calls, monkeypatch) -> None:
    asked: list[str] = []

    def counted(loss: Callable[..., Tensor], factors: list[Tensor]) -> float:
        asked.append(loss.__name__)
        assert [factor.requires_grad for factor in factors] == [True, True, True]
        return {"by_torch": 2.0, "own": 1.0}[loss.__name__]

    monkeypatch.setattr(fastest, "seconds", counted)
    emb, (hidden, targets) = build("standard"), tokens()
    for number in (40, 40, 35):  # one power of two
        emb.cross_entropy(hidden[:number], targets[:number])
    assert asked == ["by_torch", "own"] and torch_calls == []
    monkeypatch.setattr(fastest, "seconds", timer({"by_torch": 1.0, "own": 2.0}))
    emb.cross_entropy(hidden[:10], targets[:10])
    emb.cross_entropy(hidden, targets)
    assert [len(hidden) for hidden in torch_calls] == [10]


def test_our_loss_is_used_without_memory_to_compare(torch_calls, monkeypatch) -> None:
    def without_memory(*_: Any) -> float:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(fastest, "seconds", without_memory)
    emb, (hidden, targets) = build("standard"), tokens()
    emb.cross_entropy(hidden, targets).backward()
    assert torch_calls == [] and emb.weight.grad is not None


def test_the_timer_runs_each_loss_and_leaves_no_gradients(monkeypatch, torch_calls) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(fastest, "DEVICES", ("cpu",))
    emb, (hidden, targets) = build("standard"), tokens()
    emb.cross_entropy(hidden, targets)
    assert hidden.grad is None and all(parameter.grad is None for parameter in emb.parameters())
    assert len(fastest._torch_is_faster) == 1
    fastest._torch_is_faster.clear()


@pytest.mark.slow
def test_compiled_graphs_use_our_loss(torch_calls) -> None:
    emb, (hidden, targets) = build("standard"), tokens()
    compiled = torch.compile(emb.cross_entropy, fullgraph=True, backend="eager")
    loss = compiled(hidden, targets)
    assert torch_calls == [] and fastest._torch_is_faster == {}
    torch.testing.assert_close(loss, emb.cross_entropy(hidden, targets))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_computes_the_loss_of_the_cpu_either_way(monkeypatch, torch_calls) -> None:
    monkeypatch.undo()
    emb, (hidden, targets) = build("standard"), tokens()
    expected = emb.cross_entropy(hidden, targets)
    wanted = gradients(emb, expected, hidden)
    moved, targets = hidden.detach().cuda().requires_grad_(), targets.cuda()
    for is_faster in (None, True, False):
        emb = build("standard").cuda()
        if is_faster is not None:
            monkeypatch.setattr(fastest, "_is_faster", lambda *_, answer=is_faster: answer)
        fastest._torch_is_faster.clear()
        loss = emb.cross_entropy(moved, targets)
        assert len(fastest._torch_is_faster) == 1
        torch.testing.assert_close(loss.cpu(), expected, rtol=1e-3, atol=1e-4)
        found = [gradient.cpu() for gradient in gradients(emb, loss, moved)]
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-4)
    fastest._torch_is_faster.clear()


def test_a_loss_of_no_tokens_is_nan_with_zero_gradients() -> None:
    emb, (hidden, targets) = build("standard"), tokens()
    loss = emb.cross_entropy(hidden, torch.full_like(targets, -100))
    assert loss.isnan()
    assert all(not gradient.any() for gradient in gradients(emb, loss, hidden))


def test_gradients_can_be_computed_twice_but_not_differentiated() -> None:
    emb, (hidden, targets) = build("standard"), tokens()
    loss = emb.cross_entropy(hidden, targets)
    first, again = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(loss, hidden, create_graph=True)
