"""Parts of compression that need no host: counts, targets, bands, and who offers models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shared_embeddings as se
from shared_embeddings.checkpoints.adapter import GROUP, EmbeddingTable, copy_output_bias, teacher_table
from shared_embeddings.checkpoints.compress import Target
from shared_embeddings.checkpoints.fitted_tables import Errors
from shared_embeddings.checkpoints.token_counts import count_words, counts_of, read_counts
from shared_embeddings.sizing.targets import options_within, stored_bytes


def test_hosts_are_in_the_entry_points() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("tomllib is part of Python 3.11")
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][GROUP] == {
        "hf": "shared_embeddings.hf.adapter:Adapter",
        "lm": "lm.adapter:Adapter",
        "nmt": "nmt.adapter:Adapter",
        "vectors": "shared_embeddings.word_vectors.adapter:Adapter",
    }


def test_counts_of_words(tmp_path: Path) -> None:
    counts, text = tmp_path / "counts", tmp_path / "text"
    counts.write_text("a\t5\nb c\t2\nd 7\n")
    assert read_counts(counts) == {"a": 5, "b c": 2, "d": 7}
    for wrong in ("9" * 19, "9" * 5000):
        (tmp_path / "wrong").write_text(f"a\t5\nb\t{wrong}\n")
        with pytest.raises(ValueError, match="line 2 is 'b"):
            read_counts(tmp_path / "wrong")
    (tmp_path / "wrong").write_text("a\t5\nb\t1\na\t2\n")
    with pytest.raises(ValueError, match="line 3 repeats the word 'a'"):
        read_counts(tmp_path / "wrong")
    text.write_text("a b a\nb a\n")
    assert count_words([text, text]) == {"a": 6, "b": 4}
    text.write_text("\ufeffa b a\nb a\n", encoding="utf-8")  # as some editors begin a text
    assert count_words([text]) == {"a": 3, "b": 2}
    found = counts_of(["<s>", "a", "zero", "never"], {"a": 6, "zero": 0, "b": 9}, ["<s>"])
    assert found.tolist() == [9, 6, 1, 1]


@pytest.mark.parametrize("method", ["projective", "structured", "compositional_code"])
def test_target_is_met_in_bytes_with_the_finest_options(method: str) -> None:
    limit = 4 * 600 * 32 // 4
    options = options_within(method, 600, 32, limit)
    assert 0.6 * limit < stored_bytes(method, 600, 32, options) <= limit
    built = se.build(method, num_embeddings=600, embedding_dim=32, **options)
    assert built.counts()["stored_bits"] <= 8 * limit


def test_the_bias_of_the_output_is_within_the_target() -> None:
    """The bytes of rank 8 are 632 numbers more than those of rank 7, enough for the bias of 600 words."""
    limit = 4 * (600 + 32) * 8
    assert options_within("projective", 600, 32, limit) == {"rank": 8}
    assert options_within("projective", 600, 32, limit, output_bias=True) == {"rank": 7, "output_bias": True}


SIZES: dict[str, Any] = {"num_embeddings": 6, "embedding_dim": 4}


@pytest.mark.parametrize(
    ("method", "options", "note"),
    [
        ("standard", {"output_bias": True}, None),
        ("define", {"map_dim": 4, "expand_dim": 8, "depth": 1, "output_bias": True}, None),
        ("projective", {"rank": 2}, "dropped; set output_bias: true"),
        ("adaptive", {"cutoffs": [2, 4], "factor": 1, "output_bias": True}, "approximates"),
    ],
)
def test_bias_is_taken_over_with_a_note_of_what_is_lost(
    method: str, options: dict[str, Any], note: str | None
) -> None:
    new, bias = se.build(method, **SIZES, padding_idx=1, **options), torch.arange(6.0)
    notes = copy_output_bias(new, bias)
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]
    kept = new.output_bias()
    if "output_bias" in options:
        assert kept is not None and kept.tolist() == [0, 0, 2, 3, 4, 5]
    else:
        assert kept is None


def test_total_is_divided_as_the_tables_are() -> None:
    def table(words: int) -> EmbeddingTable:
        return EmbeddingTable("t", ("input",), [], torch.zeros(words, 10), None, False, (), 0, 0)

    tables = [table(30), table(10)]
    assert [Target(total_bytes=400).limit(one, tables) for one in tables] == [300, 100]
    assert [Target(ratio=4).limit(one, tables) for one in tables] == [300, 100]


def test_bands_follow_the_counts() -> None:
    teacher = torch.ones(250, 4)
    embedding = se.build("standard", num_embeddings=250, embedding_dim=4, padding_idx=0)
    counts = torch.arange(250)
    with torch.no_grad():
        embedding.weight.copy_(teacher)
        embedding.weight[200:] *= 1.5  # of the 100 most frequent words, 150 to 249, the upper half
    top, rest = Errors(embedding, teacher.__getitem__).bands(counts)
    assert (top.first, top.last, rest.first, rest.last) == (1, 100, 101, 249)
    # Each missed row is 0.5 off in 4 dimensions, a distance of 1, beside rows of length 2.
    assert top.loss == pytest.approx(0.5) and top.relative_error == pytest.approx((50 / 400) ** 0.5)
    assert rest.loss == 0.0


def test_a_table_of_its_own_on_the_output_has_no_teacher() -> None:
    untied = se.build("adaptive", num_embeddings=50, embedding_dim=16, cutoffs=[10, 30])
    with pytest.raises(ValueError, match="not its input table"):
        teacher_table(untied, is_scored=True)
    assert teacher_table(untied, is_scored=False).shape == (50, 16)


@pytest.mark.parametrize("ratio", [3, 8, 20])
@pytest.mark.parametrize("exponent", [0.8, 1.1])
def test_group_reduce_meets_a_target_with_counts_that_are_not_by_zipfs_law(
    ratio: int, exponent: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(4000, 64, generator=generator)
    counts = (1e6 / torch.arange(1.0, 4001.0) ** exponent)[torch.randperm(4000, generator=generator)]
    limit = table.nbytes // ratio
    options: dict[str, Any] = options_within("group_reduce", 4000, 64, limit)
    _, report = se.fit("group_reduce", table, token_counts=counts, progress=False, **options)
    assert 0.98 * limit <= report.stored_bits / 8 <= limit


def test_structured_takes_small_pieces_and_few_clusters_for_many_words() -> None:
    bytes_of_a_table = 4 * 262_144 * 640
    for ratio, width in ((4, 1), (8, 2), (16, 5)):
        options = options_within("structured", 262_144, 640, bytes_of_a_table // ratio)
        assert options["num_groups"] == 640 // width
        assert options["num_clusters"] <= 512


def test_memory_counts_each_block_once() -> None:
    """Scores of a plain table come from the table itself; a funnel caches its codes after the ReLU."""
    plain = se.build("standard", num_embeddings=100, embedding_dim=8).eval()
    funnel = se.build("funnel", num_embeddings=100, embedding_dim=8, rank=4).eval()
    own = sum(parameter.nbytes for parameter in funnel.parameters())
    with torch.no_grad():
        assert funnel.bytes_in_memory() == own
        plain.logits(torch.zeros(1, 8))
        funnel.logits(torch.zeros(1, 8))
        cached = funnel.bytes_in_memory() - own
    assert plain.bytes_in_memory() == 4 * 100 * 8
    assert cached >= 4 * 100 * 4
