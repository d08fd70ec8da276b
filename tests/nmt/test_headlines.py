"""Headlines: text as characters, re-ranking, and ROUGE with two published scorers on the same texts."""

from __future__ import annotations

import json
import random
import sys
import types
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nmt.headlines import (
    content_words,
    join_characters,
    rerank,
    split_text,
    stop_words,
)
from nmt.rouge import PRESETS, RougeReport, RougeSettings, read_exceptions, score_texts, tokenize
from nmt.vocabulary import read_vocabulary, vocabulary_counts
from shared_embeddings.utils.errors import UserError
from tests.nmt.conftest import Capture, ErrorLine, Host, Patch, run


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


def test_user_errors(tmp_path: Path, error_line: ErrorLine) -> None:
    words, broken, empty, output = (tmp_path / name for name in ("words", "broken", "empty", "output"))
    words.write_text("a b\nbirds sing\n")
    broken.write_bytes(b"a\n\xff\n")
    empty.write_text("")
    for source, printed in (
        (words, "'birds' is not a character; use `onmt_characters split`"),
        (empty, "are empty"),
    ):
        files = ("-source", source, "-target", source, "-output", output)
        assert printed in error_line("onmt_character_vocab", *files)
    assert "/nowhere" in error_line("onmt_characters", "split", "-input", "/nowhere", "-output", output)
    assert "line 2" in error_line("onmt_characters", "join", "-input", broken, "-output", output)
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
def test_best_hypothesis(hypotheses: list[str], best: int, tmp_path: Path) -> None:
    source, lines = tmp_path / "source", tmp_path / "lines"
    source.write_text(f"{SOURCE}\n")
    lines.write_text("".join(f"{line}\n" for line in hypotheses))
    selected = list(rerank(source, lines, len(hypotheses), stop_words("en")))
    assert selected == [" ".join(hypotheses[best].split())]


def test_content_words() -> None:
    ignored = frozenset({"the"})
    assert content_words("The u.s. co-op's don't, 5,000 Öl _ 漢字!", ignored) == {
        "u.s", "co-op's", "don't", "5", "000", "öl", "漢字"
    }  # fmt: skip


def test_stop_words_include_split_contractions() -> None:
    words = stop_words("en")
    assert {"the", "of", "after", "n't", "s", "re", "'s"} - words == {"'s"}
    assert not {"minister", "italy", "monday", "vote", "system"} & words
    assert "der" in stop_words("de")


def test_files(tmp_path: Path) -> None:
    (tmp_path / "source").write_text("dogs bark loudly\n\ncats sleep\n")
    (tmp_path / "hypotheses").write_text("cats\ndogs\n\n\nthe end\ncats")
    files = ("-source", tmp_path / "source", "-hypotheses", tmp_path / "hypotheses")
    run("onmt_rerank", *files, "-n_best", "2", "-output", tmp_path / "best")
    assert (tmp_path / "best").read_text() == "dogs\n\ncats\n"


def test_rerank_refusals(tmp_path: Path, error_line: ErrorLine) -> None:
    source, hypotheses, output = tmp_path / "source", tmp_path / "hypotheses", tmp_path / "output"
    source.write_text("a\nb\n")
    hypotheses.write_text("a\nb\nc\n")
    files = ("-source", source, "-hypotheses", hypotheses, "-output", output)
    line = error_line("onmt_rerank", *files, "-n_best", "2")
    assert "3 lines" in line and "4" in line
    assert "n_best" in error_line("onmt_rerank", *files, "-n_best", "0")
    assert "'xx-none'" in error_line("onmt_rerank", *files, "-n_best", "1", "-language", "xx-none")
    missing = ("-source", "/nowhere", "-hypotheses", hypotheses, "-output", output)
    assert "/nowhere" in error_line("onmt_rerank", *missing, "-n_best", "1")
    assert not output.exists()


# ROUGE

PLAIN = RougeSettings(stemming=False)


def means(report: RougeReport, measure: str) -> list[float]:
    """ROUGE-1, -2 and -L."""
    return [measures[measure].mean for measures in report.scores.values()]


def score(candidate: str, *references: str, settings: RougeSettings = PLAIN) -> RougeReport:
    return score_texts([candidate], [[reference] for reference in references], settings)


# Counted by hand


def test_repeated_words_match_at_most_as_often_as_in_the_reference() -> None:
    report = score("the the the the the", "the cat the dog")
    assert means(report, "precision") == pytest.approx([40, 0, 40])
    assert means(report, "recall") == pytest.approx([50, 0, 50])
    assert means(report, "f1") == pytest.approx([100 * 2 * 0.4 * 0.5 / 0.9, 0, 100 * 2 * 0.4 * 0.5 / 0.9])


def test_bigrams_and_subsequences_of_lins_example() -> None:
    reference = "police killed the gunman"
    assert means(score("police kill the gunman", reference), "f1") == pytest.approx([75, 100 / 3, 75])
    assert means(score("the gunman kill police", reference), "f1") == pytest.approx([75, 100 / 3, 50])


def test_stemming_applies_to_words_of_at_least_four_letters() -> None:
    stemmed = replace(PLAIN, stemming=True)
    assert means(score("cats killing", "cat killed", settings=stemmed), "f1") == [100, 100, 100]
    assert means(score("bus its", "bu it", settings=stemmed), "f1") == [0, 0, 0]
    # The algorithm of 1980 stems "dies" to "di"; "die" is too short for it.
    assert means(score("dies", "die", settings=stemmed), "f1")[0] == 0


def test_irregular_forms_come_before_the_algorithm(tmp_path: Path) -> None:
    (tmp_path / "noun.exc").write_text("children child\ndies die\n")
    exceptions = read_exceptions([tmp_path / "noun.exc"])
    stemmed = replace(PLAIN, stemming=True)
    report = score_texts(["children dies"], [["child die"]], stemmed, exceptions)
    assert means(report, "f1") == [100, 100, 100]
    assert "stem:porter+2|" in report.signature


def test_several_references_are_summed_before_dividing() -> None:
    report = score("a b c d", "a x", "a b c d e f")
    # matches 1 + 4 of 2 + 6 words, 0 + 3 of 1 + 5 bigrams; the candidate counts once per reference
    assert means(report, "recall") == pytest.approx([100 * 5 / 8, 100 * 3 / 6, 100 * 5 / 8])
    assert means(report, "precision") == pytest.approx([100 * 5 / 8, 100 * 3 / 6, 100 * 5 / 8])


def test_texts_have_equal_weights() -> None:
    report = score_texts(["a", "b c d e"], [["a", "x y z u v w"]], PLAIN)
    assert means(report, "f1") == pytest.approx([50, 0, 50])


def test_empty_candidates_score_zero_and_missing_references_are_skipped() -> None:
    report = score_texts(["", "a b"], [["a b", "a b"]], PLAIN)
    assert [means(report, measure) for measure in ("precision", "recall", "f1")] == [[50, 50, 50]] * 3
    report = score_texts(["a b", "a b"], [["a b", "a b"], ["", "a c"]], PLAIN)
    assert means(report, "recall")[0] == pytest.approx((100 + 75) / 2)


# Bytes


def test_truncation_counts_bytes_and_drops_a_broken_character() -> None:
    cut = replace(PLAIN, cut_bytes=75, tokens="characters")
    assert means(score("é" * 40, "é" * 40, settings=cut), "recall")[0] == 100 * 37 / 40
    assert means(score("x" * 73 + "東京", "東", settings=cut), "recall")[0] == 0
    assert means(score("x" * 72 + "東京", "東京", settings=cut), "recall")[0] == 50
    assert means(score("short", "short", settings=cut), "recall")[0] == 100


def test_duc2004_truncates_only_the_candidate_to_75_bytes() -> None:
    # 70 bytes with the space, then five of the last word
    candidate = "é" * 33 + " ab " + "gunmen"
    reference = "ab gunme " + "word " * 20 + "gunmen"
    report = score(candidate, reference, settings=replace(PRESETS["duc2004"], stemming=False))
    assert means(report, "recall")[0] == pytest.approx(100 * 2 / 23)
    assert report.settings.measure == "recall"
    uncut = score(candidate, reference)
    assert means(uncut, "recall")[0] == pytest.approx(100 * 2 / 23)
    assert means(uncut, "recall")[1] == 0 < means(report, "recall")[1]


# Tokens


def test_tokens_of_other_languages() -> None:
    assert tokenize("Ärger über Straße-Nr. 7", "ascii") == ["rger", "ber", "stra", "e", "nr", "7"]
    assert tokenize("Ärger über Straße-Nr. 7", "unicode") == ["ärger", "über", "straße", "nr", "7"]
    assert tokenize("हिन्दी समाचार।", "unicode") == ["हिन्दी", "समाचार"]
    assert tokenize("東京 都。", "characters") == ["東", "京", "都"]
    report = score("東京", "東都", settings=replace(PLAIN, tokens="characters"))
    assert means(report, "f1")[0] == pytest.approx(50)


# The bootstrap


def test_interval_matches_the_number_of_texts() -> None:
    candidates = ["a", "b"] * 200
    report = score_texts(candidates, [["a"] * 400], PLAIN)
    interval = report.scores["rouge1"]["f1"]
    half = 1.96 * 50 / 400**0.5
    assert (interval.mean, interval.low, interval.high) == pytest.approx((50, 50 - half, 50 + half), abs=0.8)
    assert score_texts(candidates, [["a"] * 400], PLAIN).scores == report.scores
    assert score_texts(candidates, [["a"] * 400], replace(PLAIN, seed=2)).scores != report.scores


# Published scorers

WORDS = """the a of in to on and for Iraqi leaders leader killed killing kills president presidents elected
election elections nations nation's went gone children child men women better best U.S. talks talking talked
agreement agreed cannot oil-price prices 2004 $36 happily relational conditioning""".split()


def sentence(random_words: random.Random) -> str:
    return " ".join(random_words.choices(WORDS, k=random_words.randint(1, 9)))


@pytest.fixture
def outputs() -> tuple[list[str], list[list[str]]]:
    """200 candidates, some longer than 75 bytes, and four references each that are not."""
    words = random.Random(5)
    candidates = [f"{sentence(words)} {sentence(words)}" for _ in range(200)]
    return candidates, [[sentence(words)[:75] for _ in range(200)] for _ in range(4)]


@pytest.fixture
def py_rouge(monkeypatch: Patch) -> Any:
    """py-rouge's class; its dependencies on setuptools and NLTK downloads are replaced."""
    folder = Path(str(find_spec("rouge").origin)).parent  # type: ignore[union-attr]
    resources = types.ModuleType("pkg_resources")
    resources.resource_filename = lambda name, file: str(folder / file)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pkg_resources", resources)
    import rouge

    # At this point, texts have letters, digits and spaces only.
    monkeypatch.setattr(rouge.Rouge, "tokenize_text", staticmethod(lambda text, language="": text.split()))
    return rouge.Rouge


@pytest.mark.parametrize("name", ["f1", "duc2004"])
@pytest.mark.parametrize("stemming", [False, True])
def test_same_scores_as_py_rouge(
    name: str, stemming: bool, outputs: tuple[list[str], list[list[str]]], py_rouge: Any
) -> None:
    candidates, references = outputs
    settings = replace(PRESETS[name], stemming=stemming)
    theirs = py_rouge(
        metrics=["rouge-n", "rouge-l"],
        max_n=2,
        limit_length=settings.cut_bytes is not None,
        length_limit=settings.cut_bytes or 0,
        length_limit_type="bytes",
        stemming=stemming,
    )
    scores = theirs.get_scores(candidates, [list(of_text) for of_text in zip(*references)])
    ours = score_texts(candidates, references, settings, py_rouge.WORDNET_KEY_VALUE)
    for short, measure in (("p", "precision"), ("r", "recall"), ("f", "f1")):
        expected = [100 * scores[metric][short] for metric in ("rouge-1", "rouge-2", "rouge-l")]
        assert means(ours, measure) == pytest.approx(expected, abs=1e-6)
    assert means(ours, "recall")[0] > 5


# The command


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: Patch) -> str:
    """The start of a command line, in a folder with candidates and files of references."""
    (tmp_path / "candidates").write_text("the cats sat\n\n", encoding="utf-8")
    (tmp_path / "first").write_text("the cat sat\na dog\n", encoding="utf-8")
    (tmp_path / "second").write_text("a cat\n\n", encoding="utf-8")
    (tmp_path / "long").write_text("a\nb\nc\n", encoding="utf-8")
    (tmp_path / "latin").write_bytes(b"caf\xe9\nb\n")
    monkeypatch.chdir(tmp_path)
    return "onmt_rouge --candidates candidates --references"


def test_command_prints_scores_and_settings(asked: str, capsys: Capture) -> None:
    run(asked, "first", "second", "--preset", "duc2004")
    lines = capsys.readouterr().out.splitlines()
    # 3 + 1 matches of 3 + 2 words in the first text, none in the second
    assert lines[0].startswith("rouge1 recall 40.00 (95% interval 0.00 to 80.00)")
    assert lines[3].startswith(
        "texts:2|refs:2|measure:recall|bytes:75|tokens:ascii|stem:porter|multi:average|"
    )
    run(asked, "first", "--json", "--no_stem")
    report = json.loads(capsys.readouterr().out)
    assert report["scores"]["rouge1"]["f1"]["mean"] == pytest.approx(100 / 3)
    assert report["settings"]["stemming"] is False and "stem:no" in report["signature"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("first long", "2 candidates, but 3 lines in file 2 of the references"),
        ("second", "line 2 is empty in all reference files"),
        ("latin", "latin: line 1 is not UTF-8"),
        ("first --tokens unicode", "stemming supports tokens: ascii only"),
        ("first --exceptions long", "long: line 1 is 'a'"),
        ("first --exceptions long --no_stem", "exceptions: have no effect"),
    ],
)
def test_command_fails_in_one_line(arguments: str, message: str, asked: str, error_line: ErrorLine) -> None:
    assert message in error_line(asked, *arguments.split())


def test_empty_input_fails() -> None:
    with pytest.raises(UserError, match="no candidates"):
        score_texts([], [[]], PLAIN)
