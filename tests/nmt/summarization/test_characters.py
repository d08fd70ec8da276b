"""Text as characters and back, and the vocabulary of subwords and characters."""

from __future__ import annotations

from pathlib import Path

import pytest

from nmt.data.vocabulary import read_vocabulary, vocabulary_counts
from nmt.summarization.characters import join_characters, split_text
from tests.nmt.conftest import Host
from tests.nmt.summarization.running import refused, run


def test_characters_by_hand() -> None:
    assert split_text("an ox") == "a n <sp> o x"
    assert split_text("") == "" and join_characters("") == ""
    assert join_characters("a n <sp> o x") == "an ox"


@pytest.mark.parametrize(
    "text",
    [
        "a <sp> b",
        "ὅς",
        "e\u0301te\u0301",
        "ᚠᛖᛟ ᚻ",
        "漢字 か\u3099",
        "👩\u200d🚀 🦜",
        "▁under_score▁",
        "ﷺ \u0627\u0644",
    ],
)
def test_any_script_comes_back(text: str) -> None:
    tokens = split_text(text)
    assert join_characters(tokens) == text
    assert len(tokens.split(" ")) == len(text)


def test_other_tokens_stay() -> None:
    assert join_characters("a <unk> c <sp> ing@@") == "a<unk>c ing@@"


def test_files_come_back_with_clean_white_space(tmp_path: Path) -> None:
    plain, split, joined = tmp_path / "plain", tmp_path / "split", tmp_path / "joined"
    plain.write_bytes("a\u00a0 b\t\r\n\n é ".encode())
    run("onmt_characters", "split", "-input", plain, "-output", split)
    assert split.read_text(encoding="utf-8") == "a <sp> b\n\né\n"
    run("onmt_characters", "join", "-input", split, "-output", joined)
    assert joined.read_text(encoding="utf-8") == "a b\n\né\n"


def test_vocabulary_of_both_sides(tmp_path: Path) -> None:
    (tmp_path / "source").write_text("a cat@@ s a\nb\n", encoding="utf-8")
    (tmp_path / "target").write_text("c <sp> a\n漢 a 5\n", encoding="utf-8")
    output = tmp_path / "vocab"
    files = ("-source", tmp_path / "source", "-target", tmp_path / "target", "-output", output)
    run("onmt_character_vocab", *files)
    entries = ["a\t4", "5\t1", "<sp>\t1", "b\t1", "c\t1", "cat@@\t1", "s\t1", "漢\t1"]
    assert output.read_text(encoding="utf-8").split("\n")[:-1] == entries
    assert read_vocabulary(str(output), 1) == [entry.split("\t")[0] for entry in entries]
    assert read_vocabulary(str(output), 2) == ["a"]
    assert vocabulary_counts(str(output))["5"] == 1


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, broken, empty, output = (tmp_path / name for name in ("words", "broken", "empty", "output"))
    words.write_text("a b\nbirds sing\n")
    broken.write_bytes(b"a\n\xff\n")
    empty.write_text("")
    line = refused(capsys, "onmt_character_vocab", "-source", words, "-target", words, "-output", output)
    assert "'birds'" in line and "onmt_characters split" in line
    line = refused(capsys, "onmt_character_vocab", "-source", empty, "-target", empty, "-output", output)
    assert "are empty" in line
    assert "/nowhere" in refused(capsys, "onmt_characters", "split", "-input", "/nowhere", "-output", output)
    assert "line 2" in refused(capsys, "onmt_characters", "join", "-input", broken, "-output", output)
    assert "joinn" in refused(capsys, "onmt_characters", "joinn", "-input", words, "-output", output)
    files = ("-input", words, "-output", output)
    assert "-outputs" in refused(capsys, "onmt_characters", "join", *files, "-outputs", "x")
    assert not output.exists()


def test_characters_through_training_and_translation(host: Host) -> None:
    """From text to text: split, vocabulary, training, translation with a length, joined again."""
    headlines = ["ox in sun", "sun in ox", "no sun", "ox on ox"] * 8
    sources = [f"w{number} w{number % 7}" for number in range(len(headlines))]
    for split in ("train", "valid"):
        host.write(f"{split}.src", sources)
        host.write(f"{split}.text", headlines)
        run(
            "onmt_characters",
            "split",
            "-input",
            host.folder / f"{split}.text",
            "-output",
            host.folder / f"{split}.tgt",
        )
    sides = ("-source", host.folder / "train.src", "-target", host.folder / "train.tgt")
    run("onmt_character_vocab", *sides, "-output", host.folder / "vocab")
    alone = {"method": "alone", "base_dim": 8, "hidden_dim": 16, "codebooks": 4, "codebook_size": 8}
    checkpoint = host.train("model", embedding=alone, decoder_positions=["pe", "lrpe"])
    arguments = ("-desired_length", "7", "-max_length", "8", "-n_best", "2", "-min_length", "1")
    host.write("n_best", host.translate(checkpoint, *arguments))
    run("onmt_characters", "join", "-input", host.folder / "n_best", "-output", host.folder / "joined")
    files = ("-source", host.folder / "test.src", "-hypotheses", host.folder / "joined", "-n_best", "2")
    run("onmt_rerank", *files, "-output", host.folder / "chosen")
    chosen = (host.folder / "chosen").read_text(encoding="utf-8").split("\n")[:-1]
    joined = (host.folder / "joined").read_text(encoding="utf-8").split("\n")[:-1]
    assert len(chosen) == 7 and all(line in joined[2 * n : 2 * n + 2] for n, line in enumerate(chosen))
