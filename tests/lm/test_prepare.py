"""The command lm_prepare, as its user meets it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lm import cli
from lm.corpus import SPLITS, Published, load_corpus
from lm.datasets import SOURCES


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


def test_corpus_is_made_and_described(
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


def test_mistakes_give_one_line_and_status_2(
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cases = {
        "-valid not given": [item for item in arguments if "valid" not in item],
        "-min_frequency is 0": [*arguments, "-min_frequency", "0"],
        "-max_size is 2": [*arguments, "-max_size", "2"],
        "invalid int value": [*arguments, "-max_size", "many"],
        "unrecognized arguments: -foo": [*arguments, "-foo"],
        "No such file": [*arguments, "-test", "absent.txt"],
        "required: -output": arguments[2:],
        "-train and -valid and -test given beside -dataset": [*arguments, "-dataset", "ptb"],
        "-downloads given without -dataset": [*arguments, "-downloads", "here"],
        "-train and -valid and -test not given": arguments[:2],
        "invalid choice: 'wikitext'": [*arguments, "-dataset", "wikitext"],
        "0 tokens; the train text needs": [*arguments, "-train", "/dev/null"],
        "is a file, but it must be a folder": [*arguments, "-output", arguments[3]],
    }
    for said, line in cases.items():
        assert run(line, monkeypatch) == 2, said
        error = capsys.readouterr().err
        assert said in error and error.startswith("lm_prepare: ") and error.count("\n") == 1


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
    assert "the train text has 3 tokens, the published one 2,088,628" in capsys.readouterr().err
    small = Published(dict.fromkeys(SPLITS, 3), 4)
    monkeypatch.setitem(SOURCES, "wikitext2", SOURCES["wikitext2"]._replace(published=small))
    assert run(arguments, monkeypatch) == 0
    assert load_corpus(tmp_path / "data").description["name"] == "wikitext2"
