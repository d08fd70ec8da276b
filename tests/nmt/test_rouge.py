"""ROUGE: cases counted by hand, and two published scorers on the same texts."""

from __future__ import annotations

import json
import random
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nmt import cli
from nmt.rouge import PRESETS, Report, Settings, cut, read_exceptions, score_texts, tokenize
from shared_embeddings.utils.errors import UserError
from tests.nmt.conftest import Capture, Patch

PLAIN = Settings(stemming=False)
Run = Callable[..., tuple[int, str, str]]


def means(report: Report, measure: str) -> list[float]:
    """ROUGE-1, -2 and -L."""
    return [measures[measure].mean for measures in report.scores.values()]


def score(candidate: str, *references: str, settings: Settings = PLAIN) -> Report:
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
    assert cut("é" * 40, 75) == "é" * 37
    assert cut("x" * 73 + "東京", 75) == "x" * 73
    assert cut("x" * 72 + "東京", 75) == "x" * 72 + "東"
    assert cut("short", 75) == "short"


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
    found = report.scores["rouge1"]["f1"]
    half = 1.96 * 50 / 400**0.5
    assert (found.mean, found.low, found.high) == pytest.approx((50, 50 - half, 50 + half), abs=0.8)
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
    found = theirs.get_scores(candidates, [list(of_text) for of_text in zip(*references)])
    ours = score_texts(candidates, references, settings, py_rouge.WORDNET_KEY_VALUE)
    for short, measure in (("p", "precision"), ("r", "recall"), ("f", "f1")):
        expected = [100 * found[metric][short] for metric in ("rouge-1", "rouge-2", "rouge-l")]
        assert means(ours, measure) == pytest.approx(expected, abs=1e-6)
    assert means(ours, "recall")[0] > 5


# The command


@pytest.fixture
def run(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> Run:
    """Runs ``onmt_rouge`` in a folder with candidates and two references each; gives status and output."""
    (tmp_path / "candidates").write_text("the cats sat\n\n", encoding="utf-8")
    (tmp_path / "first").write_text("the cat sat\na dog\n", encoding="utf-8")
    (tmp_path / "second").write_text("a cat\n\n", encoding="utf-8")
    (tmp_path / "long").write_text("a\nb\nc\n", encoding="utf-8")
    (tmp_path / "latin").write_bytes(b"caf\xe9\nb\n")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["onmt_rouge", *arguments])
        try:
            cli.rouge()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        return status, *capsys.readouterr()

    return call


def test_command_prints_scores_and_settings(run: Run) -> None:
    asked = ("--candidates", "candidates", "--references", "first", "second", "--preset", "duc2004")
    status, out, _ = run(*asked)
    lines = out.splitlines()
    # 3 + 1 matches of 3 + 2 words in the first text, none in the second
    assert status == 0 and lines[0].startswith("rouge1 recall 40.00 (95% interval 0.00 to 80.00)")
    assert lines[3].startswith(
        "texts:2|refs:2|measure:recall|bytes:75|tokens:ascii|stem:porter|multi:average|"
    )
    status, out, _ = run("--candidates", "candidates", "--references", "first", "--json", "--no_stem")
    report = json.loads(out)
    assert status == 0 and report["scores"]["rouge1"]["f1"]["mean"] == pytest.approx(100 / 3)
    assert report["settings"]["stemming"] is False and "stem:no" in report["signature"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["first", "long"], "2 candidates, but 3 lines in file 2 of the references"),
        (["second"], "line 2 is empty in all reference files"),
        (["absent"], "no such file: absent"),
        (["latin"], "latin: not UTF-8 at byte 3"),
        (["first", "--tokens", "unicode"], "stemming supports tokens: ascii only"),
        (["first", "--bytes", "0"], "bytes is 0"),
        (["first", "--exceptions", "long"], "long: line 1 is 'a'"),
        (["first", "--stems"], "unrecognized arguments: --stems; see onmt_rouge --help"),
    ],
)
def test_command_fails_in_one_line(run: Run, arguments: list[str], message: str) -> None:
    status, out, err = run("--candidates", "candidates", "--references", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("onmt_rouge: ") and message in err and err.count("\n") == 1


def test_empty_input_fails() -> None:
    with pytest.raises(UserError, match="no candidates"):
        score_texts([], [[]], PLAIN)
    with pytest.raises(UserError, match="measure is 'f2'"):
        Settings(measure="f2")
