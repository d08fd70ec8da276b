"""The headline recipes on generated texts: cleaning, splits, licensed files, scores, training, the table."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
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
from recipes.headlines import News, clean_news, clean_text
from recipes.translation.subwords import join_bpe
from shared_embeddings.utils.files import sha256

AGNEWS, GIGAWORD = find_recipe("agnews_headline"), find_recipe("gigaword_headline")
SUBJECTS = ["oil prices", "the president", "microsoft", "an asteroid", "chelsea", "the court", "iraq", "nasa"]
VERBS = ["rises", "resigns", "falls", "wins again", "loses", "is delayed", "returns", "agrees"]
PLACES = ["in london", "in baghdad", "on friday", "after talks", "for the third time", "in new york"]


def headline(number: int) -> tuple[str, str]:
    """A text and its title, different for each number below 384."""
    parts = SUBJECTS[number % 8], VERBS[number // 8 % 8], PLACES[number // 64 % 6]
    return f"{' '.join(parts)} , officials printed in report {number} .", " ".join(parts)


# Cleaning


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("United #39;s airport", "United's airport"),
        ("Hassan:  #39;Abhorrent act #39; says Blair", "Hassan: 'Abhorrent act' says Blair"),
        (" quot;Yes, quot; he printed", '"Yes," he printed'),
        ("#36;10 million  amp; more", "$10 million & more"),
        ("WMC  #151; hostile", "WMC — hostile"),
        ("a second\\team, over \\$54 a barrel", "a second team, over $54 a barrel"),
        ('&lt;A HREF="http://x.y?z=1"&gt;HIG.N&lt;/A&gt; on Tuesday', "HIG.N on Tuesday"),
        ("Campbell Soup Co. (CPB.N: Quote, Profile, Research) on Monday", "Campbell Soup Co. on Monday"),
        ("see http://example.org/a?b for more", "see for more"),
        ("Profits Rise; Shares Fall", "Profits Rise; Shares Fall"),
        ("a race; b", "a race; b"),
    ],
)
def test_markup_is_removed(raw: str, clean: str) -> None:
    assert clean_text(raw) == clean


@pytest.mark.parametrize(
    ("description", "title", "expected"),
    [
        ("AP - The Pacers", "Pacers Activate (AP)", ("the pacers", "pacers activate")),
        ("SPACE.com - TORONTO, Canada -- A team", "The Race (SPACE.com)", ("a team", "the race")),
        (" NEW YORK (Reuters) - Stocks fell", "Stocks (Update3)", ("stocks fell", "stocks")),
        ("WASHINGTON - With no fanfare", "Bush signs", ("with no fanfare", "bush signs")),
        ("The well-known court - sources say", "He (and she)", ("the well-known court - sources say",
                                                               "he (and she)")),
        ("Reuters agreed", "Plan (Reuters)", ("reuters agreed", "plan (reuters)")),
    ],
)  # fmt: skip
def test_agencies_and_datelines_are_removed(description: str, title: str, expected: tuple[str, str]) -> None:
    assert clean_news(News(description, title)) == expected


# Splits


def news(count: int) -> list[News]:
    return [News(*headline(number)) for number in range(count)]


def test_split_does_not_depend_on_the_order() -> None:
    pairs = news(60)
    first = headlines.split_news(pairs, 5, 10)
    assert {split: len(part) for split, part in first.items()} == {"test": 10, "valid": 5, "train": 45}
    random.Random(1).shuffle(pairs)
    assert headlines.split_news(pairs, 5, 10) == first
    hashed = {hashlib.sha256("\t".join(pair).encode()).hexdigest(): pair for pair in pairs}
    assert first["test"] == [hashed[key] for key in sorted(hashed)[:10]]
    # No text is in two splits, and none is empty.
    pairs = pairs[:40]
    twins = [News(pair.description.upper(), "another title") for pair in pairs]
    parts = headlines.split_news([*pairs, *twins, News("", "t"), News("AP - ", "t (AP)")], 10, 10)
    texts = [pair.description for part in parts.values() for pair in part]
    assert len(texts) == len(set(texts)) == 40


# AG News


class Prepared:
    """AG News with generated texts and its own settings."""

    def __init__(self, folder: Path) -> None:
        self.table, self.settings = folder / "ag_news" / "test.csv", folder / "data.yaml"
        self.table.parent.mkdir()
        self.home = folder / "runs" / "agnews_headline"
        with self.table.open("w", newline="") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL)
            writer.writerows(["1", title, description] for description, title in news(60))
        self.configure()

    def configure(self, **changes: Any) -> None:
        _, settings = AGNEWS.data_settings()
        settings.update(valid=5, test=10, bpe_operations=30, sha256=sha256(self.table), lengths=[10, 20])
        self.settings.write_text(yaml.safe_dump({**settings, **changes}))

    def prepare(self) -> int:
        return run_main(
            "preprocess", partial(headlines.prepare_news, AGNEWS), ["--settings", str(self.settings)]
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
    titles = {pair.description: pair.title for pair in news(60)}
    assert lines(data / "text" / "test.target") == [
        titles[text] for text in lines(data / "text" / "test.source")
    ]
    capsys.readouterr()
    assert small.prepare() == 0
    assert "running" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "0" * 64}, "SHA-256"),
        ({"lengths": ["x"]}, "'lengths' is ['x']"),
        ({"test": 58}, "60 pairs are too few"),
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


@pytest.mark.parametrize("name", ["agnews_headline", "gigaword_headline"])
def test_every_row_can_be_read_and_built(name: str) -> None:
    for row_name, row in find_recipe(name).rows.items():
        options = {key: value for key, value in row.embedding.items() if key != "method"}
        size = row.train["hidden_size"]
        count = se.num_parameters(
            row.embedding["method"], num_embeddings=16_008, embedding_dim=size, **options
        )
        if row.paper:
            assert count / 1e6 == pytest.approx(row.paper["embedding"], rel=0.06)
        assert controls_length(row) == (row_name != "standard")


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
