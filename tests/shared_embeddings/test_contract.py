"""The contract of the interface, for every row of the table: each method in each of its modes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
from collections.abc import Callable

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import shared_embeddings as se

from .cases import CASES, OUTPUT_CASES, PADDING, SOFTMAX_CASES, VOCABULARY, Case, by_name
from .support import assert_same_gradients, gradients, training_step

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_output_case = pytest.mark.parametrize("case", OUTPUT_CASES, ids=lambda case: case.name)
each_softmax_case = pytest.mark.parametrize("case", SOFTMAX_CASES, ids=lambda case: case.name)
padded_cases = pytest.mark.parametrize(
    "case", [case for case in CASES if case.padding_idx is not None], ids=lambda case: case.name
)


def all_ids(case: Case) -> Tensor:
    """Every id once, ``(V,)``."""
    return torch.arange(case.num_embeddings)


def some_targets(case: Case, *shape: int) -> Tensor:
    """Random targets ``shape``."""
    return torch.randint(case.num_embeddings, shape)


def dense_scores(emb: se.SharedEmbedding, hidden: Tensor) -> Tensor:
    """The scores that ``logits`` promises: a product with the dense table, plus the bias if there is one."""
    products, bias = hidden @ emb.output_table().T, emb.output_bias()
    return products if bias is None else products + bias


def dense_loss(emb: se.SharedEmbedding, hidden: Tensor, targets: Tensor, **options: object) -> Tensor:
    """The loss that ``cross_entropy`` promises, from dense scores; shapes as there."""
    logits = dense_scores(emb, hidden)
    reduction = options.get("reduction", "mean")
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)
    return loss.view(targets.shape) if reduction == "none" else loss


def trainable_loss(emb: se.SharedEmbedding, case: Case, hidden: Tensor | None = None) -> Tensor:
    """A loss that uses the input side and, where there is one, the output side."""
    loss = emb(all_ids(case)).square().sum()
    if case.output:
        hidden = case.hidden(5, scale=3.0) if hidden is None else hidden
        loss = loss + emb.cross_entropy(hidden, some_targets(case, hidden.shape[0]))
    return loss


# The registry


def test_every_method_has_a_row() -> None:
    assert set(se.methods()) == {case.method for case in CASES}
    assert set(se.methods()) == {case.method for case in CASES if case.bias is not None}


def test_names_of_rows_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("method", sorted({case.method for case in CASES}))
def test_options_are_a_documented_dataclass(method: str) -> None:
    options = se.options(method)
    assert dataclasses.is_dataclass(options)
    assert options.__doc__


@each_case
def test_describes_itself(case: Case) -> None:
    emb = case.build()
    assert isinstance(emb, se.SharedEmbedding) and isinstance(emb, nn.Module)
    assert emb.method == case.method
    assert emb.num_embeddings == case.num_embeddings
    assert emb.embedding_dim == case.embedding_dim
    assert emb.padding_idx == case.padding_idx
    assert emb.score_dim == case.score_dim
    assert emb.has_output is case.output
    assert isinstance(emb.options, se.options(case.method))
    for name, value in case.options.items():
        stored = getattr(emb.options, name)
        assert (list(stored) if isinstance(value, list) else stored) == value
    with pytest.raises(dataclasses.FrozenInstanceError):
        emb.options.anything = 1


# The input side


@each_case
def test_table_has_one_row_per_word(case: Case) -> None:
    table = case.build().table()
    assert table.shape == (case.num_embeddings, case.embedding_dim)
    assert table.dtype == torch.float32
    assert table.isfinite().all()
    kept = table[torch.arange(len(table)) != case.padding_idx]
    assert torch.unique(kept, dim=0).shape[0] > len(kept) / 2


@each_case
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_lookup_is_a_row_of_the_table(case: Case, training: bool) -> None:
    emb = case.build().train(training)
    ids = torch.randint(case.num_embeddings, (4, 9))
    torch.testing.assert_close(emb(ids), emb.table()[ids], rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(emb(ids), emb.table()[ids], rtol=1e-4, atol=1e-6)


@each_case
def test_lookup_has_the_gradients_of_a_row_of_the_table(case: Case) -> None:
    emb = case.build()
    ids = torch.randint(case.num_embeddings, (4, 9))
    weight = torch.randn(4, 9, case.embedding_dim)
    actual = gradients(emb, (emb(ids) * weight).sum())
    assert_same_gradients(actual, gradients(emb, (emb.table()[ids] * weight).sum()))


@each_case
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2, 3, 4), (0,), (2, 0)], ids=str)
def test_lookup_takes_ids_of_any_shape(case: Case, shape: tuple[int, ...]) -> None:
    emb = case.build()
    ids = torch.randint(case.num_embeddings, shape)
    found = emb(ids)
    assert found.shape == (*shape, case.embedding_dim)
    torch.testing.assert_close(found, emb.table()[ids], rtol=1e-4, atol=1e-6)
    found.sum().backward()
    with torch.no_grad():
        assert emb.eval()(ids).shape == (*shape, case.embedding_dim)


@each_case
def test_lookup_takes_ids_in_strange_memory(case: Case) -> None:
    emb = case.build()
    ids = torch.randint(case.num_embeddings, (5, 4, 3)).transpose(0, 2)[:, ::2]
    torch.testing.assert_close(emb(ids), emb.table()[ids], rtol=1e-4, atol=1e-6)


@each_case
def test_lookup_takes_short_integers(case: Case) -> None:
    emb = case.build()
    ids = torch.randint(case.num_embeddings, (3, 4))
    assert torch.equal(emb(ids.int()), emb(ids))


@each_case
@pytest.mark.parametrize("wrong", [VOCABULARY, -1], ids=str)
def test_an_id_that_is_no_word_is_an_error(case: Case, wrong: int) -> None:
    emb = case.build()
    for training in (True, False):
        emb.train(training)
        with pytest.raises(IndexError):
            emb(torch.tensor([1, wrong]))
        with pytest.raises(IndexError), torch.no_grad():
            emb(torch.tensor([1, wrong]))


@each_case
@pytest.mark.parametrize("kind", [torch.float32, torch.bool, torch.uint8], ids=str)
def test_ids_of_another_type_are_refused(case: Case, kind: torch.dtype) -> None:
    emb = case.build()
    with pytest.raises(TypeError, match=r"ids are of type torch\.\w+"):
        emb(torch.ones(2).to(kind))


@each_case
def test_changing_a_result_changes_nothing_else(case: Case) -> None:
    emb = case.build().eval()
    ids = all_ids(case)
    with torch.no_grad():
        before = emb(ids).clone()
        emb(ids).zero_()
        assert torch.equal(emb(ids), before)


@each_case
def test_table_entries_have_the_common_spread(case: Case) -> None:
    stds = []
    for seed in range(4):
        table = case.build(seed).table().detach()
        stds.append(table[torch.arange(len(table)) != case.padding_idx].std().item())
    expected = case.embedding_dim**-0.5
    assert expected / 2 < sum(stds) / len(stds) < expected * 2


# The output side


@each_output_case
def test_output_table_has_the_width_of_the_scores(case: Case) -> None:
    emb = case.build()
    assert emb.output_table().shape == (case.num_embeddings, case.score_dim)
    options = {"tie": "all", **case.options}
    tied_to_the_table = (
        options.get("output") != "map"
        and options["tie"] == "all"
        and options.get("head_projection") != "input"
    )
    if tied_to_the_table:
        torch.testing.assert_close(emb.output_table(), emb.table())


@each_output_case
def test_only_the_output_side_has_a_bias(case: Case) -> None:
    emb = case.build()
    bias = emb.output_bias()
    if case.bias is None:
        assert bias is None
        return
    wanted = emb.get_parameter(case.bias).detach().clone()
    if case.padding_idx is not None:
        wanted[case.padding_idx] = 0.0
    assert torch.equal(bias, wanted)
    if not case.adaptive:
        assert torch.equal(emb.logits(torch.zeros(case.score_dim)), wanted)
    inputs = {id(parameter) for parameter in emb.input_parameters()}
    assert inputs.isdisjoint(id(emb.get_parameter(name)) for name in case.biases)
    without = case.build(options={**case.options, "output_bias": False}, bias=None).counts()
    added = sum(emb.get_parameter(name).numel() for name in case.biases)
    assert emb.counts() == without | {
        "output": without["output"] + added,
        "total": without["total"] + added,
        "stored_bits": without["stored_bits"] + 32 * added,
    }
    with torch.no_grad():
        before = emb.table().clone()
        for name in case.biases:
            emb.get_parameter(name).add_(1.0)
        assert torch.equal(emb.table(), before)
    emb.reset_parameters()
    assert all(emb.get_parameter(name).abs().max() == 0 for name in case.biases)


@each_output_case
def test_the_bias_of_another_output_layer_is_taken_over(case: Case) -> None:
    """Where hidden states say nothing, the bias alone decides, in two steps as in one."""
    emb, given = case.build(), torch.randn(case.num_embeddings) * 2
    if case.bias is None:
        with pytest.raises(RuntimeError, match="output_bias=True"):
            emb.set_output_bias(given)
        return
    for wrong in (given[:1], given[0], given[:, None]):
        with pytest.raises(ValueError, match=f"there are {case.num_embeddings} words"):
            emb.set_output_bias(wrong)
    emb.set_output_bias(given)
    kept = given.clone()
    if case.padding_idx is not None:
        kept[case.padding_idx] = 0.0
    assert torch.equal(emb.output_bias(), kept)
    found = emb.log_prob(torch.zeros(case.score_dim))
    torch.testing.assert_close(found, kept.log_softmax(0), rtol=1e-5, atol=1e-5)


@each_softmax_case
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,), (2, 0)], ids=str)
def test_logits_are_products_with_the_output_table_and_the_bias(
    case: Case, training: bool, shape: tuple[int, ...]
) -> None:
    emb = case.build().train(training)
    hidden = case.hidden(*shape)
    expected = dense_scores(emb, hidden)
    assert expected.shape == (*shape, case.num_embeddings)
    torch.testing.assert_close(emb.logits(hidden), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(emb.logits(hidden), expected.detach(), rtol=1e-4, atol=1e-5)


@each_softmax_case
def test_logits_have_the_gradients_of_products_with_the_output_table(case: Case) -> None:
    emb = case.build()
    hidden = case.hidden(3, 5)
    weight = torch.randn(3, 5, case.num_embeddings)
    actual = gradients(emb, (emb.logits(hidden) * weight).sum(), hidden)
    expected = gradients(emb, (dense_scores(emb, hidden) * weight).sum(), hidden)
    assert_same_gradients(actual, expected)


@each_softmax_case
def test_log_prob_is_the_log_softmax_of_the_logits(case: Case) -> None:
    emb = case.build()
    hidden = case.hidden(3, 5, scale=4.0)
    torch.testing.assert_close(emb.log_prob(hidden), emb.logits(hidden).log_softmax(-1), rtol=1e-4, atol=1e-5)


@each_output_case
def test_log_prob_is_normalised(case: Case) -> None:
    emb = case.build()
    for shape in [(), (1,), (3, 5), (0,)]:
        log_prob = emb.log_prob(case.hidden(*shape, scale=4.0))
        assert log_prob.shape == (*shape, case.num_embeddings)
        torch.testing.assert_close(log_prob.logsumexp(-1), torch.zeros(shape), rtol=0, atol=1e-5)


@each_output_case
def test_cross_entropy_is_the_negative_log_prob(case: Case) -> None:
    emb = case.build()
    hidden, targets = case.hidden(3, 5, scale=4.0), some_targets(case, 3, 5)
    expected = -emb.log_prob(hidden).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    actual = emb.cross_entropy(hidden, targets, reduction="none")
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert_same_gradients(gradients(emb, actual.sum(), hidden), gradients(emb, expected.sum(), hidden))


@each_output_case
def test_predictions_are_the_most_probable_words(case: Case) -> None:
    emb = case.build()
    hidden, targets = case.hidden(4, 11, scale=4.0), some_targets(case, 4, 11)
    targets[0, :3] = -100
    loss, predictions = emb.cross_entropy_and_predictions(
        hidden, targets, label_smoothing=0.1, reduction="sum"
    )
    assert predictions.dtype == torch.int64
    assert torch.equal(predictions, emb.log_prob(hidden).argmax(-1))
    torch.testing.assert_close(loss, emb.cross_entropy(hidden, targets, label_smoothing=0.1, reduction="sum"))
    with torch.no_grad():
        assert torch.equal(emb.eval().cross_entropy_and_predictions(hidden, targets)[1], predictions)


@pytest.mark.parametrize("case", [case for case in CASES if not case.output], ids=lambda case: case.name)
def test_an_input_only_embedding_says_that_it_has_no_output(case: Case) -> None:
    emb = case.build()
    hidden, targets = torch.randn(2, case.embedding_dim), torch.tensor([0, 1])
    for call in (
        lambda: emb.logits(hidden),
        lambda: emb.log_prob(hidden),
        lambda: emb.output_table(),
        lambda: emb.cross_entropy(hidden, targets),
        lambda: emb.cross_entropy_and_predictions(hidden, targets),
    ):
        with pytest.raises((RuntimeError, ValueError), match="output"):
            call()


# Cross entropy against the dense computation


@each_softmax_case
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1], ids=["plain", "smoothed"])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_cross_entropy_equals_the_dense_one(
    case: Case, reduction: str, smoothing: float, ignored: str
) -> None:
    emb = case.build()
    hidden = case.hidden(3, 7, scale=3.0)
    targets = some_targets(case, 3, 7)
    if ignored == "some":
        targets[0, :4] = PADDING
    elif ignored == "all":
        targets[:] = PADDING
    options = {"reduction": reduction, "label_smoothing": smoothing}
    if ignored != "none":
        options["ignore_index"] = PADDING
    actual = emb.cross_entropy(hidden, targets, **options)
    expected = dense_loss(emb, hidden, targets, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    weight = torch.randn(targets.shape) if reduction == "none" else torch.tensor(1.7)
    assert_same_gradients(
        gradients(emb, (actual * weight).sum(), hidden), gradients(emb, (expected * weight).sum(), hidden)
    )


@each_output_case
@pytest.mark.parametrize("index", [-100, -1, 0, VOCABULARY - 1, VOCABULARY, 10**6], ids=str)
def test_any_number_may_mark_ignored_tokens(case: Case, index: int) -> None:
    emb = case.build()
    hidden = case.hidden(8)
    targets = some_targets(case, 8)
    kept = torch.arange(8) % 3 != 0
    targets[kept & (targets == index)] = 1
    targets[~kept] = index
    actual = emb.cross_entropy(hidden, targets, ignore_index=index, label_smoothing=0.1)
    expected = emb.cross_entropy(hidden[kept], targets[kept], label_smoothing=0.1)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert_same_gradients(gradients(emb, actual, hidden), gradients(emb, expected, hidden))


@each_softmax_case
def test_cross_entropy_equals_the_dense_one_closely_in_double_precision(case: Case) -> None:
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
def test_both_sides_of_a_model_add_up_their_gradients(case: Case) -> None:
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


@each_output_case
def test_cross_entropy_takes_hidden_states_in_strange_memory(case: Case) -> None:
    emb = case.build()
    hidden, targets = case.hidden(6, 4), some_targets(case, 4, 6)
    swapped = hidden.transpose(0, 1)
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
def test_the_backward_pass_may_run_again(case: Case) -> None:
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
def test_a_result_leaves_its_inputs_alone(case: Case) -> None:
    emb = case.build()
    hidden, targets = case.hidden(6), some_targets(case, 6)
    kept = [hidden.clone(), targets.clone(), *(value.clone() for value in emb.state_dict().values())]
    emb.cross_entropy(hidden, targets, ignore_index=1, label_smoothing=0.1).backward()
    emb.log_prob(hidden)
    for before, after in zip(kept, [hidden, targets, *emb.state_dict().values()]):
        assert torch.equal(before, after)


@each_output_case
def test_scores_of_another_width_are_refused(case: Case) -> None:
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
def test_targets_that_do_not_fit_are_refused(case: Case) -> None:
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


@pytest.mark.parametrize("case", [case for case in CASES if case.heavy], ids=lambda case: case.name)
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


@padded_cases
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


@padded_cases
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


# Checkpoints from before every method could have a bias


def test_the_bias_of_the_plain_table_comes_behind_it() -> None:
    """As in the states of optimisers, which number the parameters."""
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


# Counting


@each_case
def test_counts_agree_with_the_tensors_and_with_the_formula(case: Case) -> None:
    emb = case.build()
    counts = emb.counts()
    assert set(counts) == {"input", "output", "shared", "total", "stored_bits"}
    total = sum(parameter.numel() for parameter in {id(p): p for p in emb.parameters()}.values())
    assert counts["total"] == total == se.accounting.count_parameters(emb)
    assert counts["total"] == se.expected_count(
        case.method,
        num_embeddings=case.num_embeddings,
        embedding_dim=case.embedding_dim,
        **case.options,
    )
    assert all(isinstance(value, int) and value >= 0 for value in counts.values())
    assert counts["stored_bits"] >= 32 * total


@each_case
def test_counts_tell_the_sides_apart(case: Case) -> None:
    """``shared`` is what both sides use; ``input`` and ``output`` are what one side uses, alone or in all."""
    counts = case.build().counts()
    exclusive = counts["input"] + counts["output"] + counts["shared"]
    inclusive = counts["input"] + counts["output"] - counts["shared"]
    assert counts["total"] in (exclusive, inclusive)
    if not case.output:
        assert counts["output"] == 0


def test_tied_tensors_are_counted_once() -> None:
    emb = by_name("funnel").build()
    both = nn.ModuleDict({"encoder": emb, "decoder": emb})
    both.register_parameter("again", next(iter(emb.parameters())))
    assert se.accounting.count_parameters(both) == emb.counts()["total"]


# Saving and loading


@each_case
def test_state_dict_round_trip(case: Case) -> None:
    first, second = case.build(0), case.build(1)
    assert not torch.equal(first.table(), second.table())
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert torch.equal(first.table(), second.table())
    if case.output:
        assert torch.equal(first.output_table(), second.output_table())


@each_case
def test_state_dict_goes_through_safetensors(case: Case) -> None:
    first, second = case.build(0), case.build(1)
    second.load_state_dict(safetensors.torch.load(safetensors.torch.save(first.state_dict())))
    assert torch.equal(first.table(), second.table())


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
def test_state_dict_of_another_size_is_refused(case: Case) -> None:
    state = case.build(num_embeddings=VOCABULARY + 2).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch"):
        case.build().load_state_dict(state)


@each_case
def test_state_dict_holds_parameters_and_no_cache(case: Case) -> None:
    emb = case.build().eval()
    before = {name: value.shape for name, value in emb.state_dict().items()}
    with torch.no_grad():
        emb(all_ids(case))
        emb.table()
        if case.output:
            emb.log_prob(case.hidden(2))
    assert {name: value.shape for name, value in emb.state_dict().items()} == before


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


# The cache in evaluation


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
@pytest.mark.parametrize("change", CHANGES)
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


# Precision and devices


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
