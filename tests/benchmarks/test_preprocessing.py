"""The benchmark of preprocessing: its made-up text, and the memory that it sees."""

from __future__ import annotations

import os
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from benchmarks import preprocessing
from benchmarks.measuring import read_record
from benchmarks.preprocessing import Language, as_table, part_of, watch
from shared_embeddings.errors import UserError


def test_hardly_two_ranks_have_the_same_word() -> None:
    language = Language(0, 5000, 6, seed=1)
    assert len({language.word(rank) for rank in range(5000)}) > 4950
    # Frequent words are short: one syllable, then two.
    size = len(language.syllables)
    assert language.word(size - 1) == language.syllables[-1]
    assert language.word(size) == 2 * language.syllables[0]
    assert language.word(2 * size + 3) == language.syllables[1] + language.syllables[3]


def test_sentences_follow_zipf_and_have_the_wanted_length() -> None:
    language = Language(1, 1000, 6, seed=1)
    sentences = [line.rstrip(".").split() for line in islice(language.sentences(), 4000)]
    assert sum(map(len, sentences)) / 4000 == pytest.approx(6, abs=0.2)
    counts = Counter(word for line in sentences for word in line)
    # The word of rank 0 has the weight 1 / 2.7, that of rank 10 the weight 1 / 12.7.
    ratio = counts[language.word(0)] / counts[language.word(10)]
    assert ratio == pytest.approx(12.7 / 2.7, rel=0.15)


def test_the_same_seed_makes_the_same_text() -> None:
    first, again, other = (list(islice(Language(0, 100, 5, seed).sentences(), 20)) for seed in (1, 1, 2))
    assert first == again != other


def test_parts_of_the_preprocessing() -> None:
    assert part_of("bpe32k-learn") == "bpe32k-learn"
    assert part_of("bpe32k-train-00000.en") == "bpe32k"
    assert part_of("text") == "text"


def test_memory_is_seen_in_each_part() -> None:
    program = "\n".join(
        [
            "import time",
            "print('small-a: running', flush=True); time.sleep(0.5)",
            "print('large-a: running', flush=True); held = bytearray(b'1' * 2**26); time.sleep(0.5)",
        ]
    )
    seen = watch([sys.executable, "-c", program], dict(os.environ))
    assert list(seen)[-2:] == ["small", "large"]
    assert seen["large"] - seen["small"] > 2**25


def test_a_preprocessing_that_fails_is_an_error() -> None:
    with pytest.raises(UserError, match="failed with exit code 3"):
        watch([sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ))


@pytest.mark.slow
def test_the_program_takes_a_text_the_whole_way(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.jsonl"
    text = ["--pairs", "400", "--vocab-size", "3000", "--words", "6", "--pieces", "bpe32k"]
    preprocessing.main([*text, "--folder", str(tmp_path), "--output", str(numbers)])
    record = read_record(numbers, "preprocessing", "steps")
    assert {"tokens", "bpe32k-learn", "bpe32k"} <= set(record["steps"])
    assert record["peak_bytes"] == max(record["steps"].values()) > 2**24
    table = as_table(record)
    assert "400 pairs of 6 words" in table and "| bpe32k-learn |" in table
