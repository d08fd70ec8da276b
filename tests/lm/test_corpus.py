"""Corpora: their tokens, when they are rebuilt, detected damage, and the command lm_prepare."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm.data import corpus
from lm.data import corpus as reading
from lm.data.corpus import SPLITS, Limits, Published, load_corpus, prepare
from lm.data.datasets import SOURCES
from lm.data.prepare import share_lines
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import sha256, write_text
from tests.helpers import content
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
    corpus = load_corpus(tmp_path / "data")
    words = corpus.vocabulary.words
    assert words == ["<eos>", "the", "cat", "mat", "on", "sat", "<unk>"]
    assert corpus.vocabulary.counts == [3, 2, 1, 1, 1, 1, 0]
    assert decoded(corpus.train, words) == "the cat sat <eos> <eos> on the mat <eos>"
    assert decoded(corpus.valid, words) == "the <unk> sat <eos>"
    assert decoded(corpus.test, words) == "<unk> cat <eos>"
    assert isinstance(corpus.train, np.memmap) and corpus.train.dtype == np.int32
    assert not corpus.train.flags.writeable
    description = corpus.description
    assert description["tokens"] == {"train": 9, "valid": 4, "test": 3}
    assert description["unknown"] == {"train": 0, "valid": 1, "test": 1}
    assert (description["name"], description["types"]) == ("cats", 7)
    assert description["files"]["test.npy"] == sha256(tmp_path / "data" / "test.npy")


def test_several_texts_are_concatenated(texts: dict[str, list[Path]], tmp_path: Path) -> None:
    prepare({**texts, "train": texts["train"] + texts["valid"]}, tmp_path / "data")
    corpus = load_corpus(tmp_path / "data")
    expected = "the cat sat <eos> <eos> on the mat <eos> the dog sat <eos>"
    assert decoded(corpus.train, corpus.vocabulary.words) == expected


def test_limits_and_lower_case_are_applied(texts: dict[str, list[Path]], tmp_path: Path) -> None:
    write_text(texts["train"][0], "The cat\nthe CAT\n")
    description = prepare(texts, tmp_path / "data", limits=Limits(max_size=3), lower=True)
    assert load_corpus(tmp_path / "data").vocabulary.words == ["<eos>", "<unk>", "cat"]
    assert description["unknown"]["train"] == 2


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The texts that are read."""
    paths: list[Path] = []
    read = corpus.word_blocks

    def noted(path: Path, *arguments: Any) -> Any:
        paths.append(path)
        return read(path, *arguments)

    monkeypatch.setattr(corpus, "word_blocks", noted)
    return paths


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
        with pytest.raises(UserError, match="has another corpus; use -force"):
            prepare(texts, folder, **settings)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before and not passes
        settings["force"] = True
    description = prepare(texts, folder, **settings)
    assert len(passes) == 6
    assert load_corpus(folder).description == description


def test_an_interrupted_run_keeps_the_old_corpus(
    texts: dict[str, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    before = prepare(texts, folder)
    write_text(texts["train"][0], "other words\n")

    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(corpus.Vocabulary, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(texts, folder, force=True)
    assert load_corpus(folder).description == before
    prepare(texts, folder, force=True)
    names = ["data.json", "vocabulary.tsv", *(f"{split}.npy" for split in SPLITS)]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


@pytest.mark.parametrize(
    ("split", "content", "printed"),
    [
        ("train", b"", "train.txt: 0 tokens; the train text needs at least 2"),
        ("valid", b"\n", "valid.txt: 1 tokens; the valid text needs at least 2"),
        ("test", b"caf\xe9 au lait\n", "test.txt: not UTF-8 at byte 3"),
    ],
)
def test_unusable_texts_fail(
    texts: dict[str, list[Path]], tmp_path: Path, split: str, content: bytes, printed: str
) -> None:
    texts[split][0].write_bytes(content)
    with pytest.raises(UserError, match=printed):
        prepare(texts, tmp_path / "data")
    assert not (tmp_path / "data" / "data.json").exists()


def test_published_sizes_are_checked(texts: dict[str, list[Path]], tmp_path: Path) -> None:
    tokens = {"train": 9, "valid": 4, "test": 3}
    with pytest.raises(UserError, match="^cats has 3 tokens in the test text, the published text 30"):
        prepare(texts, tmp_path / "data", "cats", published=Published({**tokens, "test": 30}, 7))
    with pytest.raises(UserError, match="7 words with <unk> and <eos>, the published text 8; replace"):
        prepare(texts, tmp_path / "data", published=Published(tokens, 8))
    prepare(texts, tmp_path / "data", published=Published(tokens, 8), limits=Limits(min_frequency=2))
    prepare(texts, tmp_path / "data", published=Published(tokens, 7), force=True)


@pytest.mark.parametrize(
    ("write", "printed"),
    [
        (Path.unlink, "no token file"),
        (lambda path: np.save(path, np.array([{}] * 9, dtype=object)), "no token file"),
        (lambda path: np.save(path, np.zeros(3, np.int32)), "is not of this corpus"),
        (lambda path: np.save(path, np.full(9, 7, np.int32)), "of 7 words"),
    ],
)
def test_damaged_token_files_fail_in_one_line(
    texts: dict[str, list[Path]], tmp_path: Path, write: Callable[[Path], object], printed: str
) -> None:
    """Training would fail after hours."""
    prepare(texts, tmp_path / "data")
    write(tmp_path / "data" / "train.npy")
    with pytest.raises(UserError, match=rf"train.npy: .*{printed}.*; run lm_prepare again"):
        load_corpus(tmp_path / "data")


@pytest.mark.parametrize("content", [None, "", "[]", '{"format": "other"}'])
def test_folder_without_a_corpus_fails(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    if content is not None:
        write_text(folder / "data.json", content)
    with pytest.raises(UserError, match="has no data.json of this version"):
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
        ("-output data -train train.txt -test test.txt", "-valid is missing"),
        (f"{ALL} -split 0.8,0.1,0.1", "-split needs -train without other texts"),
        (f"{ALL} -min_frequency 0", "-min_frequency is 0"),
        (f"{ALL} -max_size 2", "-max_size is 2"),
        (ALL.replace("test.txt", "absent.txt"), "-test: no such file: absent.txt"),
        (f"{ALL} -dataset ptb", "-train cannot be combined with -dataset"),
        ("-output data -train train.txt -split 0.9,0.1", "three fractions"),
        ("-output data -train train.txt", "1 lines cannot be split into 3"),
        ("-output own -train own/texts/train.txt", "is where the split texts are written"),
    ],
)
def test_user_errors_are_one_line(arguments: str, message: str) -> None:
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
    texts = {name: (folder / "data" / "texts" / f"{name}.txt").read_bytes() for name in SPLITS}
    return {name: lines.splitlines() for name, lines in texts.items()}, ended.out


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
    counts = share_lines(fractions, lines)
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
    assert ended.says("wikitext2 has 3 tokens in the train text, the published text 2,088,628")
    small = Published(dict.fromkeys(SPLITS, 3), 4)
    monkeypatch.setitem(SOURCES, "wikitext2", SOURCES["wikitext2"]._replace(published=small))
    assert command("lm_prepare", *arguments).status == 0
    assert load_corpus(tmp_path / "data").description["name"] == "wikitext2"
