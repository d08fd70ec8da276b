"""What is special about `quantized`: the bits of words, packed rows, and scores without a dense table."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

import shared_embeddings as se
from shared_embeddings.codecs.codec import Codec
from shared_embeddings.methods.quantized import QuantizedEmbedding
from shared_embeddings.options import OptionError
from tests.helpers import in_turn

WORDS, DIM = 300, 48
CODECS = ("uniform", "lloyd_max", "residual", "trellis", "spectral")
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
@in_turn("codec", CODECS)
def test_a_fit_takes_no_more_bytes_than_its_options_say(codec: str) -> None:
    for bits in (0.75, 2, 2.6):
        options = {"bits": bits, "codec": codec}
        plain = se.build("quantized", num_embeddings=WORDS, embedding_dim=DIM, **options)
        for counts in (None, COUNTS.float()):
            found = stored_bits(fitted(counts, **options))
            least = 0.6 if codec == "residual" else 0.93  # a further codebook may not fit
            assert least * stored_bits(plain) < found <= stored_bits(plain), (bits, counts is None)


def test_frequent_words_get_more_bits() -> None:
    """The rows all have about the same norm."""
    widths = fitted(COUNTS, bits=2.0).widths.float()
    assert float(widths[:30].mean()) > 3 > float(widths[100:200].mean()) >= 1 >= float(widths[200:].min())
    assert len(fitted(COUNTS, bits=2.0, count_exponent=0.0).word_counts) == 1
    assert len(fitted(None, bits=2.0).word_counts) == 1


def test_counts_lower_the_error_of_frequent_words() -> None:
    even, by_count = (
        se.fit("quantized", table(), token_counts=COUNTS, progress=False, bits=2.0, **exponent)[1]
        for exponent in ({"count_exponent": 0.0}, {})
    )
    assert by_count.weighted_error is not None and even.weighted_error is not None
    assert by_count.weighted_error < 0.7 * even.weighted_error
    assert by_count.stored_bits <= even.stored_bits


def test_words_without_bits_are_zero() -> None:
    embedding = fitted(COUNTS, bits=0.75)
    rows = embedding.table()
    is_zero = embedding.widths == 0
    assert 0 < int(is_zero.sum()) < WORDS
    assert torch.equal((rows == 0).all(dim=1), is_zero)


@in_turn("codec", CODECS)
def test_evaluation_never_builds_the_table(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = fitted(COUNTS, bits=2.5, codec=codec).eval()
    hidden, targets = torch.randn(7, DIM), torch.randint(WORDS, (7,))
    wanted = hidden @ embedding.table().t()

    def fail(*_: object) -> None:
        raise AssertionError("the dense table was built")

    with monkeypatch.context() as patched, torch.no_grad():
        for name in ("all_rows", "output_factors", "table"):
            patched.setattr(QuantizedEmbedding, name, fail)
        patched.setattr(sys.modules[Codec.__module__], "_BLOCK", 64)
        torch.testing.assert_close(embedding.logits(hidden), wanted, rtol=1e-4, atol=1e-4)
        loss = torch.nn.functional.cross_entropy(wanted, targets)
        torch.testing.assert_close(embedding.cross_entropy(hidden, targets), loss, rtol=1e-4, atol=1e-4)
        assert embedding(targets).shape == (7, DIM)


def test_it_is_packed_in_memory() -> None:
    embedding = fitted(bits=2.0)
    held = sum(tensor.nbytes for tensor in (*embedding.parameters(), *embedding.buffers()))
    assert held < 1.2 * stored_bits(embedding) / 8


@in_turn("codec", CODECS)
def test_words_can_be_removed(codec: str) -> None:
    embedding = fitted(COUNTS, bits=1.5, codec=codec)
    # Then one of the widths only, then one word.
    for kept in (torch.arange(0, WORDS, 3), (embedding.widths == 2).nonzero().flatten(), torch.tensor([299])):
        part = embedding.select_rows(kept)
        assert torch.equal(part.table(), embedding.table()[kept])


def test_training_moves_scales_and_levels_but_no_codes() -> None:
    embedding = fitted(bits=2.0, codec="lloyd_max")
    before = {name: tensor.clone() for name, tensor in embedding.state_dict().items()}
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    embedding.cross_entropy(torch.randn(20, DIM), torch.randint(WORDS, (20,))).backward()
    optimizer.step()
    changed = {
        name for name, tensor in embedding.state_dict().items() if not torch.equal(tensor, before[name])
    }
    assert changed == {"scales", "levels2"}


@in_turn(
    "options, message",
    [
        ({"bits": 0.4}, "from 0.5 to 8"),
        ({"bits": 9}, "from 0.5 to 8"),
        ({"bits": 4, "group_size": 64}, "no effect with codec trellis"),
        ({"bits": 4, "count_exponent": 2}, "from 0 to 1"),
        ({"bits": 4, "codec": "huffman"}, "huffman"),
        ({"bits": 4, "words_per_width": [1, 2]}, "nine numbers that add up to 300"),
        ({"bits": 4, "words_per_width": [0, 0, 0, 0, 299, 0, 0, 0, 0]}, "nine numbers that add up to 300"),
    ],
)
def test_option_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        se.build("quantized", num_embeddings=WORDS, embedding_dim=DIM, **options)
