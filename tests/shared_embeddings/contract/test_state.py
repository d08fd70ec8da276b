"""The contract of counts, saving and loading, the cache in evaluation, training, padding and precision."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import safetensors.torch
import torch
import yaml
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import shared_embeddings as se
from shared_embeddings.accounting import distinct_state
from shared_embeddings.quant.packed_tensor import install, unfreeze
from shared_embeddings.quant.storage import hold, pack
from shared_embeddings.utils.options import plain_options
from tests.shared_embeddings.cases import CASES, PADDING, VOCABULARY, Case, by_name
from tests.shared_embeddings.support import (
    all_ids,
    assert_same_gradients,
    each_case,
    each_of,
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


@each_case
def test_options_objects_build_the_same_embedding(case: Case) -> None:
    sizes = {"num_embeddings": case.num_embeddings, "embedding_dim": case.embedding_dim}
    options = se.get_method_config(case.method).resolve(
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
def test_deepcopy_is_independent(case: Case) -> None:
    emb = case.build().eval()
    with torch.no_grad():
        expected = emb(all_ids(case)).clone()
        twin = copy.deepcopy(emb)
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
        tensors = [emb(ids), emb.table()]
        if case.output:
            tensors += [emb.logits(hidden), emb.log_prob(hidden), emb.cross_entropy(hidden, targets)]
        return [value.detach().clone() for value in tensors]

    expected = results()
    emb.eval()
    for context in (torch.no_grad(), torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with context:
            for actual, wanted in zip(results(), expected, strict=True):
                torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


def fresh_results(emb: se.SharedEmbedding, case: Case, hidden: Tensor) -> list[Tensor]:
    """The results of a new module with the same tensors, without a cache."""
    twin = case.build().to(next(emb.parameters()).dtype)
    twin.load_state_dict(emb.state_dict())
    return cached_results(twin, case, hidden.to(next(emb.parameters()).dtype))


@torch.no_grad()
def cached_results(emb: se.SharedEmbedding, case: Case, hidden: Tensor) -> list[Tensor]:
    """Both sides of an embedding in evaluation, which may use the cache."""
    tensors = [emb(all_ids(case)), emb.table()]
    if case.output:
        tensors += [emb.output_table(), emb.log_prob(hidden)]
        tensors.append(emb.cross_entropy(hidden, torch.zeros(len(hidden), dtype=torch.int64)))
    return [value.clone() for value in tensors]


@torch.no_grad()
def scale_in_place(emb: se.SharedEmbedding, case: Case) -> None:
    """Without notifying the module."""
    for parameter in emb.parameters():
        parameter.mul_(1.5).add_(0.1)


def replace_data(emb: se.SharedEmbedding, case: Case) -> None:
    """Give every parameter new memory, like model averaging and some optimizers."""
    for parameter in emb.parameters():
        parameter.data = parameter.data * 1.5 + 0.1


CHANGES: dict[str, Callable[[se.SharedEmbedding, Case], object]] = {
    "training step": lambda emb, case: training_step(emb.train(), trainable_loss(emb, case)),
    "in place": scale_in_place,
    "data replaced": replace_data,
    "load_state_dict": lambda emb, case: emb.load_state_dict(case.build(9).state_dict()),
    "assigned": lambda emb, case: emb.load_state_dict(case.build(9).state_dict(), assign=True),
    "dtype": lambda emb, case: emb.double(),
    "reset": lambda emb, case: emb.reset_parameters(),
}


@pytest.mark.slow_except("training step-*", "data replaced-*", "load_state_dict-*", "dtype-*")
@each_case
@pytest.mark.parametrize("change", list(CHANGES))
def test_cache_is_cleared_when_parameters_change(case: Case, change: str) -> None:
    emb = case.build().eval()
    hidden = case.hidden(4).detach()
    before = cached_results(emb, case, hidden)
    cached_results(emb, case, hidden)
    CHANGES[change](emb, case)
    emb.eval()
    actual = cached_results(emb, case, hidden.to(next(emb.parameters()).dtype))
    for value, expected in zip(actual, fresh_results(emb, case, hidden), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    if change != "dtype":
        assert not torch.allclose(actual[0], before[0])


@each_case
def test_cache_does_not_block_gradients(case: Case) -> None:
    emb, hidden, targets = case.build(), case.hidden(4), some_targets(case, 4)

    def found() -> dict[str, Tensor]:
        loss = emb(all_ids(case)).square().sum()
        return gradients(emb, loss + emb.cross_entropy(hidden, targets) if case.output else loss)

    expected = found()
    emb.eval()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            cached_results(emb, case, hidden)
        assert_same_gradients(found(), expected)


@each_case
def test_cache_is_not_used_for_borrowed_parameters(case: Case) -> None:
    emb, other = case.build(0).eval(), case.build(1).eval()
    ids = all_ids(case)
    with torch.no_grad():
        emb(ids)
        borrowed = dict(other.named_parameters()) | dict(other.named_buffers())
        vectors = torch.func.functional_call(emb, borrowed, (ids,))
        torch.testing.assert_close(vectors, other(ids), rtol=1e-4, atol=1e-6)


@each_case
def test_functional_call_takes_plain_tensors(case: Case) -> None:
    """As they are in ``torch.func.grad``."""
    emb, ids = case.build(), all_ids(case)
    plain = {name: parameter.detach() for name, parameter in emb.named_parameters()}
    torch.manual_seed(0)
    expected = emb(ids)
    torch.manual_seed(0)
    torch.testing.assert_close(torch.func.functional_call(emb, plain, (ids,)), expected.detach())


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
    sums = [emb(torch.full((2, 3), PADDING)).sum()]
    if case.output and not case.adaptive:
        sums.append(emb.logits(case.hidden(4))[:, PADDING].sum())
    for value in sums:
        assert all(gradient.abs().max() == 0 for gradient in gradients(emb, value * 3).values())


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


@pytest.mark.slow_except("torch.bfloat16-*")
@each_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes(case: Case, dtype: torch.dtype) -> None:
    emb, exact = case.build().to(dtype), case.build()
    exact.load_state_dict(
        {name: value.to(exact.state_dict()[name].dtype) for name, value in emb.state_dict().items()}
    )
    ids, hidden, targets = some_targets(case, 3, 5), case.hidden(3, 5), some_targets(case, 3, 5)
    rounded = hidden.detach().to(dtype).requires_grad_()
    vectors = emb(ids)
    assert vectors.dtype == emb.table().dtype == dtype
    torch.testing.assert_close(vectors.float(), exact(ids), rtol=0.1, atol=0.05)
    loss = vectors.float().square().mean()
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


@pytest.mark.slow_except("torch.bfloat16-*", "torch.float32-*")
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
            for actual, wanted in pairs:
                assert actual.dtype == dtype
                torch.testing.assert_close(actual.double(), wanted, **loose)
    if case.output:
        emb.cross_entropy(states, targets).backward()
        assert states.grad.dtype == dtype and states.grad.isfinite().all()


@each_case
def test_autocast(case: Case) -> None:
    emb = case.build()
    ids, hidden, targets = some_targets(case, 3, 5), case.hidden(3, 5), some_targets(case, 3, 5)
    inputs = [hidden] if case.output else []
    exact = (emb(ids) * 3).square().mean()
    if case.output:
        exact = exact + emb.cross_entropy(hidden, targets)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (emb(ids).float() * 3).square().mean()
        if case.output:
            entropy = emb.cross_entropy(hidden, targets)
            assert entropy.dtype == torch.float32
            assert emb.cross_entropy(hidden.bfloat16(), targets).dtype == torch.float32
            assert emb.cross_entropy(hidden, targets, reduction="none").dtype == torch.float32
            loss = loss + entropy
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0.05)
    actual = gradients(emb, loss, *inputs)
    for name, gradient in gradients(emb, exact, *inputs).items():
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
