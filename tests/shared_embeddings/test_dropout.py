"""Dropout from masks of random words, and dropout after ALONE's ReLU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shared_embeddings as se
from shared_embeddings.modules.alone import AloneEmbedding
from shared_embeddings.nn.layers import Dropout, keep_mask

from .cases import Case, by_name
from .support import assert_same_gradients, gradients


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.65])
def test_masks_are_random_numbers_with_the_right_mean(probability: float) -> None:
    torch.manual_seed(0)
    mask = keep_mask(torch.zeros(()), (301, 997), probability)
    values, counts = mask.unique(return_counts=True)
    torch.testing.assert_close(values, torch.tensor([0.0, 1 / (1 - probability)]))
    # Four standard deviations of a binomial share.
    noise = 4 * (probability * (1 - probability) / mask.numel()) ** 0.5
    assert counts[0] / mask.numel() == pytest.approx(probability, abs=noise)
    dropped = (mask == 0).float().flatten() - probability
    for lag in (1, 2, 3, 4, 997):
        assert (dropped[lag:] * dropped[:-lag]).mean().item() == pytest.approx(0, abs=noise)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_kept_entries_and_their_gradients_are_scaled(dtype: torch.dtype) -> None:
    layer, inputs = Dropout(0.5), torch.randn(50, 4, 15, dtype=dtype, requires_grad=True)
    torch.manual_seed(1)
    first, second = layer(inputs), layer(inputs)
    torch.manual_seed(1)
    assert torch.equal(layer(inputs), first) and not torch.equal(first, second)
    first.sum().backward()
    assert first.dtype == dtype and first.shape == inputs.shape
    assert torch.equal(first, torch.where(first != 0, inputs * 2, 0))
    assert torch.equal(inputs.grad, (first != 0).to(dtype) * 2)


@pytest.mark.parametrize(("probability", "left"), [(0.0, 1.0), (0.3, None), (1.0, 0.0)])
def test_evaluation_drops_nothing_and_extremes_are_exact(probability: float, left: float | None) -> None:
    inputs = torch.randn(4, 5)
    assert torch.equal(Dropout(probability).eval()(inputs), inputs)
    if left is not None:
        assert torch.equal(Dropout(probability)(inputs), inputs * left)


def test_other_devices_use_their_own_kernel() -> None:
    inputs = torch.ones(3, 4, device="meta")
    assert Dropout(0.5)(inputs).shape == F.dropout(inputs, 0.5).shape


FILTERS = ["alone-real", "alone-binary"]
HALF = {"relu_dropout": 0.5}
IN_A_MAP: dict[str, Any] = {
    "map_dim": 16,
    "expand_dim": 48,
    "depth": 3,
    "map": "alone",
    "hidden_dim": 40,
    "codebook_size": 5,
}


def dropping(case: Case, **options: Any) -> se.SharedEmbedding:
    """The embedding of a row with dropout, in training."""
    return case.build(0, options=case.options | HALF | options).train()


def in_a_map(**options: Any) -> se.SharedEmbedding:
    """A DeFINE unit on an ALONE map, in training."""
    torch.manual_seed(0)
    return se.build(
        "define", num_embeddings=37, embedding_dim=24, padding_idx=3, **IN_A_MAP, **options
    ).train()


def masks(emb: Any, ids: torch.Tensor) -> torch.Tensor:
    """Which nonzero hidden units ``(N, H)`` of tokens ``(N,)`` dropout has kept."""
    drawn: list[torch.Tensor] = []
    handle = emb.relu_dropout.register_forward_hook(lambda module, args, out: drawn.append(out != 0))
    emb(ids)
    handle.remove()
    return drawn[0]


@pytest.mark.parametrize("name", FILTERS)
def test_the_output_side_has_no_dropout(name: str) -> None:
    case = by_name(name)
    plain, emb = case.build(0).train(), dropping(case)
    hidden, targets = torch.randn(6, case.embedding_dim), torch.randint(0, case.num_embeddings, (6,))
    for actual, expected in (
        (emb.logits(hidden), plain.logits(hidden)),
        (emb.log_prob(hidden), plain.log_prob(hidden)),
        (emb.output_table(), plain.output_table()),
        (emb.table(), plain.table()),
    ):
        assert torch.equal(actual, expected)
    loss, expected = emb.cross_entropy(hidden, targets), plain.cross_entropy(hidden, targets)
    assert torch.equal(loss, expected)
    assert_same_gradients(gradients(emb, loss), gradients(plain, expected))


@pytest.mark.parametrize("name", FILTERS)
def test_tokens_with_dropout_are_as_in_the_formula(name: str) -> None:
    """``W2 dropout(max(0, W1 (m_w * o)))`` of every token, with the masks that were drawn."""
    case = by_name(name)
    emb: Any = dropping(case).double()
    ids = torch.tensor([[5, 11, 3], [5, 2, 5]])
    torch.manual_seed(1)
    mask = masks(emb, ids)
    assert not torch.equal(mask[0], mask[3]) and not torch.equal(mask[0], mask[5])  # tokens of one word
    torch.manual_seed(1)
    vectors = emb(ids)
    filters = sum(book[emb.codes[ids.flatten(), place].long()] for place, book in enumerate(emb.codebooks))
    filters = (filters > 0).double() if case.options["filter"] == "binary" else filters
    units = F.relu((filters * emb.base) @ emb.first.T) * mask / 0.5
    expected = (units @ emb.second.T * (ids.flatten() != 3)[:, None]).view(2, 3, -1)
    torch.testing.assert_close(vectors, expected)
    assert_same_gradients(gradients(emb, vectors.square().sum()), gradients(emb, expected.square().sum()))


def test_a_map_drops_for_every_token_on_the_input_side() -> None:
    plain, emb = in_a_map(), in_a_map(**HALF)
    ids = torch.tensor([5, 11, 5, 3])
    vectors = emb(ids)
    assert not torch.allclose(vectors[0], vectors[2])
    assert vectors[3].abs().max() == 0
    hidden = torch.randn(4, emb.score_dim)
    assert torch.equal(emb.logits(hidden), plain.logits(hidden))
    assert torch.equal(emb.table(), plain.table())
    assert torch.equal(emb.eval()(ids), plain.eval()(ids))
    whole, without = in_a_map(**HALF, output="table"), in_a_map(output="table")
    hidden = torch.randn(4, 24)
    assert torch.equal(whole.logits(hidden), without.logits(hidden))


@pytest.mark.parametrize(
    "make", [lambda **o: dropping(by_name("alone-real"), **o), lambda **o: in_a_map(**HALF, **o)]
)
def test_dropout_ends_after_its_updates(make: Any) -> None:
    emb = make(relu_dropout_steps=3)
    model = torch.nn.Sequential(emb, torch.nn.Dropout(0.25))
    ids = torch.tensor([5, 5])

    def drops() -> bool:
        first, second = emb(ids)
        return not torch.equal(first, second)

    due = []
    for done in range(5):
        se.set_updates(model, done)
        due.append(drops())
    assert due == [True, True, True, False, False]
    assert model[1].p == 0.25
    se.set_updates(model, 2)
    assert drops()
    forever = make()
    se.set_updates(forever, 10**9)
    first, second = forever.train()(torch.tensor([5, 5]))
    assert not torch.equal(first, second)


def test_dropout_ends_in_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    token_rows = AloneEmbedding.token_rows

    def noted(self: AloneEmbedding, *args: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and self.training:
            seen.append(self.relu_dropout.p > 0)
        return token_rows(self, *args)

    monkeypatch.setattr(AloneEmbedding, "token_rows", noted)
    options = {"hidden_dim": 40, "relu_dropout": 0.5, "relu_dropout_steps": 3}
    se.fit("alone", torch.randn(37, 24), steps=5, progress=False, **options)  # type: ignore[arg-type]
    assert seen == [True] * 3 + [False] * 2


def test_a_compiled_model_is_compiled_again_only_where_dropout_ends() -> None:
    emb = dropping(by_name("alone-real"), relu_dropout_steps=3)
    compiled: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        compiled.append(module)
        return module.forward

    torch.compiler.reset()
    look_up = torch.compile(lambda ids: emb(ids), backend=backend)
    ids, graphs, drops = torch.tensor([5, 5]), [], []
    for done in range(8):
        se.set_updates(emb, done)
        first, second = look_up(ids)
        drops.append(not torch.equal(first, second))
        graphs.append(len(compiled))
    assert drops == [True] * 3 + [False] * 5
    assert graphs[0] == graphs[2] and graphs[3] == graphs[7]
