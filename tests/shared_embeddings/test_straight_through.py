"""Tables that are rounded in training, with gradients straight to them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shared_embeddings as se
from shared_embeddings.fitting.straight_through import quantize_in_training

WORDS, DIM = 60, 16
IDS = torch.tensor([1, 5, 5, 40])


def embedding(done: list[int], counts: Tensor | None = None, **given: object) -> se.SharedEmbedding:
    torch.manual_seed(1)
    table = se.build("standard", num_embeddings=WORDS, embedding_dim=DIM, padding_idx=0)
    options = {"bits": 2, "codec": "lloyd_max", **given}
    quantize_in_training(table, options, counts, lambda: done[0], seed=3)
    return table


def rounded(table: se.SharedEmbedding, counts: Tensor | None = None, **options: object) -> Tensor:
    """What `quantized` stores for the plain table."""
    given = {"bits": 2, "codec": "lloyd_max", **options}
    plain = dict(table.named_parameters())["weight"].detach()
    fitted, _ = se.fit("quantized", plain, token_counts=counts, padding_idx=0, progress=False, **given)
    return fitted.table().detach()


def test_the_rows_are_those_that_quantized_stores_and_gradients_those_of_the_table() -> None:
    counts = 1e4 / torch.arange(1, WORDS + 1)
    for options in ({}, {"codec": "uniform", "group_size": 8}, {"codec": "trellis", "bits": 1.5}):
        table = embedding([0], counts, **options)
        wanted = rounded(table, counts, **options)
        plain = dict(table.named_parameters())["weight"]
        for is_training in (True, False):
            table.train(is_training)
            torch.testing.assert_close(table(IDS), wanted[IDS])
            torch.testing.assert_close(table.logits(torch.eye(DIM)), wanted.t())
        table.train()(IDS).sum().backward()
        assert plain.grad is not None
        assert plain.grad[:, 0].tolist() == torch.bincount(IDS, minlength=WORDS).tolist()


def test_codes_follow_the_table_from_step_to_step() -> None:
    table = embedding([0]).train()
    before = table(IDS).detach()
    with torch.no_grad():
        dict(table.named_parameters())["weight"].mul_(-1)
    torch.testing.assert_close(table(IDS), rounded(table)[IDS])
    assert not torch.equal(table(IDS), before)


def test_rounding_starts_at_a_step() -> None:
    done = [9]
    table = embedding(done, quantize_from_step=10).train()
    plain = dict(table.named_parameters())["weight"]
    assert torch.equal(table(IDS), plain[IDS])
    assert torch.equal(table.eval()(IDS), plain[IDS])
    done[0] = 10
    torch.testing.assert_close(table.train()(IDS), rounded(table)[IDS])


def test_rows_move_with_their_table_between_searches() -> None:
    done = [4]
    table = embedding(done, refresh_every=4).train()
    old = table(IDS).detach()
    with torch.no_grad():
        dict(table.named_parameters())["weight"].add_(0.25)
    done[0] = 7
    torch.testing.assert_close(table(IDS), old + 0.25)
    # Evaluation uses what would be stored, and so does the next search.
    torch.testing.assert_close(table.eval()(IDS), rounded(table)[IDS])
    done[0] = 8
    torch.testing.assert_close(table.train()(IDS), rounded(table)[IDS])


def test_a_share_of_the_words_is_rounded_in_a_step() -> None:
    done = [0]
    table = embedding(done, share=0.5).train()
    plain, wanted = dict(table.named_parameters())["weight"].detach(), rounded(table)
    chosen = []
    for step in range(2):
        done[0] = step
        found = table.table().detach()
        is_rounded = torch.isclose(found, wanted).all(dim=1)
        assert bool((is_rounded | torch.isclose(found, plain).all(dim=1)).all())
        chosen.append(is_rounded[1:])
        torch.testing.assert_close(table.table(), found)  # the same words in both uses of a step
    assert all(0.2 < float(one.float().mean()) < 0.8 for one in chosen)
    assert not torch.equal(*chosen)


def test_a_trained_state_is_that_of_a_plain_table() -> None:
    assert set(embedding([0]).state_dict()) == {"weight"}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"bitz": 2}, "unknown option .bitz.. Did you mean .bits."),
        ({"share": 0}, "option 'share' is 0, but it must be above 0 and at most 1"),
        ({"refresh_every": 0}, "refresh_every"),
        ({"seed": 1}, "'seed' cannot be set here"),
        ({"codec": "none"}, "codec"),
    ],
)
def test_wrong_options(given: dict[str, object], reason: str) -> None:
    with pytest.raises(se.OptionError, match="embedding_quantization: .*" + reason):
        embedding([0], **given)


def test_other_methods() -> None:
    funnel = se.build("funnel", num_embeddings=9, embedding_dim=4, rank=2)
    with pytest.raises(
        se.OptionError, match="rounds the table of method standard, but the embedding is funnel"
    ):
        quantize_in_training(funnel, {"bits": 2}, None, lambda: 0, seed=0)
