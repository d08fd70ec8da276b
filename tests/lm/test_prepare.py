"""The command lm_prepare."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm.data.corpus import SPLITS, Published, load_corpus
from lm.data.datasets import SOURCES
from lm.data.prepare import parse_fractions, share_lines
from tests.files.commands import content
from tests.lm.runs import command


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text for each split in the current folder."""
    monkeypatch.chdir(tmp_path)
    for split in SPLITS:
        Path(f"{split}.txt").write_text(f"some {split} text\n")


ALL = "-output data -train train.txt -valid valid.txt -test test.txt"


@pytest.mark.usefixtures("texts")
def test_corpus_is_written_and_described() -> None:
    ended = command("lm_prepare", *ALL.split(), "-max_size", 4)
    assert ended.status == 0 and load_corpus(Path("data")).description["types"] == 4
    assert "valid: 4 tokens, 25.00% of them <unk>" in ended.out
    assert "vocabulary: 4 words" in ended.out


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-output data -train train.txt -test test.txt", "-valid missing"),
        (f"{ALL} -split 0.8,0.1,0.1", "-split needs -train without other texts"),
        (f"{ALL} -seed 2", "-seed needs -train without other texts"),
        (f"{ALL} -min_frequency 0", "-min_frequency is 0"),
        (f"{ALL} -max_size 2", "-max_size is 2"),
        (f"{ALL} -max_size many", "'many' is not a whole number"),
        (f"{ALL} -foo", "unrecognized arguments: -foo"),
        (ALL.replace("test.txt", "absent.txt"), "-test: no such file: absent.txt"),
        (ALL.removeprefix("-output data"), "required: -output"),
        (f"{ALL} -dataset ptb", "-train and -valid and -test cannot be combined with -dataset"),
        (f"{ALL} -downloads here", "-downloads has no effect without -dataset"),
        ("-output data", "-train and -valid and -test missing"),
        (f"{ALL} -dataset wikitext", "invalid choice: 'wikitext'"),
        (ALL.replace("train.txt", "/dev/null"), "-train: /dev/null is a device or a pipe"),
        (ALL.replace("data", "train.txt"), "is a file; name a folder"),
        (ALL.replace("data", "dangling"), "is a link to nothing"),
        ("-output data -train train.txt -split 0.9,0.1", "three fractions"),
        ("-output data -train train.txt -split 1,a,b", "is '1,a,b'"),
        ("-output data -train train.txt -split 0.5,0.4,0.2", "sum to 1"),
        ("-output data -train train.txt -split 1.2,-0.1,-0.1", "above 0"),
        ("-output data -train train.txt -split nan,0.5,0.5", "is 'nan,0.5,0.5'"),
        ("-output data -train train.txt", "1 lines cannot be split into 3"),
        ("-output data -train latin.txt", "latin.txt: line 3 is not UTF-8"),
        ("-output data -train train.txt -seed -1", "-seed is -1"),
        ("-output own -train own/texts/train.txt", "would replace the file of -train"),
        ("-output data -train /dev/zero", "is a device or a pipe"),
    ],
)
def test_user_errors_are_one_line(arguments: str, message: str) -> None:
    Path("dangling").symlink_to("home")
    Path("latin.txt").write_bytes(b"a\nb\n\xe9t\xe9\nc\n")
    Path("own/texts").mkdir(parents=True)
    Path("own/texts/train.txt").write_text("a\nb\nc\nd\n")
    before = content(Path())
    assert command("lm_prepare", *arguments.split()).says("lm_prepare: ", message)
    after = content(Path())
    assert {name: after[name] for name in after if name not in ("data", "data/texts")} == before


def split(folder: Path, text: bytes, *options: object) -> tuple[dict[str, list[bytes]], str]:
    """The lines of the splits that lm_prepare writes for one text, and what it prints."""
    (folder / "one.txt").write_bytes(text)
    ended = command("lm_prepare", "-train", folder / "one.txt", "-output", folder / "data", *options)
    assert ended.status == 0, ended.err
    found = {name: (folder / "data" / "texts" / f"{name}.txt").read_bytes() for name in SPLITS}
    return {name: lines.splitlines() for name, lines in found.items()}, ended.out


def test_a_single_text_is_split_by_lines(tmp_path: Path) -> None:
    lines = [f"line {number}".encode() for number in range(200)]
    text = b"\xef\xbb\xbf" + b"\n".join(lines)  # a byte order mark, and no line feed at the end
    parts, printed = split(tmp_path, text)
    assert "split 200 lines at random with seed 1: 180 to train, 10 to valid, 10 to test" in printed
    assert "train: 540 tokens" in printed and "valid: 30 tokens" in printed
    assert load_corpus(tmp_path / "data").description["name"] == "one"
    assert {name: len(part) for name, part in parts.items()} == {"train": 180, "valid": 10, "test": 10}
    assert sorted(sum(parts.values(), [])) == sorted(lines)
    places = {name: [lines.index(line) for line in part] for name, part in parts.items()}
    assert all(place == sorted(place) for place in places.values())
    # At random: held-out lines are from the whole text.
    assert min(places["valid"]) < 100 < max(places["valid"])

    assert split(tmp_path, text)[0] == parts
    asked = ["-train", tmp_path / "one.txt", "-output", tmp_path / "data", "-seed", 2]
    existing = f"{tmp_path}/data/texts/train.txt exists with other lines; use -force"
    ended = command("lm_prepare", *asked)
    assert ended.status == 2 and existing in ended.err
    assert split(tmp_path, text)[0] == parts
    assert split(tmp_path, text, "-seed", 2, "-force")[0] != parts
    halves, _ = split(tmp_path, text, "-split", "0.5,.25,0.25", "-force")
    assert [len(halves[name]) for name in SPLITS] == [100, 50, 50]


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


def test_known_dataset_is_found_in_data_dir_and_its_size_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "given" / "wikitext-2"
    folder.mkdir(parents=True)
    for split in SPLITS:
        (folder / f"wiki.{split}.tokens").write_text("a b\n")
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "given"))
    arguments = ["-dataset", "wikitext2", "-output", tmp_path / "data"]
    ended = command("lm_prepare", *arguments)
    assert ended.says("wikitext2: the train text has 3 tokens, the published text 2,088,628")
    small = Published(dict.fromkeys(SPLITS, 3), 4)
    monkeypatch.setitem(SOURCES, "wikitext2", SOURCES["wikitext2"]._replace(published=small))
    assert command("lm_prepare", *arguments).status == 0
    assert load_corpus(tmp_path / "data").description["name"] == "wikitext2"
