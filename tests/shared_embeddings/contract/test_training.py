"""The contract of training, padding, random weights, low precision and the meta device."""

from __future__ import annotations

import copy

import pytest
import torch
import yaml
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shared_embeddings.accounting import distinct_state
from shared_embeddings.quant.packed_tensor import install, unfreeze
from shared_embeddings.quant.storage import hold, pack
from tests.shared_embeddings.cases import CASES, PADDING, VOCABULARY, Case
from tests.shared_embeddings.support import (
    all_ids,
    each_case,
    each_of,
    gradients,
    some_targets,
    trainable_loss,
)

# Training


@each_case
def test_every_trainable_tensor_gets_a_gradient(case: Case) -> None:
    emb = case.build()
    # Targets enough that each band of an adaptive softmax has some.
    trainable_loss(emb, case, case.hidden(64, scale=3.0)).backward()
    assert any(parameter.requires_grad for parameter in emb.parameters())
    for name, parameter in emb.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.count_nonzero() > 0, name


@each_case
def test_training_lowers_the_loss(case: Case) -> None:
    emb = case.build()
    goal = torch.randn(case.num_embeddings, case.embedding_dim) * 0.2
    optimizer = torch.optim.Adam(emb.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = (emb(all_ids(case)) - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@each_of([case for case in CASES if case.heavy])
def test_distinct_tokens_are_transformed_once(case: Case) -> None:
    emb = case.build()
    distinct = torch.tensor([5, 11, 2])
    repeated = distinct.repeat(3334)

    def operations(ids: Tensor) -> int:
        with FlopCounterMode(display=False) as counter:
            emb(ids).sum().backward()
        return counter.get_total_flops()

    assert operations(repeated) <= operations(distinct)


# Padding


@each_of([case for case in CASES if case.padding_idx is not None])
def test_padding_is_zero_and_stays_zero(case: Case) -> None:
    emb = case.build()

    def check() -> None:
        for training in (True, False):
            emb.train(training)
            for context in (torch.no_grad(), torch.enable_grad()):
                with context:
                    assert emb.table()[PADDING].abs().max() == 0
                    assert emb(torch.tensor([[PADDING, 1]]))[0, 0].abs().max() == 0
                    assert emb(torch.tensor(PADDING)).abs().max() == 0
                    if case.output:
                        assert emb.output_table()[PADDING].abs().max() == 0
                        if not case.adaptive:
                            assert emb.logits(case.hidden(4))[:, PADDING].abs().max() == 0
        emb.train()

    check()
    emb.reset_parameters()
    check()
    optimizer = torch.optim.Adam(emb.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        trainable_loss(emb, case).backward()
        optimizer.step()
    check()
    state = {
        name: value + 1 if value.is_floating_point() else value for name, value in emb.state_dict().items()
    }
    emb.load_state_dict(state)
    check()


@each_of([case for case in CASES if case.padding_idx is not None])
def test_no_gradient_flows_through_padding(case: Case) -> None:
    emb = case.build()
    found = gradients(emb, emb(torch.full((2, 3), PADDING)).sum() * 3)
    assert all(gradient.abs().max() == 0 for gradient in found.values())
    if case.output and not case.adaptive:
        found = gradients(emb, emb.logits(case.hidden(4))[:, PADDING].sum() * 3)
        assert all(gradient.abs().max() == 0 for gradient in found.values())


@each_case
def test_padding_may_be_any_word_or_none(case: Case) -> None:
    for padding in (0, VOCABULARY - 1, None):
        table = case.build(padding_idx=padding).table()
        zero_rows = (table.abs().amax(-1) == 0).nonzero().flatten().tolist()
        assert zero_rows == ([] if padding is None else [padding])


# Randomness


@each_case
def test_reset_parameters_reinitializes(case: Case) -> None:
    emb = case.build()

    def reset() -> dict[str, Tensor]:
        with torch.no_grad():
            for parameter in emb.parameters():
                parameter.fill_(7.0)
        torch.manual_seed(11)
        emb.reset_parameters()
        return {name: value.clone() for name, value in emb.state_dict().items()}

    first, second = reset(), reset()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert not (value == 7.0).all(), name


@each_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes(case: Case, dtype: torch.dtype) -> None:
    emb, exact = case.build().to(dtype), case.build()
    exact.load_state_dict(
        {name: value.to(exact.state_dict()[name].dtype) for name, value in emb.state_dict().items()}
    )
    ids, hidden, targets = some_targets(case, 3, 5), case.hidden(3, 5), some_targets(case, 3, 5)
    rounded = hidden.detach().to(dtype).requires_grad_()
    found = emb(ids)
    assert found.dtype == emb.table().dtype == dtype
    torch.testing.assert_close(found.float(), exact(ids), rtol=0.1, atol=0.05)
    loss = found.float().square().mean()
    if case.output:
        assert emb.logits(rounded).dtype == emb.log_prob(rounded).dtype == dtype
        entropy = emb.cross_entropy(rounded, targets)
        torch.testing.assert_close(
            entropy.float(), exact.cross_entropy(rounded.float(), targets), rtol=0.05, atol=0.05
        )
        loss = loss + entropy
        loss.backward()
        assert rounded.grad.dtype == dtype and rounded.grad.isfinite().all()
    else:
        loss.backward()
    for name, parameter in emb.named_parameters():
        if parameter.requires_grad:
            assert parameter.dtype == dtype
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@each_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_packed_in_every_dtype(case: Case, dtype: torch.dtype) -> None:
    """An embedding that is packed takes and gives numbers of its own dtype, like before."""
    emb = case.build().to(dtype).eval()
    state = distinct_state(emb)
    emb.load_state_dict(install(emb, hold(pack(state, state, "fp16"))), strict=False)
    exact = copy.deepcopy(emb)
    unfreeze(exact)
    exact.double()
    loose = {"rtol": 0.1, "atol": 0.1} if dtype.itemsize == 2 else {"rtol": 1e-3, "atol": 1e-4}
    ids = some_targets(case, 15)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            pairs = [(emb(ids), exact(ids)), (emb.table(), exact.table())]
            for number in (1, 15) if case.output else ():
                hidden, targets = case.hidden(number).detach().to(dtype), ids[:number]
                for call in (emb.logits, emb.log_prob):
                    pairs.append((call(hidden), getattr(exact, call.__name__)(hidden.double())))
                loss, states = exact.cross_entropy(hidden.double(), targets), hidden.requires_grad_()
                torch.testing.assert_close(emb.cross_entropy(states, targets).double(), loss, **loose)
            for found, wanted in pairs:
                assert found.dtype == dtype
                torch.testing.assert_close(found.double(), wanted, **loose)
    if case.output:
        emb.cross_entropy(states, targets).backward()
        assert states.grad.dtype == dtype and states.grad.isfinite().all()


@each_case
def test_autocast(case: Case) -> None:
    emb = case.build()
    ids, hidden, targets = some_targets(case, 3, 5), case.hidden(3, 5), some_targets(case, 3, 5)
    exact = (emb(ids) * 3).square().mean()
    if case.output:
        exact = exact + emb.cross_entropy(hidden, targets)
    with torch.autocast("cpu", torch.bfloat16):
        found = emb(ids)
        loss = (found.float() * 3).square().mean()
        if case.output:
            entropy = emb.cross_entropy(hidden, targets)
            assert entropy.dtype == torch.float32
            assert emb.cross_entropy(hidden.bfloat16(), targets).dtype == torch.float32
            assert emb.cross_entropy(hidden, targets, reduction="none").dtype == torch.float32
            loss = loss + entropy
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0.05)
    wanted = gradients(emb, exact, hidden) if case.output else gradients(emb, exact)
    actual = gradients(emb, loss, hidden) if case.output else gradients(emb, loss)
    for name, gradient in wanted.items():
        assert actual[name].dtype == torch.float32
        assert (actual[name] - gradient).norm() <= 0.15 * gradient.norm() + 1e-3, name


@each_case
def test_builds_on_the_meta_device(case: Case) -> None:
    with torch.device("meta"):
        emb = case.build()
    assert all(value.is_meta for value in emb.state_dict().values())
    assert emb.counts() == case.build().counts()
    assigned = copy.deepcopy(emb)
    assigned.load_state_dict(case.build().state_dict(), assign=True)
    assert torch.equal(assigned.table(), case.build().table())
    filled = emb.to_empty(device="cpu")
    torch.manual_seed(0)
    filled.reset_parameters()
    expected = case.build()
    assert filled.table().isfinite().all()
    for name, buffer in expected.named_buffers():
        if not buffer.is_floating_point():
            assert torch.equal(dict(filled.named_buffers())[name], buffer), name
    filled.load_state_dict(expected.state_dict())
    assert torch.equal(filled.table(), expected.table())


@each_case
def test_stored_options_build_the_same_module_without_files(case: Case) -> None:
    expected = case.build(seed=5)
    stored = yaml.safe_load(yaml.safe_dump(expected.stored_options()))
    emb = case.build(seed=6, options=stored)
    emb.load_state_dict(expected.state_dict())
    assert torch.equal(emb.table(), expected.table())
    assert emb.stored_options() == expected.stored_options()
    assert emb.counts() == expected.counts()
