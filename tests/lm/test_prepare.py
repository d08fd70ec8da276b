"""The command lm_prepare."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lm import cli
from lm.data.corpus import SPLITS, Published, load_corpus
from lm.data.datasets import SOURCES
from lm.data.prepare import parse_fractions, share_lines


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A correct command line."""
    found = ["-output", str(tmp_path / "data")]
    for split in SPLITS:
        path = tmp_path / f"{split}.txt"
        path.write_text(f"some {split} text\n")
        found += [f"-{split}", str(path)]
    return found


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["lm_prepare", *arguments])
    try:
        cli.prepare()
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


def test_corpus_is_written_and_described(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([*arguments, "-max_size", "4"], monkeypatch) == 0
    assert load_corpus(tmp_path / "data").description["types"] == 4
    printed = capsys.readouterr().out
    assert "valid: 4 tokens, 25.00% of them <unk>" in printed
    assert "vocabulary: 4 words" in printed


def test_user_errors_are_one_line_with_status_2(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "home")
    cases = {
        "-valid missing": [item for item in arguments if "valid" not in item],
        "-split needs -train without other texts": [*arguments, "-split", "0.8,0.1,0.1"],
        "-seed needs -train without other texts": [*arguments, "-seed", "2"],
        "-min_frequency is 0": [*arguments, "-min_frequency", "0"],
        "-max_size is 2": [*arguments, "-max_size", "2"],
        "'many' is not a whole number": [*arguments, "-max_size", "many"],
        "unrecognized arguments: -foo": [*arguments, "-foo"],
        "-test: no such file: absent.txt": [*arguments[:-1], "absent.txt"],
        "required: -output": arguments[2:],
        "-train and -valid and -test cannot be combined with -dataset": [*arguments, "-dataset", "ptb"],
        "-downloads has no effect without -dataset": [*arguments, "-downloads", "here"],
        "-train and -valid and -test missing": arguments[:2],
        "invalid choice: 'wikitext'": [*arguments, "-dataset", "wikitext"],
        "-train: /dev/null is a device or a pipe": [*arguments[:3], "/dev/null", *arguments[4:]],
        "is a file; name a folder": ["-output", arguments[3], *arguments[2:]],
        "is a link to nothing": ["-output", str(dangling), *arguments[2:]],
    }
    for message, line in cases.items():
        assert run(line, monkeypatch) == 2, message
        error = capsys.readouterr().err
        assert message in error and error.startswith("lm_prepare: ") and error.count("\n") == 1


def split(folder: Path, text: bytes, *options: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The splits that lm_prepare writes for one text."""
    (folder / "one.txt").write_bytes(text)
    line = ["-train", str(folder / "one.txt"), "-output", str(folder / "data"), *options]
    assert run(line, monkeypatch) == 0
    return {name: (folder / "data" / "texts" / f"{name}.txt").read_bytes() for name in SPLITS}


def test_a_single_text_is_split_by_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"line {number}".encode() for number in range(200)]
    text = b"\xef\xbb\xbf" + b"\n".join(lines)  # a byte order mark, and no line feed at the end
    parts = split(tmp_path, text, monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    assert "split 200 lines at random with seed 1: 180 to train, 10 to valid, 10 to test" in printed
    assert "train: 540 tokens" in printed and "valid: 30 tokens" in printed
    assert load_corpus(tmp_path / "data").description["name"] == "one"
    got = {name: part.splitlines() for name, part in parts.items()}
    assert {name: len(part) for name, part in got.items()} == {"train": 180, "valid": 10, "test": 10}
    assert sorted(sum(got.values(), [])) == sorted(lines)
    places = {name: [lines.index(line) for line in part] for name, part in got.items()}
    assert all(place == sorted(place) for place in places.values())
    # At random: held-out lines are from the whole text.
    assert min(places["valid"]) < 100 < max(places["valid"])

    assert split(tmp_path, text, monkeypatch=monkeypatch) == parts
    asked = ["-train", str(tmp_path / "one.txt"), "-output", str(tmp_path / "data")]
    capsys.readouterr()
    assert run([*asked, "-seed", "2"], monkeypatch) == 2
    assert f"{tmp_path}/data/texts/train.txt exists with other lines; use -force" in capsys.readouterr().err
    assert split(tmp_path, text, monkeypatch=monkeypatch) == parts
    assert split(tmp_path, text, "-seed", "2", "-force", monkeypatch=monkeypatch) != parts
    halves = split(tmp_path, text, "-split", "0.5,.25,0.25", "-force", monkeypatch=monkeypatch)
    assert [len(halves[name].splitlines()) for name in SPLITS] == [100, 50, 50]


@pytest.mark.parametrize(
    ("fractions", "lines", "wanted"),
    [
        ("0.9,0.05,0.05", 3, (1, 1, 1)),
        ("0.9,0.05,0.05", 20, (18, 1, 1)),
        ("0.05,0.9,0.05", 3, (1, 1, 1)),
        ("0.02,0.49,0.49", 4, (1, 1, 2)),
        ("0.6,0.3,0.1", 1001, (601, 300, 100)),
    ],
)
def test_every_split_has_a_line(fractions: str, lines: int, wanted: tuple[int, ...]) -> None:
    counts = share_lines(parse_fractions(fractions), lines)
    assert tuple(counts[name] for name in SPLITS) == wanted


def test_invalid_splits_fail_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, short, latin = tmp_path / "one.txt", tmp_path / "short.txt", tmp_path / "latin.txt"
    text.write_text("a\nb\nc\nd\n")
    short.write_text("a\nb\n")
    latin.write_bytes(b"a\nb\n\xe9t\xe9\nc\n")
    own = tmp_path / "data" / "texts" / "train.txt"
    own.parent.mkdir(parents=True)
    own.write_text("a\nb\nc\nd\n")
    asked: dict[str, list[object]] = {
        "three fractions": [text, "-split", "0.9,0.1"],
        "is '1,a,b'": [text, "-split", "1,a,b"],
        "sum to 1": [text, "-split", "0.5,0.4,0.2"],
        "above 0": [text, "-split", "1.2,-0.1,-0.1"],
        "is 'nan,0.5,0.5'": [text, "-split", "nan,0.5,0.5"],
        "2 lines cannot be split into 3": [short],
        "latin.txt: line 3 is not UTF-8": [latin],
        "-seed is -1": [text, "-seed", "-1"],
        "would replace the file of -train": [own],
        "is a device or a pipe": ["/dev/zero"],
    }
    for message, words in asked.items():
        line = ["-output", str(tmp_path / "data"), "-train", *map(str, words)]
        assert run(line, monkeypatch) == 2, message
        error = capsys.readouterr().err
        assert message in error and error.startswith("lm_prepare: ") and error.count("\n") == 1
    assert sorted(path.name for path in (tmp_path / "data").rglob("*")) == ["texts", "train.txt"]
    assert own.read_text() == "a\nb\nc\nd\n"


def test_known_dataset_is_found_in_data_dir_and_its_size_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in SPLITS:
        path = tmp_path / "given" / "wikitext-2" / f"wiki.{split}.tokens"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a b\n")
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "given"))
    arguments = ["-dataset", "wikitext2", "-output", str(tmp_path / "data")]
    assert run(arguments, monkeypatch) == 2
    assert "the train text has 3 tokens, the published text 2,088,628" in capsys.readouterr().err
    small = Published(dict.fromkeys(SPLITS, 3), 4)
    monkeypatch.setitem(SOURCES, "wikitext2", SOURCES["wikitext2"]._replace(published=small))
    assert run(arguments, monkeypatch) == 0
    assert load_corpus(tmp_path / "data").description["name"] == "wikitext2"
