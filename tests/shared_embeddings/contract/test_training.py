"""The contract of training, padding and random weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.shared_embeddings.cases import CASES, PADDING, VOCABULARY, Case
from tests.shared_embeddings.contract.checks import all_ids, each_case, each_of, trainable_loss
from tests.shared_embeddings.support import gradients

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
def test_each_distinct_token_is_transformed_once(case: Case) -> None:
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
def test_same_seed_same_weights(case: Case) -> None:
    first, second, third = case.build(5), case.build(5), case.build(6)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    assert not torch.equal(first.table(), third.table())


@each_case
def test_reset_parameters_forgets_what_was_there(case: Case) -> None:
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
def test_parameter_groups_hold_each_parameter_once(case: Case) -> None:
    emb = case.build()
    decayed, *rest = emb.parameter_groups(weight_decay=0.1)
    assert decayed["weight_decay"] == 0.1 and all(group["weight_decay"] == 0.0 for group in rest)
    grouped = [id(parameter) for group in (decayed, *rest) for parameter in group["params"]]
    wanted = [id(parameter) for parameter in emb.parameters() if parameter.requires_grad]
    assert sorted(grouped) == sorted(wanted) and len(set(grouped)) == len(grouped)
    without_decay = {id(parameter) for group in rest for parameter in group["params"]}
    for name, parameter in emb.named_parameters():
        is_single = parameter.dim() == 1 or "bias" in name or "norm" in name
        assert (id(parameter) in without_decay) == is_single, name
    torch.optim.AdamW([decayed, *rest]).step()
