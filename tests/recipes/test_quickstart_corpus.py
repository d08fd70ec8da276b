"""The made-up corpus: what it says, that it is the same again and disjoint, and what it refuses."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from recipes.common.tools import run_main
from recipes.quickstart import corpus
from recipes.quickstart.corpus import (
    COUNTS,
    KINDS,
    CorpusError,
    Template,
    checksum,
    make_corpus,
    read_templates,
    say,
    write_corpus,
)
from recipes.quickstart.languages import JOINER, LanguageError, Speech, Tokenizer, clean, covered_languages

SIZES = {"train": 300, "valid": 30, "test": 30}


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        write_corpus(make_corpus("en", "de", SIZES, seed=3), folder, "en", "de")
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == ["test.de", "test.en", "train.de", "train.en", "valid.de", "valid.en"]
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_another_seed_gives_another_corpus() -> None:
    assert checksum(make_corpus("en", "de", SIZES, seed=3)) != checksum(
        make_corpus("en", "de", SIZES, seed=4)
    )


@pytest.mark.parametrize(
    ("source", "target"),
    [("en", "de"), ("en", "fr"), ("de", "es"), ("de_AT", "en-GB"), ("ru", "ja"), ("fa", "tr"), ("kk", "nb")],
)
def test_parts_are_disjoint_on_either_side_and_clean(source: str, target: str) -> None:
    parts = make_corpus(source, target, SIZES)
    assert {part: len(pairs) for part, pairs in parts.items()} == SIZES
    for side in (0, 1):
        texts = [pair[side] for pairs in parts.values() for pair in pairs]
        assert len(set(texts)) == len(texts)
        assert all(text == clean(text) and text for text in texts)


def test_hand_checked_sentences() -> None:
    """Every template with the same facts, against what a person wrote down."""
    english, german, french, spanish = (Speech(name) for name in ("en", "de", "fr", "es"))
    day = (2021, 8, 18)
    assert say(english, "full_date", day) == "Wednesday, August 18, 2021"
    assert say(german, "full_date", day) == "Mittwoch, 18. August 2021"
    assert say(french, "long_date", day) == "18 août 2021"
    assert say(spanish, "day_of_year", day) == "18 de agosto"
    assert say(english, "time", (15, 5)) == "3:05 PM"
    assert say(german, "time", (15, 5)) == "15:05"
    assert say(english, "money", (7500, "CHF")) == "7,500 Swiss francs"
    assert say(german, "money", (7500, "CHF")) == "7.500 Schweizer Franken"
    assert say(french, "money_in_words", (82, "EUR")) == "quatre-vingt-deux euros"
    assert say(german, "ago", (3, "week")) == "vor 3 Wochen"
    assert say(english, "ahead", (5, "day")) == "in 5 days"
    assert say(spanish, "speed", (47, "speed-kilometer-per-hour")) == "47 kilómetros por hora"
    assert say(german, "ordinal", (17,)) == "siebzehnte"
    assert say(english, "sum", (17, 5)) == "seventeen + five = twenty-two"
    assert say(english, "territories", ("IE", "NO", "TM")) == "Ireland, Norway, and Turkmenistan"
    assert say(german, "territories", ("IE", "NO", "TM")) == "Irland, Norwegen und Turkmenistan"


def test_relative_times_keep_their_unit() -> None:
    english = Speech("en")
    assert english.relative(20, "month", past=True) == "20 months ago"
    assert english.relative(2, "year", past=False) == "in 2 years"
    assert english.relative(15, "day", past=False) == "in 15 days"


def test_counts_avoid_numbers_that_agree_with_a_gender() -> None:
    assert not any(count % 10 == 1 for count in COUNTS)


def test_dates_cover_the_week() -> None:
    monday = datetime.date(2024, 1, 1)
    assert [Speech("en").weekday(day) for day in (0, 6)] == ["Monday", "Sunday"]
    assert Speech("en").date(monday, "full").startswith("Monday")


@pytest.mark.parametrize(
    ("language", "words"), [("el", "num2words"), ("kz", "Babel"), ("../de", "Babel"), ("", "")]
)
def test_uncovered_language_names_the_covered_ones(language: str, words: str) -> None:
    with pytest.raises(LanguageError) as caught:
        make_corpus("en", language, SIZES)
    message = str(caught.value)
    assert repr(language) in message and words in message
    assert "supported languages: am, ar, az" in message


def test_every_covered_language_speaks() -> None:
    assert len(covered_languages()) > 40
    for language in covered_languages():
        speech = Speech(language)
        assert speech.number(42) and speech.listing(["A", "B", "C"]) and speech.time(15, 5)


def test_impossible_corpora_are_refused() -> None:
    with pytest.raises(CorpusError, match="choose two languages"):
        make_corpus("en", "en", SIZES)
    with pytest.raises(CorpusError, match="at least one"):
        make_corpus("en", "de", {"train": 0})


def test_exhausted_templates_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [Template({"month": "month"}, {"en": "It is {month}.", "de": "Es ist {month}."})]
    monkeypatch.setattr(corpus, "read_templates", lambda: few)
    with pytest.raises(CorpusError, match="no new one after 12"):
        make_corpus("en", "de", SIZES)


def test_templates_have_all_languages_and_every_kind_is_used() -> None:
    templates = read_templates()
    assert all(set(template.texts) == {"en", "de", "fr", "es"} for template in templates)
    assert {kind for template in templates for kind in template.slots.values()} == set(KINDS)


def test_template_without_its_gap_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "templates.yaml"
    path.write_text("- slots: {a: number}\n  en: 'No gap.'\n")
    with pytest.raises(CorpusError, match="each slot once"):
        read_templates(path)
    path.write_text("- slots: {a: weather}\n  en: '{a}'\n")
    with pytest.raises(CorpusError, match="weather"):
        read_templates(path)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--train", "20", "--valid", "2", "--test", "2", "--output"]
    assert run_main("corpus", corpus.main, [*arguments, str(tmp_path / "made")]) == 0
    assert run_main("corpus", corpus.main, [*arguments, str(tmp_path / "made")]) == 2
    assert run_main("corpus", corpus.main, [*arguments, str(tmp_path / "made"), "--force"]) == 0
    capsys.readouterr()
    assert len((tmp_path / "made" / "train.en").read_text(encoding="utf-8").splitlines()) == 20
    (tmp_path / "file").write_text("")
    assert run_main("corpus", corpus.main, [*arguments, str(tmp_path / "file")]) == 2
    assert run_main("corpus", corpus.main, [*arguments, str(tmp_path), "--target", "el"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "el" in errors[1]


@pytest.mark.slow_except("en")
@pytest.mark.parametrize("language", ["en", "de", "fr", "fa", "ja", "th", "te"])
def test_words_join_to_the_sentence(language: str) -> None:
    other = "en" if language != "en" else "de"
    tokenizer = Tokenizer(language)
    for text, _ in make_corpus(language, other, {"train": 100})["train"]:
        words = tokenizer.split(text)
        assert tokenizer.join(words) == text
        assert all(word and not any(character.isspace() for character in word) for word in words)


def test_tokenization_of_a_sentence() -> None:
    words = Tokenizer("de").split("Am 9. Januar um 08:45 Uhr (endlich).")
    assert [word.replace(JOINER, "_") for word in words] == (
        ["Am", "9.", "Januar", "um", "08", "_:", "_45", "Uhr", "(", "_endlich", "_)", "_."]
    )
    assert Tokenizer("ja").split("3月") == ["3", JOINER + "月"]


def test_clean_removes_what_is_invisible() -> None:
    assert clean("\u200f3:45\u202fPM\u00a0 l\u2019an\n") == "3:45 PM l'an"
