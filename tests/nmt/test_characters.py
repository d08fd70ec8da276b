"""Characters, positional encodings and re-ranking."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from onmt.modules.embeddings import PositionalEncoding
from torch import Tensor

from nmt import cli
from nmt.headlines import (
    best_hypothesis,
    content_words,
    join_characters,
    split_text,
    stop_words,
)
from nmt.length_control import LengthControlledPositions
from nmt.vocabulary import read_vocabulary, vocabulary_counts
from tests.nmt.conftest import Capture, Host

MAINS = {
    "onmt_characters": cli.characters,
    "onmt_character_vocab": cli.character_vocab,
    "onmt_rerank": cli.rerank,
}


def run(command: str, *arguments: str | Path) -> None:
    """Run a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [command, *map(str, arguments)])
        MAINS[command]()


def error_line(capsys: Capture, command: str, *arguments: str | Path) -> str:
    """Run a command that must fail with one line and exit code 2; returns the line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run(command, *arguments)
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(lines) == 1 and lines[0].startswith(f"{command}: "), lines
    return lines[0]


def test_characters_by_hand() -> None:
    assert split_text("an ox") == "a n <sp> o x"
    assert split_text("") == "" and join_characters("") == ""
    assert join_characters("a n <sp> o x") == "an ox"
    assert join_characters("a <unk> c <sp> ing@@") == "a<unk>c ing@@"


@pytest.mark.parametrize("text", ["a <sp> b", "e\u0301te\u0301", "ᚠᛖᛟ ᚻ", "👩\u200d🚀 🦜", "ﷺ \u0627\u0644"])
def test_any_script_round_trips(text: str) -> None:
    tokens = split_text(text)
    assert join_characters(tokens) == text
    assert len(tokens.split(" ")) == len(text)


def test_files_round_trip_with_normalized_whitespace(tmp_path: Path) -> None:
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


def test_user_errors(tmp_path: Path, capsys: Capture) -> None:
    words, broken, empty, output = (tmp_path / name for name in ("words", "broken", "empty", "output"))
    words.write_text("a b\nbirds sing\n")
    broken.write_bytes(b"a\n\xff\n")
    empty.write_text("")
    line = error_line(capsys, "onmt_character_vocab", "-source", words, "-target", words, "-output", output)
    assert "'birds'" in line and "onmt_characters split" in line
    line = error_line(capsys, "onmt_character_vocab", "-source", empty, "-target", empty, "-output", output)
    assert "are empty" in line
    assert "/nowhere" in error_line(
        capsys, "onmt_characters", "split", "-input", "/nowhere", "-output", output
    )
    assert "line 2" in error_line(capsys, "onmt_characters", "join", "-input", broken, "-output", output)
    assert "joinn" in error_line(capsys, "onmt_characters", "joinn", "-input", words, "-output", output)
    files = ("-input", words, "-output", output)
    assert "-outputs" in error_line(capsys, "onmt_characters", "join", *files, "-outputs", "x")
    assert not output.exists()


def test_characters_through_training_and_translation(host: Host) -> None:
    """From text to text: split, vocabulary, training, translation with a length, joined again."""
    headlines = ["ox in sun", "sun in ox", "no sun", "ox on ox"] * 8
    sources = [f"w{number} w{number % 7}" for number in range(len(headlines))]
    for split in ("train", "valid"):
        host.write(f"{split}.src", sources)
        host.write(f"{split}.text", headlines)
        files = ("-input", host.folder / f"{split}.text", "-output", host.folder / f"{split}.tgt")
        run("onmt_characters", "split", *files)
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


INTERLEAVED, CONCATENATED = "SinusoidalInterleaved", "SinusoidalConcat"

# Position 2 of an output of length 9, D = 4: the exponents 2i/D are 0 and 1/2.
BY_HAND = {
    "pe": [0.9092974268, -0.4161468365, 0.0199986667, 0.9998000067],  # 2/1, 2/100
    "ldpe": [0.6569865987, 0.7539022543, 0.0699428473, 0.9975510003],  # 7/1, 7/100
    "lrpe": [0.9092974268, -0.4161468365, 0.6183698031, 0.7858872608],  # 2/1, 2/3
}
# The same where sines come first and the exponents i/(D/2 - 1) are 0 and 1.
BY_HAND_CONCATENATED = {
    "pe": [0.9092974268, 0.0002000000, -0.4161468365, 0.9999999800],  # 2/1, 2/10000
    "ldpe": [0.6569865987, 0.0006999999, 0.7539022543, 0.9999997550],  # 7/1, 7/10000
    "lrpe": [0.9092974268, 0.2203977435, -0.4161468365, 0.9754100854],  # 2/1, 2/9
}


def added(
    encodings: list[str], lengths: list[int], size: int, dim: int = 4, layout: str = INTERLEAVED
) -> Tensor:
    """The encodings of positions 0 to ``size`` - 1, added to embeddings of 0."""
    positions = LengthControlledPositions(dim, encodings, layout)
    positions.set_lengths(torch.tensor(lengths))
    return positions(torch.zeros(len(lengths), size, dim))


@pytest.mark.parametrize("name", BY_HAND)
def test_values_by_hand(name: str) -> None:
    torch.testing.assert_close(added([name], [9], 3)[0, 2], torch.tensor(BY_HAND[name]))
    found = added([name], [9], 3, layout=CONCATENATED)[0, 2]
    torch.testing.assert_close(found, torch.tensor(BY_HAND_CONCATENATED[name]))


def test_encodings_are_summed_and_embeddings_scaled() -> None:
    positions = LengthControlledPositions(4, ["pe", "lrpe"], INTERLEAVED)
    positions.set_lengths(torch.tensor([9]))
    found = positions(torch.ones(1, 3, 4))[0, 2]
    wanted = [2 + pe + lrpe for pe, lrpe in zip(BY_HAND["pe"], BY_HAND["lrpe"], strict=True)]  # sqrt(4) = 2
    torch.testing.assert_close(found, torch.tensor(wanted))


@pytest.mark.parametrize("layout", [INTERLEAVED, CONCATENATED])
def test_sinusoids_equal_upstream(layout: str) -> None:
    emb = torch.randn(2, 30, 16, generator=torch.Generator().manual_seed(1))
    positions = LengthControlledPositions(16, ["pe"], layout)
    positions.set_lengths(torch.tensor([3, 4]))
    torch.testing.assert_close(positions(emb), PositionalEncoding(16, layout)(emb), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("encodings", [["ldpe"], ["lrpe"], ["pe", "ldpe"], ["pe", "ldpe", "lrpe"]])
def test_stepwise_positions_equal_those_of_a_sequence(encodings: list[str]) -> None:
    positions = LengthControlledPositions(8, encodings, INTERLEAVED)
    positions.set_lengths(torch.tensor([2, 40]))
    emb = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
    steps = [positions(emb[:, step : step + 1], step=step) for step in range(6)]
    torch.testing.assert_close(torch.cat(steps, dim=1), positions(emb))


def test_difference_encoding_depends_on_the_remaining_length() -> None:
    short, long = added(["ldpe"], [3, 8], 9)
    torch.testing.assert_close(short[0:4], long[5:9])
    torch.testing.assert_close(short[3], torch.tensor([0.0, 1.0, 0.0, 1.0]))  # the desired end: sin 0, cos 0
    assert torch.isfinite(added(["ldpe", "lrpe"], [1], 5)).all()


def test_ratio_encoding_depends_on_the_written_fraction() -> None:
    """Halfway through 100 and through 50, the slowest wave (exponent 14/16) is almost equal."""
    one, two = added(["lrpe"], [100], 51, dim=16)[0, 50], added(["lrpe"], [50], 26, dim=16)[0, 25]
    assert float((one - two)[-2:].abs().max()) < 0.1
    assert float((one - two)[:2].abs().max()) > 0.1


def test_input_dtype_is_kept() -> None:
    positions = LengthControlledPositions(4, ["pe", "lrpe"], INTERLEAVED)
    positions.set_lengths(torch.tensor([300]))
    exact, coarse = (
        positions(torch.zeros(1, 301, 4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)
    )
    assert coarse.dtype == torch.bfloat16
    torch.testing.assert_close(coarse, exact.bfloat16())  # angles of 300 do not fit into 8 bits


def test_lengths_follow_the_rows() -> None:
    positions = LengthControlledPositions(4, ["ldpe"], INTERLEAVED)
    positions.set_lengths(torch.tensor([5, 6, 7]))
    positions.start(6)
    assert positions.lengths is not None and positions.lengths.tolist() == [5, 5, 6, 6, 7, 7]
    positions.map_rows(lambda state, dim: state[torch.tensor([3, 2, 5, 5])])
    assert positions.lengths.tolist() == [6, 6, 7, 7]
    positions.start(3)
    assert positions.lengths.tolist() == [5, 6, 7]


def test_lengths_of_another_batch_fail() -> None:
    positions = LengthControlledPositions(4, ["ldpe"], INTERLEAVED)
    with pytest.raises(RuntimeError, match="no lengths"):
        positions.start(2)
    positions.set_lengths(torch.tensor([5, 6]))
    with pytest.raises(RuntimeError, match="3 rows"):
        positions.start(3)


SOURCE = "the Prime Minister of Italy resigned on monday after the vote ."


@pytest.mark.parametrize(
    ("hypotheses", "best"),
    [
        (["italy votes", "italy minister resigned", "minister resigns"], 1),  # 1, 3 and 1 words
        (["italy italy italy italy", "italy vote"], 1),  # a word counts once
        (["of the after on the", "monday"], 1),  # function words do not count
        (["vote monday", "italy resigned"], 0),  # equals: the model's first
        (["nothing here", "at all"], 0),
        (["voted", "VOTE"], 1),  # no stemming, lowercase
        (["ital", "in italy"], 1),  # whole words
        ([". . .", "resigned."], 1),  # punctuation is not a word and does not hide one
    ],
)
def test_best_hypothesis(hypotheses: list[str], best: int) -> None:
    assert best_hypothesis(SOURCE, hypotheses, stop_words("en")) == hypotheses[best]


def test_content_words() -> None:
    ignored = frozenset({"the"})
    assert content_words("The u.s. co-op's don't, 5,000 Öl _ 漢字!", ignored) == {
        "u.s", "co-op's", "don't", "5", "000", "öl", "漢字"
    }  # fmt: skip


def test_stop_words_include_split_contractions() -> None:
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


def test_rerank_refusals(tmp_path: Path, capsys: Capture) -> None:
    source, hypotheses, output = tmp_path / "source", tmp_path / "hypotheses", tmp_path / "output"
    source.write_text("a\nb\n")
    hypotheses.write_text("a\nb\nc\n")
    files = ("-source", source, "-hypotheses", hypotheses, "-output", output)
    line = error_line(capsys, "onmt_rerank", *files, "-n_best", "2")
    assert "3 lines" in line and "4" in line
    assert "n_best: 0" in error_line(capsys, "onmt_rerank", *files, "-n_best", "0")
    assert "n_best" in error_line(capsys, "onmt_rerank", *files, "-n_best", "two")
    assert "n_best" in error_line(capsys, "onmt_rerank", *files)
    assert "'xx-none'" in error_line(capsys, "onmt_rerank", *files, "-n_best", "1", "-language", "xx-none")
    missing = ("-source", "/nowhere", "-hypotheses", hypotheses, "-output", output)
    assert "/nowhere" in error_line(capsys, "onmt_rerank", *missing, "-n_best", "1")
    assert not output.exists()
