"""The contract of the cache in evaluation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import shared_embeddings as se
from tests.helpers import in_turn
from tests.shared_embeddings.cases import Case
from tests.shared_embeddings.contract.checks import all_ids, each_case, some_targets, trainable_loss
from tests.shared_embeddings.support import assert_same_gradients, gradients, training_step


@each_case
def test_evaluation_gives_the_results_of_training(case: Case) -> None:
    emb = case.build()
    ids, hidden, targets = some_targets(case, 3, 4), case.hidden(3, 4), some_targets(case, 3, 4)

    def results() -> list[Tensor]:
        found = [emb(ids), emb.table()]
        if case.output:
            found += [emb.logits(hidden), emb.log_prob(hidden), emb.cross_entropy(hidden, targets)]
        return [value.detach().clone() for value in found]

    expected = results()
    emb.eval()
    for context in (torch.no_grad(), torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with context:
            for actual, wanted in zip(results(), expected, strict=True):
                torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


def fresh_results(emb: se.SharedEmbedding, case: Case, hidden: Tensor) -> list[Tensor]:
    """What a new module with the same tensors computes, so without any cache."""
    twin = case.build().to(next(emb.parameters()).dtype)
    twin.load_state_dict(emb.state_dict())
    return cached_results(twin, case, hidden.to(next(emb.parameters()).dtype))


@torch.no_grad()
def cached_results(emb: se.SharedEmbedding, case: Case, hidden: Tensor) -> list[Tensor]:
    """Both sides of an embedding in evaluation, where it may answer from its cache."""
    found = [emb(all_ids(case)), emb.table()]
    if case.output:
        found += [emb.output_table(), emb.log_prob(hidden)]
        found.append(emb.cross_entropy(hidden, torch.zeros(len(hidden), dtype=torch.int64)))
    return [value.clone() for value in found]


@torch.no_grad()
def scale_in_place(emb: se.SharedEmbedding) -> None:
    """Change every parameter without the module being told."""
    for parameter in emb.parameters():
        parameter.mul_(1.5).add_(0.1)


def replace_data(emb: se.SharedEmbedding) -> None:
    """Give every parameter other memory, as model averaging and some optimizers do."""
    for parameter in emb.parameters():
        parameter.data = parameter.data * 1.5 + 0.1


def train_one_step(emb: se.SharedEmbedding, case: Case) -> None:
    """Training between two evaluations."""
    training_step(emb.train(), trainable_loss(emb, case))
    emb.eval()


CHANGES: dict[str, Callable[[se.SharedEmbedding, Case], object]] = {
    "training step": lambda emb, case: train_one_step(emb, case),
    "in place": lambda emb, case: scale_in_place(emb),
    "data replaced": lambda emb, case: replace_data(emb),
    "load_state_dict": lambda emb, case: emb.load_state_dict(case.build(9).state_dict()),
    "load_state_dict assigning": lambda emb, case: emb.load_state_dict(
        case.build(9).state_dict(), assign=True
    ),
    "dtype": lambda emb, case: emb.double(),
    "reset": lambda emb, case: emb.reset_parameters(),
}


@each_case
@in_turn("change", list(CHANGES))
def test_cache_does_not_outlive_its_parameters(case: Case, change: str) -> None:
    emb = case.build().eval()
    hidden = case.hidden(4).detach()
    before = cached_results(emb, case, hidden)
    cached_results(emb, case, hidden)
    CHANGES[change](emb, case)
    dtype = next(emb.parameters()).dtype
    actual = cached_results(emb, case, hidden.to(dtype))
    for value, expected in zip(actual, fresh_results(emb, case, hidden), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    if change != "dtype":
        assert not torch.allclose(actual[0], before[0])


@each_case
def test_cache_does_not_cut_the_gradient(case: Case) -> None:
    emb = case.build()
    hidden = case.hidden(4)
    targets = some_targets(case, 4)
    for context in (torch.no_grad, torch.inference_mode):
        emb.eval()
        with context():
            cached_results(emb, case, hidden)
        loss = emb(all_ids(case)).square().sum()
        if case.output:
            loss = loss + emb.cross_entropy(hidden, targets)
        found = gradients(emb, loss)
        emb.train()
        loss = emb(all_ids(case)).square().sum()
        if case.output:
            loss = loss + emb.cross_entropy(hidden, targets)
        assert_same_gradients(found, gradients(emb, loss))


@each_case
def test_cache_does_not_mix_precisions(case: Case) -> None:
    emb = case.build().eval()
    hidden = case.hidden(4).detach()
    with torch.autocast("cpu", torch.bfloat16):
        cached_results(emb, case, hidden)
    for value, expected in zip(cached_results(emb, case, hidden), fresh_results(emb, case, hidden)):
        assert value.dtype == expected.dtype
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


@each_case
def test_cache_is_not_used_for_borrowed_parameters(case: Case) -> None:
    emb, other = case.build(0).eval(), case.build(1).eval()
    ids = all_ids(case)
    with torch.no_grad():
        emb(ids)
        borrowed = dict(other.named_parameters()) | dict(other.named_buffers())
        found = torch.func.functional_call(emb, borrowed, (ids,))
        torch.testing.assert_close(found, other(ids), rtol=1e-4, atol=1e-6)
