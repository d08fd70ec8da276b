"""lm_generate from the outside: what it prints, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm.evaluate.generate import write
from tests.lm.command_line import one_line, run, write_corpus, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    return write_model(folder / "model.pt", write_corpus(folder / "corpus"))


def written(model: Path, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert run("lm_generate", "-model", model, *arguments) == 0
    return capsys.readouterr().out


def words(text: str) -> list[str]:
    return text.replace("\n", " <eos> ").split()


def test_a_seed_gives_the_same_text(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = written(model, capsys, "-seed", 5)
    assert written(model, capsys, "-seed", 5) == first != written(model, capsys, "-seed", 6)
    assert 100 <= len(words(first)) <= 101
    assert set(words(first)) <= {*"abcdefg", "<eos>"}
    assert first.endswith("\n") and "<eos>" not in first


def test_prompt_is_gone_on_from(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = written(model, capsys, "-prompt", "a b\nc", "-length", 3, "-temperature", 0)
    assert text.startswith("a b\nc")
    assert len(words(text)) - words(text).count("<eos>") <= 6
    longer = written(model, capsys, "-prompt", "a b\nc", "-length", 9, "-temperature", 0)
    assert longer.startswith(text.rstrip("\n"))


def test_a_transformer_whose_memory_is_shorter_than_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus"), "transformer_xl")
    prompt = "a b c d e f g a b c"
    text = written(path, capsys, "-prompt", prompt, "-length", 20)
    assert text.startswith(prompt) and 30 <= len(words(text)) <= 31


def test_samples_are_several(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = written(model, capsys, "-samples", 3, "-length", 40, "-seed", 5)
    parts = text.split("---\n")
    assert len(set(parts)) == 3
    assert parts[1] == written(model, capsys, "-length", 40, "-seed", 6)


def test_unknown_words_of_a_prompt(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("lm_generate", "-model", model, "-prompt", "a zebra b zebra", "-length", 2) == 0
    captured = capsys.readouterr()
    assert captured.err == "lm_generate: unknown words are read as <unk>: zebra\n"
    assert captured.out.startswith("a zebra b zebra")


def test_unknown_is_written_only_when_allowed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "<unk>" not in written(model, capsys, "-length", 400, "-temperature", 3)
    assert "<unk>" in written(model, capsys, "-length", 400, "-temperature", 3, "-allow_unknown")


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
def test_settings_that_cannot_be(
    model: Path, arguments: list[object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run("lm_generate", "-model", model, *arguments) == 2
    captured = capsys.readouterr()
    assert message in one_line(captured.err, "lm_generate") and not captured.out
