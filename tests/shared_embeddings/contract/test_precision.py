"""The contract of low precision and the meta device."""

from __future__ import annotations

import torch
import yaml

from tests.shared_embeddings.cases import Case
from tests.shared_embeddings.contract.checks import each_case, some_targets
from tests.shared_embeddings.support import gradients


@each_case
def test_bfloat16(case: Case) -> None:
    emb = case.build().to(torch.bfloat16)
    exact = case.build()
    exact.load_state_dict(
        {name: value.to(exact.state_dict()[name].dtype) for name, value in emb.state_dict().items()}
    )
    ids, hidden, targets = some_targets(case, 3, 5), case.hidden(3, 5), some_targets(case, 3, 5)
    rounded = hidden.detach().bfloat16().requires_grad_()
    found = emb(ids)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact(ids), rtol=0.1, atol=0.05)
    loss = found.float().square().mean()
    if case.output:
        assert emb.logits(rounded).dtype == torch.bfloat16
        entropy = emb.cross_entropy(rounded, targets)
        torch.testing.assert_close(
            entropy.float(), exact.cross_entropy(rounded.float(), targets), rtol=0.05, atol=0.05
        )
        loss = loss + entropy
        loss.backward()
        assert rounded.grad.dtype == torch.bfloat16 and rounded.grad.isfinite().all()
    else:
        loss.backward()
    for name, parameter in emb.named_parameters():
        if parameter.requires_grad:
            assert parameter.dtype == torch.bfloat16
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name


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
def test_meta_module_takes_a_checkpoint_by_assignment(case: Case) -> None:
    expected = case.build()
    with torch.device("meta"):
        emb = case.build()
    emb.load_state_dict(expected.state_dict(), assign=True)
    assert torch.equal(emb.table(), expected.table())


@each_case
def test_stored_options_build_the_same_module_without_files(case: Case) -> None:
    expected = case.build(seed=5)
    stored = yaml.safe_load(yaml.safe_dump(expected.stored_options()))
    emb = case.build(seed=6, options=stored)
    emb.load_state_dict(expected.state_dict())
    assert torch.equal(emb.table(), expected.table())
    assert emb.stored_options() == expected.stored_options()
    assert emb.counts() == expected.counts()
