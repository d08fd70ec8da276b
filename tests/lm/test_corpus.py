"""Corpora: their tokens, when they are rebuilt, detected damage, and the command lm_prepare."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm.data import corpus
from lm.data import vocabulary as reading
from lm.data.corpus import SPLITS, Published, load_corpus, prepare, read_tokens
from lm.data.datasets import SOURCES
from lm.data.prepare import parse_fractions, share_lines
from lm.data.vocabulary import Limits
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import sha256, write_text
from tests.commands.harness import content
from tests.lm.runs import command

TEXT = {"train": "the cat sat\n\non the mat\n", "valid": "the dog sat\n", "test": "a cat\n"}


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, list[Path]]:
    paths = {split: [tmp_path / f"{split}.txt"] for split in SPLITS}
    for split, text in TEXT.items():
        paths[split][0].write_text(text)
    return paths


def decoded(tokens: np.ndarray, words: list[str]) -> str:
    return " ".join(words[token] for token in tokens)


def test_tokens_represent_the_text(texts: dict[str, list[Path]], tmp_path: Path) -> None:
    prepare(texts, tmp_path / "data", "cats")
    found = load_corpus(tmp_path / "data")
    words = found.vocabulary.words
    assert words == ["<eos>", "the", "cat", "mat", "on", "sat", "<unk>"]
    assert found.vocabulary.counts == [3, 2, 1, 1, 1, 1, 0]
    assert decoded(found.train, words) == "the cat sat <eos> <eos> on the mat <eos>"
    assert decoded(found.valid, words) == "the <unk> sat <eos>"
    assert decoded(found.test, words) == "<unk> cat <eos>"
    assert isinstance(found.train, np.memmap) and found.train.dtype == np.int32
    assert not found.train.flags.writeable
    description = found.description
    assert description["tokens"] == {"train": 9, "valid": 4, "test": 3}
    assert description["unknown"] == {"train": 0, "valid": 1, "test": 1}
    assert (description["name"], description["types"]) == ("cats", 7)
    assert description["files"]["test.npy"] == sha256(tmp_path / "data" / "test.npy")


def test_several_texts_are_concatenated(texts: dict[str, list[Path]], tmp_path: Path) -> None:
    prepare({**texts, "train": texts["train"] + texts["valid"]}, tmp_path / "data")
    found = load_corpus(tmp_path / "data")
    expected = "the cat sat <eos> <eos> on the mat <eos> the dog sat <eos>"
    assert decoded(found.train, found.vocabulary.words) == expected


def test_limits_and_lower_case_are_applied(texts: dict[str, list[Path]], tmp_path: Path) -> None:
    write_text(texts["train"][0], "The cat\nthe CAT\n")
    description = prepare(texts, tmp_path / "data", limits=Limits(max_size=3), lower=True)
    assert load_corpus(tmp_path / "data").vocabulary.words == ["<eos>", "<unk>", "cat"]
    assert description["unknown"]["train"] == 2


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The texts that are read."""
    found: list[Path] = []
    read = corpus.word_blocks

    def noted(path: Path, *arguments: Any) -> Any:
        found.append(path)
        return read(path, *arguments)

    monkeypatch.setattr(corpus, "word_blocks", noted)
    return found


@pytest.mark.parametrize("change", ["text", "limits", "lower", "tokens", "description"])
def test_any_change_rebuilds_the_corpus(
    texts: dict[str, list[Path]], tmp_path: Path, passes: list[Path], change: str
) -> None:
    folder = tmp_path / "data"
    first = prepare(texts, folder)
    assert len(passes) == 6
    assert prepare(texts, folder) == first and len(passes) == 6
    settings: dict[str, Any] = {}
    if change == "text":
        write_text(texts["valid"][0], "a mat\n")
    elif change == "limits":
        settings = {"limits": Limits(min_frequency=2)}
    elif change == "lower":
        settings = {"lower": True}
    elif change == "tokens":
        (folder / "test.npy").unlink()
    else:
        (folder / "data.json").write_text("{")
    passes.clear()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    if change != "tokens":  # otherwise it is the same corpus, damaged
        with pytest.raises(UserError, match="already exists; add --force"):
            prepare(texts, folder, **settings)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before and not passes
        settings["force"] = True
    description = prepare(texts, folder, **settings)
    assert len(passes) == 6
    assert load_corpus(folder).description == description


def test_interrupted_run_keeps_the_old_corpus_and_the_next_one_cleans_up(
    texts: dict[str, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    before = prepare(texts, folder)
    write_text(texts["train"][0], "other words\n")

    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "_write_tokens", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(texts, folder, force=True)
    assert load_corpus(folder).description == before
    (folder / ".train.npy.12345.tmp").write_bytes(b"half")
    prepare(texts, folder, force=True)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["data.json", "vocabulary.tsv", *(f"{split}.npy" for split in SPLITS)]
    )


def test_text_that_changes_during_preparation_fails(
    texts: dict[str, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = corpus._count

    def count_then_change(*arguments: Any) -> Any:
        counted = count(*arguments)
        write_text(texts["train"][0], "shorter\n")
        return counted

    monkeypatch.setattr(corpus, "_count", count_then_change)
    with pytest.raises(UserError, match="train text changed"):
        prepare(texts, tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("split", "content", "printed"),
    [
        ("train", b"", "train.txt: 0 tokens; the train text needs at least 2"),
        ("valid", b"\n", "valid.txt: 1 tokens; the valid text needs at least 2"),
        ("test", b"caf\xe9 au lait\n", "test.txt: not UTF-8 at byte 3"),
        ("valid", None, "-valid: no such file: .*valid.txt"),
    ],
)
def test_unusable_texts_fail(
    texts: dict[str, list[Path]], tmp_path: Path, split: str, content: bytes | None, printed: str
) -> None:
    if content is None:
        texts[split][0].unlink()
    else:
        texts[split][0].write_bytes(content)
    with pytest.raises(UserError, match=printed):
        prepare(texts, tmp_path / "data")
    assert not (tmp_path / "data" / "data.json").exists()


def test_published_sizes_are_checked(texts: dict[str, list[Path]], tmp_path: Path) -> None:
    tokens = {"train": 9, "valid": 4, "test": 3}
    with pytest.raises(UserError, match="^cats: the test text has 3 tokens, the published text 30; replace"):
        prepare(texts, tmp_path / "data", "cats", published=Published({**tokens, "test": 30}, 7))
    with pytest.raises(UserError, match="7 words with <unk> and <eos>, the published text 8; replace"):
        prepare(texts, tmp_path / "data", published=Published(tokens, 8))
    prepare(texts, tmp_path / "data", published=Published(tokens, 8), limits=Limits(min_frequency=2))
    prepare(texts, tmp_path / "data", published=Published(tokens, 7), force=True)


def write_archive(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, tokens=np.zeros(9, np.int32))


@pytest.mark.parametrize(
    ("damage", "printed"),
    [
        (Path.unlink, "train.npy is missing; run lm_prepare again"),
        (lambda path: path.write_bytes(path.read_bytes()[:-4]), "changed after lm_prepare"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\xff"), "changed after lm_prepare"),
    ],
    ids=["missing", "truncated", "flipped"],
)
def test_damaged_corpus_fails_in_one_line(
    texts: dict[str, list[Path]], tmp_path: Path, damage: Callable[[Path], object], printed: str
) -> None:
    prepare(texts, tmp_path / "data")
    damage(tmp_path / "data" / "train.npy")
    with pytest.raises(UserError, match=printed):
        load_corpus(tmp_path / "data")


@pytest.mark.parametrize(
    ("write", "printed"),
    [
        (lambda path: np.save(path, np.zeros(3)), "float64 of shape"),
        (lambda path: np.save(path, np.zeros(3, np.int64)), "int64"),
        (lambda path: np.save(path, np.zeros((3, 1), np.int32)), "shape"),
        (lambda path: np.save(path, np.array([{}], dtype=object)), "not a token file"),
        (lambda path: path.write_bytes(b""), "tokens.npy: not a token file"),
        (lambda path: path.write_bytes(b"not an array"), "tokens.npy: not a token file"),
        (lambda path: path.write_bytes(b"\x93NUMPY\x01\x00"), "tokens.npy: not a token file"),
        (write_archive, "an archive"),
    ],
)
def test_files_without_tokens_fail(tmp_path: Path, write: Callable[[Path], object], printed: str) -> None:
    write(tmp_path / "tokens.npy")
    with pytest.raises(UserError, match=printed):
        read_tokens(tmp_path / "tokens.npy", 3, 7)


@pytest.mark.parametrize("content", [None, "", "[]", '{"format": "other"}', '{"files": {}}'])
def test_folder_without_a_corpus_fails(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "data"
    with pytest.raises(UserError, match="no such folder; create it with lm_prepare"):
        load_corpus(folder)
    folder.mkdir()
    if content is not None:
        write_text(folder / "data.json", content)
    with pytest.raises(UserError, match="has no valid data.json"):
        load_corpus(folder)


def test_memory_does_not_grow_with_the_text(
    texts: dict[str, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Checksums read a mebibyte at a time; this text, a single line, is no larger.
    monkeypatch.setattr(corpus, "sha256", lambda path: "")
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1 << 12)
    texts["train"][0].write_text("some words of a line " * 40_000)
    tracemalloc.start()
    try:
        prepare(texts, tmp_path / "data")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < texts["train"][0].stat().st_size / 4


def described(folder: Path, change: dict[str, Any]) -> None:
    """Change entries of ``data.json``; None removes one."""
    path = folder / "data.json"
    content = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


ODD_DESCRIPTIONS = [
    {key: value}
    for key in ("checksum", "tokens", "unknown", "types", "files", "name", "version")
    for value in (None, [], 5.5, "odd", {"a": 1}, True)
    if (key, value) not in (("name", "odd"), ("version", True))
]


@pytest.mark.parametrize("change", ODD_DESCRIPTIONS, ids=str)
def test_incomplete_description(texts: dict[str, list[Path]], tmp_path: Path, change: dict[str, Any]) -> None:
    prepare(texts, tmp_path / "data")
    described(tmp_path / "data", change)
    with pytest.raises(UserError, match=r"data.json.*run lm_prepare"):
        load_corpus(tmp_path / "data")


@pytest.mark.parametrize(
    ("tokens", "printed"),
    [
        ([0, 3, 7, 0], "token 2 is 7, but the vocabulary has the ids 0 to 6"),
        ([0, 3, 1, -1], "token 3 is -1"),
        ([0, 3, 2**31 - 1, 2], "token 2 is 2147483647"),
        ([0, 3, 2], r"int32 of shape \(3,\); expected int32 of shape \(4,\)"),
        ([], r"int32 of shape \(0,\)"),
    ],
)
@pytest.mark.parametrize("block", [1, 3, 1 << 22])
def test_ids_beyond_the_vocabulary(
    texts: dict[str, list[Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokens: list[int],
    printed: str,
    block: int,
) -> None:
    """Checked once, when a corpus is opened: training would fail with an IndexError after hours."""
    monkeypatch.setattr(corpus, "_BLOCK", block)
    folder = tmp_path / "data"
    prepare(texts, folder)
    np.save(folder / "valid.npy", np.array(tokens, dtype=np.int32))
    files = json.loads((folder / "data.json").read_text())["files"]
    files["valid.npy"] = sha256(folder / "valid.npy")
    described(folder, {"files": files, "checksum": corpus._checksum(files)})
    with pytest.raises(UserError, match=printed) as error:
        load_corpus(folder)
    assert str(folder / "valid.npy") in str(error.value)


@pytest.fixture
def texts_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text for each split in the current folder."""
    monkeypatch.chdir(tmp_path)
    for split in SPLITS:
        Path(f"{split}.txt").write_text(f"some {split} text\n")


ALL = "-output data -train train.txt -valid valid.txt -test test.txt"


@pytest.mark.usefixtures("texts_here")
def test_corpus_is_written_and_described() -> None:
    ended = command("lm_prepare", *ALL.split(), "-max_size", 4)
    assert ended.status == 0 and load_corpus(Path("data")).description["types"] == 4
    assert "valid: 4 tokens, 25.00% of them <unk>" in ended.out
    assert "vocabulary: 4 words" in ended.out


@pytest.mark.usefixtures("texts_here")
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


def split_lines(folder: Path, text: bytes, *options: object) -> tuple[dict[str, list[bytes]], str]:
    """The lines of the splits that lm_prepare writes for one text, and what it prints."""
    (folder / "one.txt").write_bytes(text)
    ended = command("lm_prepare", "-train", folder / "one.txt", "-output", folder / "data", *options)
    assert ended.status == 0, ended.err
    found = {name: (folder / "data" / "texts" / f"{name}.txt").read_bytes() for name in SPLITS}
    return {name: lines.splitlines() for name, lines in found.items()}, ended.out


def test_a_single_text_is_split_by_lines(tmp_path: Path) -> None:
    lines = [f"line {number}".encode() for number in range(200)]
    text = b"\xef\xbb\xbf" + b"\n".join(lines)  # a byte order mark, and no line feed at the end
    parts, printed = split_lines(tmp_path, text)
    assert "split 200 lines at random with seed 1: 180 to train, 10 to valid, 10 to test" in printed
    assert "train: 540 tokens" in printed and "valid: 30 tokens" in printed
    assert load_corpus(tmp_path / "data").description["name"] == "one"
    assert {name: len(part) for name, part in parts.items()} == {"train": 180, "valid": 10, "test": 10}
    assert sorted(sum(parts.values(), [])) == sorted(lines)
    places = {name: [lines.index(line) for line in part] for name, part in parts.items()}
    assert all(place == sorted(place) for place in places.values())
    # At random: held-out lines are from the whole text.
    assert min(places["valid"]) < 100 < max(places["valid"])

    assert split_lines(tmp_path, text)[0] == parts
    asked = ["-train", tmp_path / "one.txt", "-output", tmp_path / "data", "-seed", 2]
    existing = f"{tmp_path}/data/texts/train.txt exists with other lines; use -force"
    ended = command("lm_prepare", *asked)
    assert ended.status == 2 and existing in ended.err
    assert split_lines(tmp_path, text)[0] == parts
    assert split_lines(tmp_path, text, "-seed", 2, "-force")[0] != parts
    halves, _ = split_lines(tmp_path, text, "-split", "0.5,.25,0.25", "-force")
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
