"""Benchmarks of fits, of the language model and of preprocessing."""

from __future__ import annotations

import os
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch

import shared_embeddings as se
from benchmarks import fitting, language_model, preprocessing
from benchmarks.measuring import read_record, save_record
from benchmarks.preprocessing import Language, as_table, part_of, watch
from recipes.common.tools import run_main
from shared_embeddings.utils.errors import UserError

WORDS = [f"w{number}" for number in range(400)]


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    """Arguments for a text of up to 400 words at a quarter of their size."""
    text = tmp_path / "text.txt"
    order = torch.randint(0, 400, (300, 8)).square() // 400
    text.write_text("\n".join(" ".join(WORDS[index] for index in line) for line in order.tolist()) + "\n")
    small = ["--dim", "16", "--epochs", "1", "--compression", "4"]
    return ["--text", str(text), *small, "--output", str(tmp_path / "numbers.jsonl")]


def fits(asked: list[str]) -> dict[str, dict]:
    """The results by method."""
    return {fit["method"]: fit for fit in read_record(Path(asked[-1]), "fitting", "fits")["fits"]}


def test_options_meet_the_budget_where_possible() -> None:
    table = torch.randn(2000, 64)
    found = fitting.suggested(table, 2000 * 64 // 8, se.methods())
    assert set(found) == set(se.methods()) - {"standard"}
    for method, options in found.items():
        assert "random_classes" not in options
        given = {"random_classes": True} if method == "uncle" else {}
        count = se.num_parameters(method, num_embeddings=2000, embedding_dim=64, **options, **given)
        assert count <= 2000 * 64 // 8


def test_fits_are_cached(asked: list[str], monkeypatch, capsys) -> None:
    fitting.main([*asked[:-2], "--methods", "projective", *asked[-2:]])
    first = fits(asked)["projective"]

    done: list[str] = []
    fit = se.fit

    def counted(method: str, *arguments, **options):
        done.append(method)
        if len(done) == 2:
            raise KeyboardInterrupt
        return fit(method, *arguments, **options)

    monkeypatch.setattr(fitting.se, "fit", counted)
    chosen = ["--methods", "projective", "tensor_train", "adaptive", "standard"]
    again = [*asked[:-2], *chosen, *asked[-2:]]
    assert run_main("fitting", fitting.main, again) == 130
    assert set(fits(asked)) == {"projective", done[0]}

    fitting.main(again)
    assert sorted(done) == sorted(["tensor_train", "adaptive", done[1]])
    assert set(fits(asked)) == {"projective", "tensor_train", "adaptive"}
    assert "standard is skipped" in capsys.readouterr().err
    assert fits(asked)["projective"] == first
    losses = [fit["loss"] for fit in read_record(Path(asked[-1]), "fitting", "fits")["fits"]]
    assert losses == sorted(losses)


def test_fits_of_other_sizes_are_separate(asked: list[str], capsys) -> None:
    fitting.main([*asked[:-2], "--methods", "projective", *asked[-2:]])
    before = Path(asked[-1]).read_text()
    asked[asked.index("--compression") + 1] = "5"
    assert run_main("fitting", fitting.main, asked) == 2
    assert "compression is 4 in this file but 5 now" in capsys.readouterr().err
    assert Path(asked[-1]).read_text() == before


def test_fits_to_a_random_table_are_measured_separately(tmp_path: Path, capsys) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- BEGIN large fits -->\n<!-- END large fits -->\n")
    output = tmp_path / "large.jsonl"
    asked = ["--size", "600x32", "--compression", "4", "--methods", "projective", "standard"]
    where = ["--output", str(output), "--readme", str(readme)]
    fitting.main([*asked, *where])
    assert "standard is skipped" in capsys.readouterr().err
    (found,) = read_record(output, "large fits", "fits")["fits"]
    assert found["method"] == "projective" and found["peak_tables"] > 0
    assert 4 <= found["compression"] < 5
    assert "| projective | 4." in readme.read_text()
    record = read_record(output, "large fits", "fits")
    save_record(output, "large fits", {**record, "fits": [{**found, "seconds": 71}]})
    fitting.main([*asked, *where])
    assert "| 71 |" in readme.read_text()


@pytest.mark.parametrize("wrong", ["640", "0x640", "axb", "1x2x3"])
def test_invalid_sizes_fail(wrong: str, capsys) -> None:
    with pytest.raises(SystemExit) as error:
        fitting.main(["--size", wrong])
    assert error.value.code == 2 and "--size" in capsys.readouterr().err


@pytest.fixture
def small(monkeypatch) -> None:
    """Batches of a few tokens from few words."""
    for name, value in (("VOCABULARY", 50), ("BATCH", 2), ("TIME", 3)):
        monkeypatch.setattr(language_model, name, value)


@pytest.mark.slow
def test_both_models_have_one_shape_and_learn(small) -> None:
    regularized, plain = language_model.models("cpu")
    hidden = [part.shape for part in regularized.initial_state(2)]
    assert [part.shape for part in plain.initial_state(2)] == hidden
    assert plain.widths == [1150, 1150, 400]
    ids = language_model.batch("cpu")
    assert ids.shape == (2, 4)
    for model in (regularized, plain):
        before = [parameter.clone() for parameter in model.parameters()]
        language_model.training_step(model, ids)()
        changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(changed)


@pytest.mark.slow
def test_measuring_gives_both_clocks(small) -> None:
    found = language_model.measure("cpu", repeats=1)
    assert found["name"] == "CPU"
    for model in ("awd_lstm", "plain"):
        assert found[model]["seconds"] > 0 and found[model]["processor_seconds"] > 0


def test_almost_all_ranks_have_different_words() -> None:
    language = Language(0, 5000, 6, seed=1)
    assert len({language.word(rank) for rank in range(5000)}) > 4950
    # Frequent words are short: one syllable, then two.
    size = len(language.syllables)
    assert language.word(size - 1) == language.syllables[-1]
    assert language.word(size) == 2 * language.syllables[0]
    assert language.word(2 * size + 3) == language.syllables[1] + language.syllables[3]


def test_sentences_follow_zipf_and_have_the_requested_length() -> None:
    language = Language(1, 1000, 6, seed=1)
    sentences = [line.rstrip(".").split() for line in islice(language.sentences(), 4000)]
    assert sum(map(len, sentences)) / 4000 == pytest.approx(6, abs=0.2)
    counts = Counter(word for line in sentences for word in line)
    # The word of rank 0 has the weight 1 / 2.7, that of rank 10 the weight 1 / 12.7.
    ratio = counts[language.word(0)] / counts[language.word(10)]
    assert ratio == pytest.approx(12.7 / 2.7, rel=0.15)
    first, again, other = (list(islice(Language(0, 100, 5, seed).sentences(), 20)) for seed in (1, 1, 2))
    assert first == again != other


def test_memory_is_measured_in_each_step() -> None:
    steps = {"bpe32k-learn": "bpe32k-learn", "bpe32k-train-00000.en": "bpe32k", "text": "text"}
    assert {step: part_of(step) for step in steps} == steps
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
    with pytest.raises(UserError, match="failed with exit code 3"):
        watch([sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ))


@pytest.mark.slow
def test_program_runs_end_to_end(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.jsonl"
    text = ["--pairs", "400", "--vocab-size", "3000", "--words", "6", "--pieces", "bpe32k"]
    preprocessing.main([*text, "--folder", str(tmp_path), "--output", str(numbers)])
    record = read_record(numbers, "preprocessing", "steps")
    assert {"tokens", "bpe32k-learn", "bpe32k"} <= set(record["steps"])
    assert record["peak_bytes"] == max(record["steps"].values()) > 2**24
    table = as_table(record)
    assert "400 pairs of 6 words" in table and "| bpe32k-learn |" in table
