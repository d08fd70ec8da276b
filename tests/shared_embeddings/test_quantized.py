"""Tests of `quantized`: the bits of words, packed rows, scores, and rounding in training."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import Tensor

import shared_embeddings as se
from shared_embeddings.accounting import distinct_state
from shared_embeddings.compress.straight_through import quantize_in_training
from shared_embeddings.methods.quantized import QuantizedEmbedding
from shared_embeddings.quant.codec import Codec, codecs
from shared_embeddings.quant.packed_tensor import install, unfreeze
from shared_embeddings.quant.storage import hold, pack
from shared_embeddings.utils.options import OptionError

WORDS, DIM = 300, 48
CODECS = sorted(codecs().keys() - {"principal"})  # whose words without bits are not zero
COUNTS = 1e6 / torch.arange(1, WORDS + 1).double().square()


def table() -> Tensor:
    return torch.randn(WORDS, DIM, generator=torch.Generator().manual_seed(2))


def fitted(counts: Tensor | None = None, **options: object) -> QuantizedEmbedding:
    embedding, _ = se.fit("quantized", table(), token_counts=counts, progress=False, **options)
    assert isinstance(embedding, QuantizedEmbedding)
    return embedding


def stored_bits(embedding: se.SharedEmbedding) -> int:
    return embedding.counts()["stored_bits"]


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_a_fit_takes_at_most_the_bytes_of_its_options(codec: str) -> None:
    for bits in (0.75, 2, 2.6):
        options = {"bits": bits, "codec": codec}
        plain = se.build("quantized", num_embeddings=WORDS, embedding_dim=DIM, **options)
        for counts in (None, COUNTS.float()):
            found = stored_bits(fitted(counts, **options))
            least = 0.6 if codec == "residual" else 0.93  # another codebook may not fit
            assert least * stored_bits(plain) < found <= stored_bits(plain), (bits, counts is None)


def test_frequent_words_get_more_bits() -> None:
    """The rows all have about the same norm."""
    embedding, plain = fitted(COUNTS, bits=2.0), fitted(COUNTS, bits=2.0, count_exponent=0.0)
    widths, weights = embedding.widths.float(), COUNTS.unsqueeze(1)
    errors = [((one.table() - table()).square() * weights).sum() for one in (embedding, plain)]
    assert errors[0] < 0.5 * errors[1] and stored_bits(embedding) <= stored_bits(plain)
    assert float(widths[:30].mean()) > 3 > float(widths[100:200].mean()) >= 1 >= float(widths[200:].min())
    assert len(plain.word_counts) == 1
    assert len(fitted(None, bits=2.0).word_counts) == 1


def test_words_without_bits_are_zero() -> None:
    embedding = fitted(COUNTS, bits=0.75)
    rows = embedding.table()
    is_zero = embedding.widths == 0
    assert 0 < int(is_zero.sum()) < WORDS
    assert torch.equal((rows == 0).all(dim=1), is_zero)


@pytest.mark.parametrize("codec", CODECS)
def test_evaluation_never_builds_the_table(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = fitted(COUNTS, bits=2.5, codec=codec).eval()
    hidden, targets = torch.randn(7, DIM), torch.randint(WORDS, (7,))
    wanted = hidden @ embedding.table().t()

    def fail(*_: object) -> None:
        raise AssertionError("the dense table was built")

    with monkeypatch.context() as patched, torch.no_grad():
        for name in ("all_rows", "output_factors", "table"):
            patched.setattr(QuantizedEmbedding, name, fail)
        patched.setattr(sys.modules[Codec.__module__], "BLOCK", 64)
        torch.testing.assert_close(embedding.logits(hidden), wanted, rtol=1e-4, atol=1e-4)
        loss = torch.nn.functional.cross_entropy(wanted, targets)
        torch.testing.assert_close(embedding.cross_entropy(hidden, targets), loss, rtol=1e-4, atol=1e-4)
        assert embedding(targets).shape == (7, DIM)


@pytest.mark.parametrize("codec", codecs())
def test_all_widths_in_every_dtype(codec: str) -> None:
    """Training and packed form, among them words without bits and with fractions of a bit."""
    targets = torch.arange(0, WORDS, 20)
    for bits in (0.75, 2.5):
        made = fitted(COUNTS, bits=bits, codec=codec)
        assert len(made.word_counts) > 1 and (bits > 1 or codec == "principal" or 0 in made.word_counts)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            rounded = copy.deepcopy(made).to(dtype).eval()
            held = copy.deepcopy(rounded)
            state = distinct_state(held)
            held.load_state_dict(install(held, hold(pack(state, state, "fp16"))), strict=False)
            loose = {"rtol": 0.1, "atol": 0.3} if dtype.itemsize == 2 else {"rtol": 1e-3, "atol": 1e-3}
            for embedding in (rounded, held):
                exact = copy.deepcopy(embedding)
                unfreeze(exact)
                exact.double()
                for number in (1, 15):
                    hidden = torch.randn(number, DIM).to(dtype)
                    wanted = exact.logits(hidden.double()).detach()
                    with torch.no_grad():
                        found = embedding.logits(hidden)
                        assert found.dtype == embedding(targets).dtype == embedding.table().dtype == dtype
                        torch.testing.assert_close(found.double(), wanted, **loose)
                    hidden.requires_grad_()
                    loss = embedding.cross_entropy(hidden, targets[:number])
                    loss.backward()
                    assert hidden.grad is not None and hidden.grad.dtype == dtype
                    exact_loss = torch.nn.functional.cross_entropy(wanted, targets[:number])
                    torch.testing.assert_close(loss.double(), exact_loss, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("codec", codecs())
def test_tables_of_any_size_and_content(codec: str) -> None:
    """Among them some in which no word has codes, since one codebook takes more bytes than the table."""
    for words, dim in ((1, 1), (1, 8), (2, 1), (2, 64), (3, 5), (50, 1)):
        for rows in (torch.randn(words, dim), torch.zeros(words, dim), torch.ones(words, dim)):
            for bits in (0.25, 8.0):
                for counts in (None, torch.arange(words, 0, -1)):
                    options = {"bits": bits, "codec": codec, "padding_idx": 0 if bits < 1 else None}
                    made, _ = se.fit("quantized", rows, token_counts=counts, progress=False, **options)
                    assert made.table().isfinite().all()
                    with torch.no_grad():
                        assert made.eval().logits(torch.randn(2, dim)).isfinite().all()


@pytest.mark.parametrize("codec", CODECS)
def test_words_can_be_removed(codec: str) -> None:
    embedding = fitted(COUNTS, bits=1.5, codec=codec)
    # Then one of the widths only, then one word.
    for kept in (torch.arange(0, WORDS, 3), (embedding.widths == 2).nonzero().flatten(), torch.tensor([299])):
        part = embedding.select_rows(kept)
        torch.testing.assert_close(part.table(), embedding.table()[kept], rtol=1e-5, atol=1e-6)


def test_training_moves_scales_and_levels_but_no_codes() -> None:
    embedding = fitted(bits=2.0, codec="lloyd_max")
    before = {name: tensor.clone() for name, tensor in embedding.state_dict().items()}
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    embedding.cross_entropy(torch.randn(20, DIM), torch.randint(WORDS, (20,))).backward()
    optimizer.step()
    changed = {
        name for name, tensor in embedding.state_dict().items() if not torch.equal(tensor, before[name])
    }
    assert changed == {"row_scales", "levels2"}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bits": 0.2}, "from 0.25 to 8"),
        ({"bits": 9}, "from 0.25 to 8"),
        ({"bits": 4, "group_size": 64}, "no effect with codec trellis"),
        ({"bits": 4, "count_exponent": 2}, "from 0 to 1"),
        ({"bits": 4, "codec": "huffman"}, "huffman"),
        ({"bits": 4, "words_per_width": [1, 2]}, "11 numbers that add up to 300"),
        ({"bits": 4, "words_per_width": [0, 0, 0, 0, 299, 0, 0, 0, 0]}, "11 numbers that add up to 300"),
    ],
)
def test_option_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        se.build("quantized", num_embeddings=WORDS, embedding_dim=DIM, **options)


ROWS, WIDTH = 60, 16
IDS = torch.tensor([1, 5, 5, 40])


def embedding(done: list[int], counts: Tensor | None = None, **given: object) -> se.SharedEmbedding:
    torch.manual_seed(1)
    table = se.build("standard", num_embeddings=ROWS, embedding_dim=WIDTH, padding_idx=0)
    options = {"bits": 2, "codec": "lloyd_max", **given}
    quantize_in_training(table, options, counts, lambda: done[0], seed=3)
    return table


def rounded(table: se.SharedEmbedding, counts: Tensor | None = None, **options: object) -> Tensor:
    """The table that `quantized` stores for a plain table."""
    given = {"bits": 2, "codec": "lloyd_max", **options}
    plain = dict(table.named_parameters())["weight"].detach()
    fitted, _ = se.fit("quantized", plain, token_counts=counts, padding_idx=0, progress=False, **given)
    return fitted.table().detach()


def test_rows_equal_quantized_and_gradients_pass_through() -> None:
    counts = 1e4 / torch.arange(1, ROWS + 1)
    for options in ({}, {"codec": "uniform", "group_size": 8}, {"codec": "trellis", "bits": 1.5}):
        table = embedding([0], counts, **options)
        wanted = rounded(table, counts, **options)
        plain = dict(table.named_parameters())["weight"]
        for is_training in (True, False):
            table.train(is_training)
            torch.testing.assert_close(table(IDS), wanted[IDS])
            torch.testing.assert_close(table.logits(torch.eye(WIDTH)), wanted.t())
        table.train()(IDS).sum().backward()
        assert plain.grad is not None
        assert plain.grad[:, 0].tolist() == torch.bincount(IDS, minlength=ROWS).tolist()


def test_codes_follow_the_table() -> None:
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


def test_a_share_of_the_words_is_rounded_per_step() -> None:
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
        torch.testing.assert_close(table.table(), found)  # the same words on both sides in a step
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
