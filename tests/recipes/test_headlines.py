"""The headline recipes on generated texts: cleaning, splits, licensed files, scores, training, the table."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import shared_embeddings as se
from nmt.headlines import join_characters
from recipes import headlines
from recipes.common.recipe import find_recipe
from recipes.common.table import controls_length
from recipes.common.tools import run_main
from recipes.headlines import Description, read_index, read_sources, split_descriptions
from recipes.translation.subwords import join_bpe

DEBIAN, GIGAWORD = find_recipe("debian_headline"), find_recipe("gigaword_headline")
SUBJECTS = ["oil prices", "the president", "microsoft", "an asteroid", "chelsea", "the court", "iraq", "nasa"]
VERBS = ["rises", "resigns", "falls", "wins again", "loses", "is delayed", "returns", "agrees"]
PLACES = ["in london", "in baghdad", "on friday", "after talks", "for the third time", "in new york"]


def headline(number: int) -> tuple[str, str]:
    """A text and its title, different for each number below 384."""
    parts = SUBJECTS[number % 8], VERBS[number // 8 % 8], PLACES[number // 64 % 6]
    return f"{' '.join(parts)} , officials printed in report {number} .", " ".join(parts)


# Debian's archive

TRANSLATION = """\
Package: 2048
Description-md5: 0f25c2ca95ceff4500fde9f651d74f2e
Description-en: Slide and add puzzle game
 2048 slides tiles:
 .
  * The goal is 2048:  the end.

Package: bare
Description-md5: 12
Description-en: a package without a text

"""
INDEX = """\
Package: 2048
Source: games2048.1 (1.2-3)
Depends: libc6,
 zlib1g
Section: games

Package: bare
Version: 1
"""


def test_indexes_of_the_archive_are_read(tmp_path: Path) -> None:
    translation, packages = tmp_path / "Translation-en.xz", tmp_path / "Packages"
    translation.write_bytes(lzma.compress(TRANSLATION.encode()))
    packages.write_text(INDEX)
    game = Description("2048", "Slide and add puzzle game", "2048 slides tiles: * The goal is 2048: the end.")
    assert read_index(translation) == [game, Description("bare", "a package without a text", "")]
    assert read_sources(packages) == {"2048": "games", "bare": "bare"}


def packages(count: int) -> list[Description]:
    return [Description(f"p{number}", headline(number)[1], headline(number)[0]) for number in range(count)]


def test_splits_share_no_source_and_no_text() -> None:
    """30 sources with two packages each."""
    descriptions = packages(60)
    sources = {item.package: f"source{chr(97 + int(item.package[1:]) // 2)}" for item in descriptions}
    splits = split_descriptions(descriptions, sources, 5, 10)
    assert {split: len(part) for split, part in splits.items()} == {"test": 10, "valid": 5, "train": 30}
    used = [{sources[item.package] for item in part} for part in splits.values()]
    assert [len(part) for part in used] == [10, 5, 15] and len(set.union(*used)) == 30
    hashed = sorted({*sources.values()}, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    assert [sources[item.package] for item in splits["test"]] == hashed[:10]
    # The order of the index does not matter; unusable packages and repeated texts are left out.
    twins = [Description(f"twin-{item.package}", "again", item.text.upper()) for item in splits["train"]]
    extra = [
        Description("empty", "", "text"),
        Description("bare", "synopsis", ""),
        Description("lost", "s", "t"),
    ]
    mixed = [*descriptions, *twins, *extra]
    random.Random(1).shuffle(mixed)
    of_twins = {item.package: "z" * 9 for item in twins} | {"empty": "a", "bare": "b"}
    texts = [
        item.text.lower()
        for part in split_descriptions(mixed, sources | of_twins, 5, 10).values()
        for item in part
    ]
    assert len(texts) == len(set(texts)) <= 60 and "t" not in texts


class Prepared:
    """Generated packages, as apt has them, with their own settings."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.settings = folder / "debian", folder / "data.yaml"
        self.folder.mkdir()
        self.home = folder / "runs" / "debian_headline"
        items = packages(60)
        texts = [
            f"Package: {item.package}\nDescription-en: {item.synopsis}\n {item.text}\n" for item in items
        ]
        (self.folder / "Translation-en").write_text("\n".join(texts))
        sources = [
            f"Package: {item.package}\nSource: {chr(97 + number % 26) * (1 + number // 26)}\n"
            for number, item in enumerate(items)
        ]
        (self.folder / "Packages").write_text("\n".join(sources))
        self.configure()

    def configure(self, **changes: Any) -> None:
        _, settings = DEBIAN.data_settings()
        settings.update(valid=5, test=10, bpe_operations=30, lengths=[10, 20], num_classes=8)
        self.settings.write_text(yaml.safe_dump({**settings, **changes}))

    def prepare(self) -> int:
        return run_main(
            "preprocess", partial(headlines.prepare_debian, DEBIAN), ["--settings", str(self.settings)]
        )


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    return Prepared(tmp_path)


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_preparation_from_end_to_end(small: Prepared, capsys: pytest.CaptureFixture[str]) -> None:
    assert small.prepare() == 0
    data = small.home / "data"
    description = json.loads((data / "data.json").read_text())
    assert description["pairs"] == {"train": 45, "valid": 5, "test": 10}
    assert description["references"] == ["text/test.target"]
    for split in ("train", "valid"):
        assert [join_characters(line) for line in lines(data / f"{split}.target")] == lines(
            data / "text" / f"{split}.target"
        )
    assert [join_bpe(line) for line in lines(data / "test.source")] == lines(data / "text" / "test.source")
    tokens = {line.split("\t")[0] for line in lines(data / "vocabulary")}
    for side in ("source", "target"):
        assert {token for line in lines(data / f"train.{side}") for token in line.split()} <= tokens
    titles = dict(map(headline, range(60)))
    assert lines(data / "text" / "test.target") == [
        titles[text] for text in lines(data / "text" / "test.source")
    ]
    capsys.readouterr()
    assert small.prepare() == 0
    assert "running" not in capsys.readouterr().out


def test_own_split_is_used_as_it_is(small: Prepared) -> None:
    (small.folder / "Packages").unlink()
    for split, count in (("train", 20), ("valid", 4), ("test", 3)):
        table = "".join("\t".join(item) + "\n" for item in packages(count))
        (small.folder / f"descriptions.{split}.tsv.gz").write_bytes(gzip.compress(table.encode()))
    assert small.prepare() == 0
    description = json.loads((small.home / "data" / "data.json").read_text())
    assert description["pairs"] == {"train": 20, "valid": 4, "test": 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": ["x"]}, "'lengths' is ['x']"),
        ({"test": 58}, "60 sources are too few"),
    ],
)
def test_user_errors_are_reported_in_one_line(
    changes: dict[str, Any], message: str, small: Prepared, capsys: pytest.CaptureFixture[str]
) -> None:
    small.configure(**changes)
    assert small.prepare() == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert message in err[-1] and err[-1].startswith("preprocess: ")


# Scores and the table


def test_scores_compare_lengths_and_cut_to_the_requested_bytes() -> None:
    scores = headlines.score_headlines(["a" * 27, "b" * 33, "c" * 40], [["a", "b", "c"]], 30)
    assert scores["within"] == pytest.approx(100 * 2 / 3)
    assert scores["difference"] == pytest.approx(16 / 3)
    scores = headlines.score_headlines(["oil prices rise"], [["oil prices rise"]], 10)
    assert scores["recall"]["rouge1"]["mean"] == pytest.approx(100 * 2 / 3)
    assert scores["f1"]["rouge1"]["mean"] == 100
    assert "bytes:10|" in scores["recall"]["signature"] and "bytes:all|" in scores["f1"]["signature"]


@pytest.mark.parametrize("name", ["debian_headline", "gigaword_headline"])
def test_every_row_can_be_read_and_built(name: str) -> None:
    for row_name, row in find_recipe(name).rows.items():
        options = {key: value for key, value in row.embedding.items() if key not in ("method", "classes")}
        if "classes" in row.embedding:  # a file of preprocess.sh
            options["random_classes"] = True
        size = row.train["hidden_size"]
        count = se.num_parameters(
            row.embedding["method"], num_embeddings=16_008, embedding_dim=size, **options
        )
        if row.paper:
            assert count / 1e6 == pytest.approx(row.paper["embedding"], rel=0.06)
        assert controls_length(row) == (row_name != "no_length_control")


def test_rows_of_alone_train_as_in_the_readme_of_its_authors() -> None:
    """3,584 tokens, 16 batches on each of 4 GPUs, at most 1e-3, dropout 0.3; ReLU dropout until 300."""
    for row in GIGAWORD.rows.values():
        assert row.train["batch_size"] == 3584 and row.train["accum_count"] == [16 * 4]
        assert row.train["learning_rate"] * (512 * 4000) ** -0.5 == pytest.approx(1e-3, rel=1e-4)
        assert row.train["dropout"] == [0.3] and row.train["max_grad_norm"] == 1.0
        assert row.average == 10 and row.train["train_steps"] == 100 * row.train["save_checkpoint_steps"]
        if row.embedding["method"] == "alone":
            assert row.embedding["relu_dropout"] == 0.1 and row.embedding["relu_dropout_steps"] == 300


# Gigaword


class Licensed:
    """Generated texts in the layout of the licensed files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.settings = folder / "gigaword", folder / "data.yaml"
        self.home = folder / "runs" / "gigaword_headline"
        self.write("train/train.article.txt.gz", [headline(number)[0] for number in range(40)])
        self.write("train/train.title.txt.gz", [headline(number)[1] for number in range(40)])
        self.write("train/valid.article.filter.txt", [headline(number)[0] for number in range(40, 50)])
        self.write("train/valid.title.filter.txt", ["", *(headline(number)[1] for number in range(41, 50))])
        self.write("DUC2004/input.txt", [headline(number)[0] for number in range(50, 54)])
        for reference in range(4):
            titles = [f"{headline(number)[1]} {reference}" for number in range(50, 54)]
            self.write(f"DUC2004/task1_ref{reference}.txt", titles)
        _, settings = GIGAWORD.data_settings()
        settings.update(bpe_operations=30, valid=5, test=4, lengths=[12])
        self.settings.write_text(yaml.safe_dump(settings))

    def write(self, name: str, texts: list[str]) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = "".join(f"{text}\n" for text in texts).encode()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)

    def prepare(self) -> int:
        return run_main(
            "preprocess", partial(headlines.prepare_gigaword, GIGAWORD), ["--settings", str(self.settings)]
        )


@pytest.fixture
def licensed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Licensed:
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    return Licensed(tmp_path)


@pytest.mark.parametrize("other_layout", [False, True])
def test_licensed_files_are_prepared(licensed: Licensed, other_layout: bool) -> None:
    if other_layout:
        for path in list((licensed.folder / "train").iterdir()):
            path.rename(licensed.folder / path.name)
        (licensed.folder / "DUC2004").rename(licensed.folder / "duc2004")
    assert licensed.prepare() == 0
    data = licensed.home / "data"
    description = json.loads((data / "data.json").read_text())
    assert description["pairs"] == {"train": 40, "valid": 5, "test": 4}
    # the pair without a headline is left out
    assert lines(data / "text" / "valid.target")[0] == headline(41)[1]
    assert [lines(data / name)[3] for name in description["references"]] == [
        f"{headline(53)[1]} {reference}" for reference in range(4)
    ]


def test_unusable_licensed_files_are_named(
    licensed: Licensed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def error_line() -> str:
        assert licensed.prepare() == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    licensed.write("DUC2004/task1_ref3.txt", ["a"] * 3)
    assert "task1_ref3.txt has 3 lines; expected 4 in each" in error_line()
    licensed.write("DUC2004/task1_ref3.txt", ["a"] * 4)
    licensed.write("train/train.title.txt.gz", ["a", "b"])
    message = error_line()
    assert "train.article.txt.gz has 40" in message and "train.title.txt.gz has 2 lines" in message
    (licensed.folder / "train" / "train.title.txt.gz").unlink()
    (licensed.folder / "DUC2004" / "task1_ref2.txt").unlink()
    message = error_line()
    assert "2 of 9 files are missing" in message
    assert "train.target: train/train.title.txt or train.title.txt" in message
    assert "task1_ref2.txt: DUC2004/task1_ref2.txt or" in message and "task1_ref1" not in message
    monkeypatch.delenv("DATA_DIR")
    assert "DATA_DIR is not set" in error_line()
