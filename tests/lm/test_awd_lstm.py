"""AWD-LSTM against plain loops and numbers computed by hand: recurrence, dropout, penalties, state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lm.models.awd_lstm as module_under_test
from lm.models import build
from lm.models.awd_lstm import (
    AWDLSTM,
    LSTMLayer,
    cpu_has_bf16,
    locked_dropout,
)

VOCABULARY = 30
DROPOUT = ("embedding_dropout", "input_dropout", "hidden_dropout", "output_dropout", "weight_drop")
QUIET = dict.fromkeys((*DROPOUT, "ar_weight", "tar_weight"), 0.0)
SMALL = {"embedding_dim": 7, "hidden_dim": 11, "num_layers": 3}


def small_model(vocabulary: int = VOCABULARY, **options: Any) -> AWDLSTM:
    """A small model from a fixed seed, without dropout and penalties unless set in `options`."""
    torch.manual_seed(0)
    words = [f"w{number}" for number in range(vocabulary)]
    model = build("awd_lstm", words, {"method": "standard"}, {**SMALL, **QUIET, **options})
    assert isinstance(model, AWDLSTM)
    return model


def some_ids(batch: int = 4, time: int = 6) -> Tensor:
    return torch.randint(VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(1))


def loop_lstm(layer: LSTMLayer, inputs: Tensor, recurrent: Tensor) -> Tensor:
    """The outputs ``(T, B, H)`` of an LSTM layer from zeros, step by step, with a given recurrent matrix."""
    hidden = cell = torch.zeros(inputs.size(1), layer.hidden_size)
    outputs = []
    for x in inputs:
        gates = x @ layer.weight_ih_l0.T + layer.bias_ih_l0 + hidden @ recurrent.T + layer.bias_hh_l0
        enter, forget, candidate, leave = gates.chunk(4, dim=1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * candidate.tanh()
        hidden = leave.sigmoid() * cell.tanh()
        outputs.append(hidden)
    return torch.stack(outputs)


def loop_model(model: AWDLSTM, ids: Tensor, recurrents: list[Tensor]) -> Tensor:
    """The hidden states ``(B, T, S)`` of a model without dropout of activations."""
    hidden = model.embedding.table()[ids].transpose(0, 1)
    for layer, recurrent in zip(model.layers, recurrents, strict=True):
        hidden = loop_lstm(layer, hidden, recurrent)
    return hidden.transpose(0, 1)


class Kernel:
    """Replaces `torch.lstm`: records the recurrent matrices and calls the original."""

    def __init__(self) -> None:
        self.matrices: list[Tensor] = []

    def __call__(self, inputs: Tensor, state: Any, weights: list[Tensor], **options: Any) -> Any:
        self.matrices.append(weights[1])
        return self.plain(inputs, state, weights, **options)

    plain = staticmethod(torch.lstm)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    watching = Kernel()
    monkeypatch.setattr(module_under_test.torch, "lstm", watching)
    return watching


# Recurrence and state


@pytest.mark.parametrize("training", [True, False])
def test_model_without_dropout_is_a_plain_lstm(training: bool) -> None:
    model, ids = small_model().train(training), some_ids()
    out = model(ids, model.initial_state(4))
    wanted = loop_model(model, ids, [layer.weight_hh_l0 for layer in model.layers])
    torch.testing.assert_close(out.hidden, wanted, rtol=1e-4, atol=1e-6)
    assert out.penalty == 0


def test_all_regularization_is_off_in_evaluation() -> None:
    model, ids = small_model().eval(), some_ids()
    plain = model(ids, model.initial_state(4))
    rates = dict.fromkeys(QUIET, 0.5)
    regular = small_model(**rates).eval()
    out = regular(ids, regular.initial_state(4))
    assert torch.equal(out.hidden, plain.hidden)
    assert out.penalty == 0


def test_state_is_carried_between_segments() -> None:
    model, ids = small_model().eval(), some_ids(time=9)
    whole = model(ids, model.initial_state(4))
    state, parts = model.initial_state(4), []
    for segment in ids.split([2, 1, 6], dim=1):
        hidden, state, _ = model(segment, state)
        parts.append(hidden)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole.hidden)
    for part, wanted in zip(state, whole.state, strict=True):
        torch.testing.assert_close(part, wanted)


def test_a_state_of_another_batch_size_fails() -> None:
    model, ids = small_model(), some_ids()
    with pytest.raises(
        ValueError, match=r"the state is of 3 texts, but ids are of 4; use ids of shape \(batch"
    ):
        model(ids, model.initial_state(3))


def test_no_gradient_flows_into_the_previous_segment() -> None:
    model, ids = small_model(), some_ids()
    first = model(ids, model.initial_state(4))
    assert not any(part.requires_grad for part in first.state)
    after = model(ids, first.state).hidden.sum()
    assert torch.autograd.grad(after, first.hidden, allow_unused=True) == (None,)


# Weight drop


def test_kernel_uses_the_dropped_recurrent_matrices(kernel: Kernel) -> None:
    """One mask per layer and segment: the loop with the same matrices gives the same hidden states."""
    model, ids = small_model(weight_drop=0.25, hidden_dim=40), some_ids()
    out = model(ids, model.initial_state(4))
    torch.testing.assert_close(out.hidden, loop_model(model, ids, kernel.matrices), rtol=1e-4, atol=1e-6)
    full = loop_model(model, ids, [layer.weight_hh_l0 for layer in model.layers])
    assert (out.hidden - full).abs().max() > 1e-3
    for layer, matrix in zip(model.layers, kernel.matrices, strict=True):
        nonzero = matrix != 0
        torch.testing.assert_close(matrix[nonzero], layer.weight_hh_l0[nonzero] / 0.75)
        assert 1 - nonzero.float().mean() == pytest.approx(0.25, abs=0.1)


def test_every_segment_has_its_own_masks(kernel: Kernel) -> None:
    model, ids = small_model(weight_drop=0.5), some_ids()
    first, second = (model(ids, model.initial_state(4)).hidden for _ in range(2))
    assert not torch.equal(first, second)
    for before, after in zip(kernel.matrices[:3], kernel.matrices[3:], strict=True):
        assert not torch.equal(before == 0, after == 0)
    model.eval()
    assert torch.equal(model(ids, model.initial_state(4)).hidden, model(ids, model.initial_state(4)).hidden)


@pytest.mark.slow
def test_compilation_keeps_the_fused_kernel() -> None:
    """Decomposed, an LSTM becomes T small products per layer, and its compilation takes minutes."""
    calls = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        calls.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    model, ids = small_model(num_layers=2, hidden_dropout=0.5), some_ids(time=2)
    out = torch.compile(model, backend=backend)(ids, model.initial_state(4))
    assert out.hidden.shape == (4, 2, 7)
    assert calls and torch.lstm not in calls


# Dropout of activations


def test_locked_dropout_has_one_mask_for_all_time_steps() -> None:
    torch.manual_seed(0)
    dropped = locked_dropout(torch.ones(5, 30, 40), 0.25, training=True)
    assert (dropped == dropped[:1]).all()
    values, counts = dropped[0].unique(return_counts=True)
    torch.testing.assert_close(values, torch.tensor([0.0, 1 / 0.75]))
    assert counts[0] / 1200 == pytest.approx(0.25, abs=0.05)
    assert not torch.equal(dropped[0, 0], dropped[0, 1])


def test_embedding_dropout_drops_all_occurrences_of_a_word() -> None:
    model = small_model(vocabulary=200, embedding_dropout=0.4)
    (table,) = model.embedding.parameters()
    nn.init.ones_(table)
    read: list[Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    model(torch.arange(200).repeat(3, 2), model.initial_state(3))
    by_word = read[0].transpose(0, 1).view(3, 2, 200, 7)
    assert (by_word == by_word[:1, :1, :, :1]).all()
    values, counts = by_word[0, 0, :, 0].unique(return_counts=True)
    torch.testing.assert_close(values, torch.tensor([0.0, 1 / 0.6]))
    assert counts[0] / 200 == pytest.approx(0.4, abs=0.1)


def test_dropped_words_get_no_gradient_from_the_input() -> None:
    """A batch with every word: about half of the rows get no gradient, the others twice as much."""
    model = small_model(embedding_dropout=0.5)
    ids = torch.arange(VOCABULARY).view(1, -1)
    model(ids, model.initial_state(1)).hidden.square().sum().backward()
    (table,) = model.embedding.parameters()
    dropped = (table.grad == 0).all(dim=1)
    assert 5 < dropped.sum() < 25
    assert (table.grad[~dropped] != 0).all()


@pytest.mark.parametrize("place", ["input", "hidden", "output"])
def test_each_dropout_acts_on_its_layer(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locked dropout applies four times: to vectors, twice between layers, to outputs."""
    rates = []

    def watched(inputs: Tensor, probability: float, training: bool) -> Tensor:
        rates.append(probability)
        return locked_dropout(inputs, probability, training)

    monkeypatch.setattr(module_under_test, "locked_dropout", watched)
    model, ids = small_model(**{f"{place}_dropout": 0.5}), some_ids()
    out = model(ids, model.initial_state(4))
    places = ["input", "hidden", "hidden", "output"]
    assert rates == [0.5 if place == name else 0.0 for name in places]
    plain = small_model()(ids, model.initial_state(4)).hidden
    assert not torch.equal(out.hidden, plain)
    if place == "output":
        nonzero = out.hidden != 0
        assert torch.equal(nonzero, nonzero[:, :1].expand_as(nonzero))
        torch.testing.assert_close(out.hidden[nonzero], 2 * plain[nonzero])


# Penalties


def test_penalty_is_ar_of_dropped_and_tar_of_full_outputs() -> None:
    ids = some_ids()
    full = small_model()(ids, small_model().initial_state(4)).hidden
    model = small_model(output_dropout=0.5, ar_weight=2.0, tar_weight=3.0)
    out = model(ids, model.initial_state(4))
    activation = 2.0 * sum(x**2 for x in out.hidden.flatten().tolist()) / out.hidden.numel()
    steps = (full[:, 1:] - full[:, :-1]).flatten().tolist()
    temporal = 3.0 * sum(x**2 for x in steps) / len(steps)
    assert out.penalty.item() == pytest.approx(activation + temporal, rel=1e-5)
    assert out.penalty.requires_grad
    one_step = small_model(tar_weight=3.0)(ids[:, :1], model.initial_state(4))
    assert one_step.penalty == 0.0


# Types


def test_bf16_autocast_trains() -> None:
    model, ids = small_model(**dict.fromkeys(QUIET, 0.1)), some_ids()
    exact = model.eval()(ids, model.initial_state(4)).hidden
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model(ids, model.initial_state(4)).hidden
    torch.testing.assert_close(rough.float(), exact, rtol=0.05, atol=0.01)
    model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(ids, model.initial_state(4))
        out = model(ids, out.state)
        loss = model.embedding.cross_entropy(out.hidden, ids) + out.penalty
    loss.backward()
    assert out.hidden.dtype == (torch.bfloat16 if cpu_has_bf16() else torch.float32)
    assert out.penalty.dtype == torch.float32
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_computes_the_same_and_trains_with_dropped_weights() -> None:
    model, ids = small_model().eval(), some_ids()
    wanted = model(ids, model.initial_state(4)).hidden
    model.cuda()
    hidden = model(ids.cuda(), model.initial_state(4)).hidden
    torch.testing.assert_close(hidden.cpu(), wanted, rtol=1e-3, atol=1e-4)
    regular = small_model(**dict.fromkeys(QUIET, 0.5)).cuda()
    out = regular(ids.cuda(), regular.initial_state(4))
    (regular.embedding.cross_entropy(out.hidden, ids.cuda()) + out.penalty).backward()
    for layer in regular.layers:
        assert 0.2 < (layer.weight_hh_l0.grad == 0).float().mean().item() < 0.8
