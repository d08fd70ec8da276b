"""Re-ranking by content words, on lists whose best is plain to see."""

from __future__ import annotations

from pathlib import Path

import pytest

from nmt.summarization.rerank import best_hypothesis, content_words, stop_words
from tests.nmt.summarization.running import refused, run

SOURCE = "the Prime Minister of Italy resigned on monday after the vote ."


@pytest.mark.parametrize(
    ("hypotheses", "best"),
    [
        (["italy votes", "italy minister resigned", "minister resigns"], 1),  # 1, 3 and 1 words
        (["italy italy italy italy", "italy vote"], 1),  # a word counts once
        (["of the after on the", "monday"], 1),  # function words do not count
        (["vote monday", "italy resigned"], 0),  # equals: the model's first
        (["nothing here", "at all"], 0),
        (["voted", "VOTE"], 1),  # no stems, small letters
        (["ital", "in italy"], 1),  # whole words
        ([". . .", "resigned."], 1),  # punctuation is no word, and does not hide one
    ],
)
def test_best_hypothesis(hypotheses: list[str], best: int) -> None:
    assert best_hypothesis(SOURCE, hypotheses, stop_words("en")) == hypotheses[best]


def test_content_words() -> None:
    ignored = frozenset({"the"})
    assert content_words("The u.s. co-op's don't, 5,000 Öl _ 漢字!", ignored) == {
        "u.s", "co-op's", "don't", "5", "000", "öl", "漢字"
    }  # fmt: skip


def test_stop_words_hold_what_tokenizers_split_off() -> None:
    found = stop_words("en")
    assert {"the", "of", "after", "n't", "s", "re", "'s"} - found == {"'s"}
    assert not {"minister", "italy", "monday", "vote", "system"} & found
    assert "der" in stop_words("de")


def test_files(tmp_path: Path) -> None:
    (tmp_path / "source").write_text("dogs bark loudly\n\ncats sleep\n")
    (tmp_path / "hypotheses").write_text("cats\ndogs\n\n\nthe end\ncats")
    files = ("-source", tmp_path / "source", "-hypotheses", tmp_path / "hypotheses")
    run("onmt_rerank", *files, "-n_best", "2", "-output", tmp_path / "best")
    assert (tmp_path / "best").read_text() == "dogs\n\ncats\n"


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, hypotheses, output = tmp_path / "source", tmp_path / "hypotheses", tmp_path / "output"
    source.write_text("a\nb\n")
    hypotheses.write_text("a\nb\nc\n")
    files = ("-source", source, "-hypotheses", hypotheses, "-output", output)
    line = refused(capsys, "onmt_rerank", *files, "-n_best", "2")
    assert "3 lines" in line and "4" in line
    assert "n_best: 0" in refused(capsys, "onmt_rerank", *files, "-n_best", "0")
    assert "n_best" in refused(capsys, "onmt_rerank", *files, "-n_best", "two")
    assert "n_best" in refused(capsys, "onmt_rerank", *files)
    assert "'xx-none'" in refused(capsys, "onmt_rerank", *files, "-n_best", "1", "-language", "xx-none")
    missing = ("-source", "/nowhere", "-hypotheses", hypotheses, "-output", output)
    assert "/nowhere" in refused(capsys, "onmt_rerank", *missing, "-n_best", "1")
    assert not output.exists()
