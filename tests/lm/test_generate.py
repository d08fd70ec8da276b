"""Generation, and the command lm_generate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.evaluate.generate import Sampling, choose, generate, write
from shared_embeddings.utils.errors import UserError
from tests.lm.runs import TinyLSTM, command, write_corpus, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    return write_model(folder / "model.pt", write_corpus(folder / "corpus"))


def written(model: Path, *arguments: object) -> str:
    ended = command("lm_generate", "-model", model, *arguments)
    assert ended.status == 0, ended.err
    return ended.out


def words(text: str) -> list[str]:
    return text.replace("\n", " <eos> ").split()


def test_a_seed_gives_the_same_text(model: Path) -> None:
    first = written(model, "-seed", 5)
    assert written(model, "-seed", 5) == first != written(model, "-seed", 6)
    assert 100 <= len(words(first)) <= 101
    assert set(words(first)) <= {*"abcdefg", "<eos>"}
    assert first.endswith("\n") and "<eos>" not in first


def test_generation_continues_the_prompt(model: Path) -> None:
    text, longer = (
        written(model, "-prompt", "a b\nc", "-length", length, "-temperature", 0) for length in (3, 9)
    )
    assert text.startswith("a b\nc") and longer.startswith(text.rstrip("\n"))
    assert len(words(text)) - words(text).count("<eos>") <= 6


def test_transformer_with_a_memory_shorter_than_the_text(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus"), "transformer_xl")
    prompt = "a b c d e f g a b c"
    text = written(path, "-prompt", prompt, "-length", 20)
    assert text.startswith(prompt) and 30 <= len(words(text)) <= 31


def test_several_samples(model: Path) -> None:
    parts = written(model, "-samples", 3, "-length", 40, "-seed", 5).split("---\n")
    assert len(set(parts)) == 3
    assert parts[1] == written(model, "-length", 40, "-seed", 6)


def test_unknown_words_of_a_prompt(model: Path) -> None:
    ended = command("lm_generate", "-model", model, "-prompt", "a zebra b zebra", "-length", 2)
    assert ended.status == 0 and ended.out.startswith("a zebra b zebra")
    assert ended.err == "lm_generate: unknown words are read as <unk>: zebra\n"


def test_unk_is_generated_only_if_allowed(model: Path) -> None:
    assert "<unk>" not in written(model, "-length", 400, "-temperature", 3)
    assert "<unk>" in written(model, "-length", 400, "-temperature", 3, "-allow_unknown")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (([], ["a", "b", "<eos>", "c"]), "a b\nc\n"),
        ((["a"], ["<eos>", "<eos>", "b", "<eos>"]), "a\n\nb\n"),
        ((["a", "<eos>"], ["b"]), "a\nb\n"),
    ],
)
def test_lines(parts: tuple[list[str], list[str]], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(*parts)
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-length", 0, "-prompt", "a b"], "length is 0"),
        (["-seed", 2**63], "-seed: '9223372036854775808' is not"),
        (["-prompt", "a \udcff"], "is not UTF-8"),
        (["-temperature", -1], "temperature is -1"),
        (["-temperature", "nan"], "-temperature: 'nan' is not a finite number"),
        (["-top_k", 0], "top_k is 0"),
        (["-top_k", 3, "-temperature", 0], "top_k has no effect"),
        (["-samples", 0], "samples is 0"),
        (["-samples", 2, "-temperature", 0], "samples has no effect"),
        (["-topk", 2], "-topk"),
    ],
)
def test_invalid_settings(model: Path, arguments: list[object], message: str) -> None:
    assert command("lm_generate", "-model", model, *arguments).says(message)


def sampled(model: torch.nn.Module, prompt: list[int], length: int = 30, **how: Any) -> list[int]:
    return list(generate(model, prompt, length, Sampling(**how), seed=1))


def test_greedy_takes_the_best_word_given_the_whole_prefix() -> None:
    model = TinyLSTM()
    ids = [3, 1, 4]
    for _ in range(12):
        with torch.no_grad():
            hidden = model(torch.tensor([ids]), model.initial_state(1)).hidden[0, -1]
            ids.append(int((hidden @ model.embedding.output_table().T).argmax()))
    assert sampled(model, ids[:3], 12, temperature=0.0) == ids[3:]
    # The same after a longer prefix in one pass.
    assert sampled(model, ids[:9], 6, temperature=0.0) == ids[9:]


def test_models_that_cannot_generate() -> None:
    model = TinyLSTM()
    before = torch.get_rng_state()
    with pytest.raises(UserError, match="no word can be generated"):
        sampled(model, [0], forbidden=tuple(range(11)))
    torch.nn.init.constant_(model.lstm.weight_hh_l0, math.nan)
    with pytest.raises(UserError, match="not finite"):
        sampled(model, [0, 1])
    assert torch.equal(torch.get_rng_state(), before)


LOG_PROBS = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()


def frequencies(number: int = 2000, **how: Any) -> list[float]:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.tensor([choose(LOG_PROBS, Sampling(**how), generator) for _ in range(number)])
    return (drawn.bincount(minlength=4) / number).tolist()


@pytest.mark.slow_except("how6-expected6")
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 9}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.5}, [p * p / 0.345 for p in (0.5, 0.25, 0.15, 0.1)]),
        ({"temperature": 1e-9}, [1, 0, 0, 0]),
        ({"temperature": 1e-300}, [1, 0, 0, 0]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"forbidden": (0,)}, [0, 0.5, 0.3, 0.2]),
        ({"forbidden": (0,), "top_k": 1}, [0, 1, 0, 0]),
        ({"forbidden": (0, 1), "temperature": 0.0}, [0, 0, 1, 0]),
    ],
)
def test_sampling_frequencies(how: dict[str, Any], expected: list[float]) -> None:
    found = frequencies(**how)
    assert found == pytest.approx(expected, abs=0.04)
    assert [frequency > 0 for frequency in found] == [share > 0 for share in expected]
