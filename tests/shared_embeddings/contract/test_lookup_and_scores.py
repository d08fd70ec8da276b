"""The contract of the input side, and of tables, scores, probabilities and predictions."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import nn

import shared_embeddings as se
from shared_embeddings.cli.catalog import options_of
from shared_embeddings.embedding import score_only
from tests.shared_embeddings.cases import CASES, VOCABULARY, Case
from tests.shared_embeddings.support import (
    assert_same_gradients,
    dense_scores,
    each_case,
    each_of,
    each_output_case,
    each_softmax_case,
    gradients,
    some_targets,
)

# The registry


@pytest.mark.parametrize("method", sorted({case.method for case in CASES}))
def test_options_are_a_documented_dataclass(method: str) -> None:
    options = se.get_method_config(method)
    assert dataclasses.is_dataclass(options)
    assert options.__doc__
    assert all(description.endswith((".", "?")) for *_, description in options_of(method))


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
    assert isinstance(emb.options, se.get_method_config(case.method))
    for name, value in case.options.items():
        stored = getattr(emb.options, name)
        assert (list(stored) if isinstance(value, list) else stored) == value
    with pytest.raises(dataclasses.FrozenInstanceError):
        emb.options.anything = 1


# The input side


@each_case
def test_table_has_one_row_per_word_with_the_common_std(case: Case) -> None:
    stds = []
    for seed in range(4):
        table = case.build(seed).table().detach()
        assert table.shape == (case.num_embeddings, case.embedding_dim)
        assert table.dtype == torch.float32 and table.isfinite().all()
        rows = table[torch.arange(len(table)) != case.padding_idx]
        assert torch.unique(rows, dim=0).shape[0] > len(rows) / 2
        stds.append(rows.std().item())
    expected = case.embedding_dim**-0.5
    assert expected / 2 < sum(stds) / len(stds) < expected * 2


@each_case
@pytest.mark.parametrize("training", [True, False])
def test_lookup_is_a_row_of_the_table(case: Case, training: bool) -> None:
    emb = case.build().train(training)
    ids = torch.randint(case.num_embeddings, (4, 9))
    weight = torch.randn(4, 9, case.embedding_dim)
    torch.testing.assert_close(emb(ids), emb.table()[ids], rtol=1e-4, atol=1e-6)
    actual = gradients(emb, (emb(ids) * weight).sum())
    assert_same_gradients(actual, gradients(emb, (emb.table()[ids] * weight).sum()))
    with torch.no_grad():
        torch.testing.assert_close(emb(ids), emb.table()[ids], rtol=1e-4, atol=1e-6)


@each_case
def test_lookup_takes_ids_of_any_shape(case: Case) -> None:
    emb = case.build()
    for shape in ((), (1,), (1, 1), (2, 3, 4), (0,), (2, 0)):
        ids = torch.randint(case.num_embeddings, shape)
        vectors = emb.train()(ids)
        assert vectors.shape == (*shape, case.embedding_dim)
        torch.testing.assert_close(vectors, emb.table()[ids], rtol=1e-4, atol=1e-6)
        vectors.sum().backward()
        with torch.no_grad():
            vectors = emb.eval()(ids).clone()
            emb(ids).zero_()  # an alias of parameters or of the cache would change
            assert torch.equal(emb(ids), vectors)
    ids = torch.randint(case.num_embeddings, (5, 4, 3))
    swapped = ids.transpose(0, 2)[:, ::2]
    torch.testing.assert_close(emb(swapped), emb.table()[swapped], rtol=1e-4, atol=1e-6)
    assert torch.equal(emb(ids.int()), emb(ids))


@each_case
def test_ids_out_of_range_fail(case: Case) -> None:
    emb = case.build()
    for training, wrong in itertools.product((True, False), (VOCABULARY, -1)):
        emb.train(training)
        for mode in (torch.enable_grad, torch.no_grad):
            with pytest.raises(IndexError), mode():
                emb(torch.tensor([1, wrong]))


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
    inputs = {id(parameter) for parameter in emb.parameters_by_side()[0]}
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
def test_the_bias_of_another_output_layer_is_copied(case: Case) -> None:
    """With hidden states of zero, the bias determines probabilities, with one or two softmax steps."""
    emb, bias = case.build(), torch.randn(case.num_embeddings) * 2
    if case.bias is None:
        with pytest.raises(RuntimeError, match="output_bias=True"):
            emb.set_output_bias(bias)
        return
    for wrong in (bias[:1], bias[0]):
        with pytest.raises(RuntimeError):
            emb.set_output_bias(wrong)
    emb.set_output_bias(bias)
    expected = bias.clone()
    if case.padding_idx is not None:
        expected[case.padding_idx] = 0.0
    assert torch.equal(emb.output_bias(), expected)
    logs = emb.log_prob(torch.zeros(case.score_dim))
    torch.testing.assert_close(logs, expected.log_softmax(0), rtol=1e-5, atol=1e-5)


@each_softmax_case
@pytest.mark.parametrize("training", [True, False])
def test_logits_are_products_with_the_output_table_and_the_bias(case: Case, training: bool) -> None:
    emb = case.build().train(training)
    for shape in ((), (1,), (3, 5), (0,), (2, 0)):
        hidden, weight = case.hidden(*shape), torch.randn(*shape, case.num_embeddings)
        expected, actual = dense_scores(emb, hidden), emb.logits(hidden)
        assert expected.shape == (*shape, case.num_embeddings)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        if 0 not in shape:
            wanted = gradients(emb, (expected * weight).sum(), hidden)
            assert_same_gradients(gradients(emb, (actual * weight).sum(), hidden), wanted)
        with torch.no_grad():
            # Loops for some codes read hidden states in 16 bits.
            largest = max([1.0, *expected.abs().flatten().tolist()])
            near = {"rtol": 1e-4, "atol": 5e-5 * largest}
            torch.testing.assert_close(emb.logits(hidden), expected.detach(), **near)


@each_softmax_case
def test_scores_of_some_words_are_theirs(case: Case) -> None:
    emb = case.build().eval()
    if emb.score_dim != emb.embedding_dim or not emb.has_linear_scores:
        return
    if not torch.equal(emb.output_table(), emb.table()):  # a map that is narrower or deeper
        return
    hidden, ids = case.hidden(3), torch.arange(1, case.num_embeddings, 2)
    wanted = emb.logits(hidden)
    with score_only(emb, ids):
        scores, logs = emb.logits(hidden), emb.log_prob(hidden)
        weight = torch.randn(3, len(ids))
        grads = gradients(emb, (scores * weight).sum(), hidden)
    torch.testing.assert_close(scores, wanted[:, ids], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logs, wanted[:, ids].log_softmax(dim=1), rtol=1e-4, atol=1e-5)
    assert_same_gradients(grads, gradients(emb, (wanted[:, ids] * weight).sum(), hidden))
    with score_only(emb, ids, torch.arange(len(ids)).float()):
        torch.testing.assert_close(emb.logits(hidden), scores + torch.arange(len(ids)))
    assert emb.logits(hidden).size(1) == case.num_embeddings


@each_output_case
def test_log_prob_is_normalized_and_its_negative_is_the_loss(case: Case) -> None:
    emb = case.build()
    for shape in [(), (1,), (3, 5), (0,)]:
        log_prob = emb.log_prob(case.hidden(*shape, scale=4.0))
        assert log_prob.shape == (*shape, case.num_embeddings)
        torch.testing.assert_close(log_prob.logsumexp(-1), torch.zeros(shape), rtol=0, atol=1e-5)
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


@each_of([case for case in CASES if not case.output])
def test_input_only_embeddings_report_the_missing_output(case: Case) -> None:
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
