"""Relative attention against the four terms written out in loops; its parts against hand-computed cases."""

import math

import pytest
import torch

from lm.models.relative_attention import RelativeAttention, by_key, geometry, sinusoids

CPU = torch.device("cpu")


def looped_attention(attention, hidden, context, u, v, reach=None, clamp=None):
    """The attention as section 3.3 writes it, one query and key at a time, in plain numbers."""
    heads, width, dim = attention.num_heads, attention.head_dim, hidden.size(-1)
    memory = context.size(1) - hidden.size(1)
    key_weight, value_weight = attention.key_value.weight.chunk(2)
    outputs = torch.zeros_like(hidden)
    for row in range(hidden.size(0)):
        for i in range(hidden.size(1)):
            gathered = []
            for head in range(heads):
                part = slice(head * width, (head + 1) * width)
                query = attention.query.weight[part] @ hidden[row, i]
                scores, values = [], []
                for j in range(memory + i + 1):
                    distance = memory + i - j
                    if reach is not None and distance > reach:
                        continue
                    if clamp is not None:
                        distance = min(distance, clamp)
                    key = key_weight[part] @ context[row, j]
                    place = attention.position.weight[part] @ looped_sinusoid(distance, dim)
                    terms = (
                        query @ key,  # (a) content
                        query @ place,  # (b) position, by content
                        u[head] @ key,  # (c) global content bias
                        v[head] @ place,  # (d) global position bias
                    )
                    scores.append(sum(terms) / math.sqrt(width))
                    values.append(value_weight[part] @ context[row, j])
                weights = torch.stack(scores).softmax(0)
                gathered.append(sum(weight * value for weight, value in zip(weights, values)))
            outputs[row, i] = attention.output.weight @ torch.cat(gathered)
    return outputs


def looped_sinusoid(distance, dim):
    half = dim // 2
    angles = [distance / 10000 ** (2 * k / dim) for k in range(half)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


@pytest.fixture
def setting():
    torch.manual_seed(3)
    attention = RelativeAttention(6, 2, 4, dropout=0.0).double()
    context = torch.randn(2, 7, 6, dtype=torch.float64)
    u, v = torch.randn(2, 2, 4, dtype=torch.float64)
    return attention, context, u, v


@pytest.mark.parametrize("memory", [0, 3, 6])
@pytest.mark.parametrize("limits", [{}, {"reach": 2}, {"clamp": 2}, {"reach": 3, "clamp": 1}, {"reach": 0}])
def test_attention_is_the_four_terms(setting, memory, limits):
    attention, context, u, v = setting
    hidden = context[:, memory:]
    places = geometry(hidden.size(1), memory, 6, CPU, **limits)
    places = places._replace(encodings=places.encodings.double())
    expected = looped_attention(attention, hidden, context, u, v, **limits)
    # The encodings are computed in single precision.
    torch.testing.assert_close(attention(hidden, context, places, u, v), expected, atol=1e-5, rtol=1e-5)


def test_gradients_are_those_of_the_loops(setting):
    attention, context, u, v = setting
    u.requires_grad_()
    v.requires_grad_()
    learned = [u, v, *attention.parameters()]
    places = geometry(4, 3, 6, CPU)
    places = places._replace(encodings=places.encodings.double())
    weights = torch.randn(2, 4, 6, dtype=torch.float64)
    loss = (attention(context[:, 3:], context, places, u, v) * weights).sum()
    expected = (looped_attention(attention, context[:, 3:], context, u, v) * weights).sum()
    for ours, theirs in zip(
        torch.autograd.grad(loss, learned), torch.autograd.grad(expected, learned), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("reach", [None, 3])
def test_flex_attention_has_the_same_values_and_gradients(setting, reach, monkeypatch):
    # Outside of GPUs, flex attention runs as plain operations; only its check of the device is in the way.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    attention, context, u, v = setting
    learned = [u.requires_grad_(), v.requires_grad_(), *attention.parameters()]
    weights = torch.randn(2, 4, 6, dtype=torch.float64)
    results = []
    for kernel in ("sdpa", "flex"):
        places = geometry(4, 3, 6, CPU, reach, kernel=kernel)
        places = places._replace(encodings=places.encodings.double())
        attended = attention(context[:, 3:], context, places, u, v)
        results.append((attended, torch.autograd.grad((attended * weights).sum(), learned)))
    torch.testing.assert_close(results[1], results[0])


def test_by_key_moves_scores_to_the_distances():
    # Two queries after one remembered position: K = 3, columns are the distances 2, 1, 0, -1.
    scores = torch.tensor([[12.0, 11.0, 10.0, -1.0], [22.0, 21.0, 20.0, -1.0]])
    aligned = by_key(scores)
    assert aligned.shape == (2, 3)
    assert aligned[0, :2].tolist() == [11.0, 10.0]
    assert aligned[1].tolist() == [22.0, 21.0, 20.0]
    assert aligned.data_ptr() == scores[0, 1:].data_ptr()


def test_geometry_hides_the_future_and_what_is_out_of_reach():
    assert geometry(2, 1, 4, CPU).hidden_keys.tolist() == [[False, False, True], [False, False, False]]
    reach_one = geometry(3, 1, 4, CPU, reach=1).hidden_keys
    assert reach_one.tolist() == [
        [False, False, True, True],
        [True, False, False, True],
        [True, True, False, False],
    ]


def test_clamped_distances_look_the_same():
    encodings = geometry(3, 2, 4, CPU, clamp=2).encodings
    assert torch.equal(encodings[0], encodings[2])
    assert not torch.equal(encodings[2], encodings[3])


def test_sinusoids_by_hand():
    encodings = sinusoids(torch.tensor([0, 1]), 4)
    expected = [[0.0, 0.0, 1.0, 1.0], [math.sin(1), math.sin(0.01), math.cos(1), math.cos(0.01)]]
    torch.testing.assert_close(encodings, torch.tensor(expected))
