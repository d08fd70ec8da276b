"""The contract of counts, saving and loading, and of the cache in evaluation."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import safetensors.torch
import torch
from torch import Tensor

import shared_embeddings as se
from shared_embeddings.utils.options import plain_options
from tests.shared_embeddings.cases import VOCABULARY, Case, by_name
from tests.shared_embeddings.support import (
    all_ids,
    assert_same_gradients,
    each_case,
    gradients,
    some_targets,
    trainable_loss,
    training_step,
)

# Checkpoints from before every method could have a bias


def test_the_bias_is_stored_after_the_table() -> None:
    """As in optimizer states, which number the parameters."""
    emb = by_name("standard-output-bias").build()
    assert [name for name, _ in emb.named_parameters()] == ["weight", "bias"]


def test_the_bias_may_be_among_the_options_of_the_map() -> None:
    case = by_name("define-tied-to-map-output-bias")
    old = {name: value for name, value in case.options.items() if name != "output_bias"}
    emb = case.build(options={**old, "map_options": {"output_bias": True}})
    assert emb.counts() == case.build().counts()
    emb.load_state_dict(case.build(1).state_dict())
    assert emb.stored_options() == case.build().stored_options()
    with pytest.raises(se.OptionError, match="output_bias"):
        case.build(options={**old, "output": "none", "map_options": {"output_bias": True}}, bias=None)


@each_case
def test_options_objects_build_the_same_embedding(case: Case) -> None:
    sizes = {"num_embeddings": case.num_embeddings, "embedding_dim": case.embedding_dim}
    options = se.options(case.method).resolve(
        *sizes.values(), {**case.options, "output_bias": bool(case.bias)}
    )
    torch.manual_seed(0)
    named = se.build(case.method, **sizes, **plain_options(options))
    torch.manual_seed(0)
    typed = se.build(options, **sizes)
    assert type(typed) is type(named) and typed.options == named.options
    for name, tensor in named.state_dict().items():
        torch.testing.assert_close(typed.state_dict()[name], tensor, rtol=0, atol=0)
    assert se.num_parameters(options, **sizes) == se.num_parameters(
        case.method, **sizes, **plain_options(options)
    )


def test_options_objects_are_fitted_and_take_no_further_options() -> None:
    table = torch.randn(20, 6)
    typed, report = se.fit(se.ProjectiveOptions(rank=2), table)
    named, _ = se.fit("projective", table, rank=2)
    assert report.options == {"rank": 2}
    torch.testing.assert_close(typed.codes, named.codes, rtol=0, atol=0)
    with pytest.raises(se.OptionError, match="rank"):
        se.build(se.ProjectiveOptions(rank=2), num_embeddings=20, embedding_dim=6, rank=3)


# Counting


@each_case
def test_counts_agree_with_the_tensors_and_with_the_formula(case: Case) -> None:
    emb = case.build()
    counts = emb.counts()
    assert set(counts) == {"input", "output", "shared", "total", "stored_bits"}
    total = sum(parameter.numel() for parameter in {id(p): p for p in emb.parameters()}.values())
    assert counts["total"] == total == se.accounting.count_parameters(emb)
    assert counts["total"] == se.num_parameters(
        case.method,
        num_embeddings=case.num_embeddings,
        embedding_dim=case.embedding_dim,
        **case.options,
    )
    assert all(isinstance(value, int) and value >= 0 for value in counts.values())
    # ``shared`` is used by both sides, ``input`` and ``output`` by one side, exclusively or in total.
    sides = counts["input"] + counts["output"]
    assert total in (sides + counts["shared"], sides - counts["shared"])
    assert case.output or counts["output"] == 0
    bits = {"fp32": 32, "fp16": 16}[emb.options.default_store]
    assert counts["stored_bits"] >= bits * total


# Saving and loading


@each_case
def test_state_dict_round_trip(case: Case) -> None:
    first, second, third = case.build(0).eval(), case.build(1), case.build(2)
    assert not torch.equal(first.table(), second.table())
    cached_results(first, case, case.hidden(2).detach())
    assert first.state_dict().keys() == second.state_dict().keys(), "the cache is part of the state"
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True), strict=True)
    third.load_state_dict(safetensors.torch.load(safetensors.torch.save(first.state_dict())))
    assert torch.equal(first.table(), second.table()) and torch.equal(first.table(), third.table())
    if case.output:
        assert torch.equal(first.output_table(), second.output_table())


@each_case
def test_state_dict_is_strict(case: Case) -> None:
    emb = case.build()
    state = emb.state_dict()
    with pytest.raises(RuntimeError, match="nonsense"):
        emb.load_state_dict(state | {"nonsense": torch.zeros(1)})
    missing = next(iter(state))
    with pytest.raises(RuntimeError, match=missing.replace(".", r"\.")):
        emb.load_state_dict({name: value for name, value in state.items() if name != missing})


@each_case
def test_state_dict_of_another_size_fails(case: Case) -> None:
    state = case.build(num_embeddings=VOCABULARY + 2).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch"):
        case.build().load_state_dict(state)


@each_case
def test_deepcopy_is_independent(case: Case) -> None:
    emb = case.build().eval()
    with torch.no_grad():
        expected = emb(all_ids(case)).clone()
    twin = copy.deepcopy(emb)
    with torch.no_grad():
        for parameter in emb.parameters():
            parameter.mul_(2).add_(0.5)
        assert torch.equal(twin(all_ids(case)), expected)
        assert not torch.allclose(emb(all_ids(case)), expected)
    assert twin.counts() == emb.counts()


@each_case
def test_evaluation_equals_training(case: Case) -> None:
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
    """The results of a new module with the same tensors, without a cache."""
    twin = case.build().to(next(emb.parameters()).dtype)
    twin.load_state_dict(emb.state_dict())
    return cached_results(twin, case, hidden.to(next(emb.parameters()).dtype))


@torch.no_grad()
def cached_results(emb: se.SharedEmbedding, case: Case, hidden: Tensor) -> list[Tensor]:
    """Both sides of an embedding in evaluation, which may use the cache."""
    found = [emb(all_ids(case)), emb.table()]
    if case.output:
        found += [emb.output_table(), emb.log_prob(hidden)]
        found.append(emb.cross_entropy(hidden, torch.zeros(len(hidden), dtype=torch.int64)))
    return [value.clone() for value in found]


@torch.no_grad()
def scale_in_place(emb: se.SharedEmbedding) -> None:
    """Change every parameter without notifying the module."""
    for parameter in emb.parameters():
        parameter.mul_(1.5).add_(0.1)


def replace_data(emb: se.SharedEmbedding) -> None:
    """Give every parameter new memory, like model averaging and some optimizers."""
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
@pytest.mark.parametrize("change", list(CHANGES))
def test_cache_is_cleared_when_parameters_change(case: Case, change: str) -> None:
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
def test_cache_does_not_block_gradients(case: Case) -> None:
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
