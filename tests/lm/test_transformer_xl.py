"""Transformer-XL: memory, causality, initial state, published sizes."""

import dataclasses

import pytest
import torch

import shared_embeddings as se
from lm import models
from lm.models.transformer_xl import TransformerXL, TransformerXLOptions

WORDS = [f"w{number}" for number in range(50)]
SMALL = {
    "embedding_dim": 12,
    "num_layers": 2,
    "num_heads": 2,
    "head_dim": 5,
    "feed_forward_dim": 16,
    "memory_length": 6,
}
UNIT = {"method": "define", "map_dim": 4, "expand_dim": 8, "depth": 2, "max_groups": 2}


def small_model(embedding=None, **options):
    torch.manual_seed(7)
    model = models.build("transformer_xl", WORDS, embedding or {"method": "standard"}, {**SMALL, **options})
    # Weights as small as the published ones would hide errors in layers with residual connections.
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.mul_(10.0)
        model.content_bias.normal_()
        model.position_bias.normal_()
    return model.double().eval()


def some_ids(length, batch=3, seed=1):
    return torch.randint(len(WORDS), (batch, length), generator=torch.Generator().manual_seed(seed))


def run(model, ids, lengths):
    """The hidden states of `ids`, read in segments of these lengths."""
    state, parts = model.initial_state(ids.size(0)), []
    for segment in ids.split(lengths, dim=1):
        output = model(segment, state)
        state = output.state
        parts.append(output.hidden)
    return torch.cat(parts, dim=1), state


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("lengths", [[4, 4, 4], [1] * 12, [5, 1, 6], [11, 1]])
def test_segments_with_memory_equal_one_long_segment(norm, lengths):
    model = small_model(norm=norm, memory_length=12)
    ids = some_ids(12)
    whole, _ = run(model, ids, [12])
    parts, _ = run(model, ids, lengths)
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("lengths", [[4, 4, 4, 4], [1] * 16, [3, 7, 2, 4]])
def test_with_same_length_segments_do_not_matter(lengths):
    # Positions attend to at most the memory length, so results do not depend on segments even beyond it.
    model = small_model(same_length=True, memory_length=3, clamp_length=2)
    ids = some_ids(16)
    whole, _ = run(model, ids, [16])
    parts, _ = run(model, ids, lengths)
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("lengths", [[9], [4, 5], [8, 1]])
def test_same_length_attends_to_the_word_and_the_memory_length_before_it(lengths):
    # With one layer, the context does not grow through other positions.
    model = small_model(same_length=True, memory_length=3, num_layers=1)
    ids = some_ids(9)
    before, _ = run(model, ids, lengths)
    seen = []
    for position in range(9):
        changed = ids.clone()
        changed[:, position] = (ids[:, position] + 1) % len(WORDS)
        after, _ = run(model, changed, lengths)
        seen.append(bool((after[:, 8] - before[:, 8]).abs().max() > 1e-6))
    assert seen == [False] * 5 + [True] * 4


def test_dropout_applies_to_the_last_hidden_states():
    model = small_model(dropout=0.5).train()
    state = model.initial_state(3)
    torch.manual_seed(5)
    dropped = model(some_ids(40), state).hidden
    # A normalization never gives exact zeros.
    assert (dropped == 0).double().mean().item() == pytest.approx(0.5, abs=0.05)
    # The remaining values are twice as large: normalized values have a mean square of one.
    scale = dropped[dropped != 0].square().mean().sqrt().item()
    plain = small_model(dropout=0.5)(some_ids(40), state).hidden
    assert scale == pytest.approx(2 * plain.square().mean().sqrt().item(), rel=0.1)


def test_memory_grows_from_empty_to_its_length_and_holds_the_last_inputs():
    model = small_model()
    ids, state, sizes = some_ids(12), model.initial_state(3), []
    for segment in ids.split([2, 3, 4, 3], dim=1):
        state = model(segment, state).state
        sizes.append([tuple(memory.shape) for memory in state])
    assert sizes == [[(length, 3, 12)] * 2 for length in (2, 5, 6, 6)]
    assert all(memory.untyped_storage().nbytes() == memory.nbytes for memory in state)
    torch.testing.assert_close(state[0], (model.embedding(ids[:, -6:]) * 12**0.5).transpose(0, 1))


def test_memory_length_zero_forgets():
    model = small_model(memory_length=0)
    ids = some_ids(8)
    parts, state = run(model, ids, [4, 4])
    alone, _ = run(model, ids[:, 4:], [4])
    torch.testing.assert_close(parts[:, 4:], alone)
    assert [memory.size(0) for memory in state] == [0, 0]


def test_memory_length_can_be_set_for_evaluation():
    model = small_model()
    _, state = run(model, some_ids(12), [12])
    model.memory_length = 2
    state = model(some_ids(1), state).state
    assert state[0].size(0) == 2
    model.memory_length = 9
    state = model(some_ids(4), state).state
    assert state[0].size(0) == 6


def test_no_gradient_flows_into_the_memory():
    model = small_model()
    first = model(some_ids(4), model.initial_state(3))
    assert first.hidden.requires_grad
    assert not any(memory.requires_grad for memory in first.state)
    second = model(some_ids(4, seed=2), first.state)
    used = torch.autograd.grad(second.hidden.sum(), first.hidden, allow_unused=True)
    assert used == (None,)


def test_clamping_changes_far_positions_only():
    model, clamped = small_model(), small_model(clamp_length=3)
    ids = some_ids(8)
    free, _ = run(model, ids, [8])
    near, _ = run(clamped, ids, [8])
    torch.testing.assert_close(near[:, :4], free[:, :4])
    assert (near[:, 4:] - free[:, 4:]).abs().max() > 1e-4


def test_every_parameter_learns_and_dropout_acts():
    model = small_model(dropout=0.2, attention_dropout=0.2).train()
    ids = some_ids(8)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(run(model, ids, [4, 4])[0])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    model.embedding.cross_entropy(outputs[2], some_ids(8, seed=2)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_initialization_is_as_published():
    torch.manual_seed(1)
    options = {**SMALL, "embedding_dim": 128, "feed_forward_dim": 256}
    model = models.build("transformer_xl", WORDS, {"method": "standard"}, options)
    for name, parameter in model.layers.named_parameters():
        if "norm" in name:
            assert (parameter == (1.0 if name.endswith("weight") else 0.0)).all()
        elif name.endswith("bias"):
            assert (parameter == 0.0).all()
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name


def test_autocast_to_bfloat16_is_close():
    model = small_model().float()
    ids = some_ids(8)
    exact, _ = run(model, ids, [4, 4])
    with torch.autocast("cpu", torch.bfloat16):
        rough, state = run(model, ids, [4, 4])
        loss = model.embedding.cross_entropy(rough, some_ids(8, seed=2))
    loss.backward()
    assert (rough - exact).abs().max() < 0.2
    assert torch.isfinite(loss) and all(memory.dtype == torch.float32 for memory in state)


@pytest.mark.parametrize(
    "embedding",
    [
        {"method": "projective", "rank": 4},
        {"method": "adaptive", "cutoffs": [10, 30], "factor": 2},
        {"method": "adaptive", "cutoffs": [10, 30], "factor": 1, "width": 4},
        {**UNIT, "map": "adaptive", "cutoffs": [10, 30], "factor": 1, "score_dim": 12, "tie": "tables"},
        {**UNIT, "output_projection": True},
        {"method": "funnel", "rank": 4},
    ],
)
def test_shared_embeddings_fit(embedding):
    model = small_model(embedding).train()
    output = model(some_ids(5), model.initial_state(3))
    loss = model.embedding.cross_entropy(output.hidden, some_ids(5, seed=2))
    loss.backward()
    assert torch.isfinite(loss) and output.penalty.item() == 0.0


@pytest.mark.parametrize(
    ("dim", "inner", "millions"),
    [(410, 2100, 41.07), (384, 1920, 36.25)],
    ids=["first row", "other rows"],
)
def test_context_model_has_the_size_of_table_2(dim, inner, millions):
    """DeFINE, Table 2: 16 layers, 10 heads of 41."""
    options = dataclasses.replace(TransformerXLOptions(), embedding_dim=dim, feed_forward_dim=inner)
    with torch.device("meta"):
        embedding = se.build("standard", num_embeddings=50, embedding_dim=dim)
        model = TransformerXL(embedding, options)
    total = sum(parameter.numel() for parameter in model.parameters()) - 50 * dim
    assert round(total / 1e6, 2) == millions


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("options", [{}, {"same_length": True, "memory_length": 40, "clamp_length": 30}])
def test_a_gpu_computes_the_same_with_either_attention(options):
    ids = some_ids(140, seed=2)
    results = []
    for attention, device in (("sdpa", "cpu"), ("sdpa", "cuda"), ("flex", "cuda")):
        model = small_model(attention=attention, head_dim=16, **options).float().to(device)
        hidden, _ = run(model, ids.to(device), [100, 40])
        learned = [model.content_bias, model.position_bias, *model.layers.parameters()]
        gradients = torch.autograd.grad(hidden.square().sum(), learned)
        results.append([hidden.cpu(), *(gradient.cpu() for gradient in gradients)])
    for found in results[1:]:
        for one, expected in zip(found, results[0], strict=True):
            assert (one - expected).norm() <= 0.02 * expected.norm() + 1e-4
