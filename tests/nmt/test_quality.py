"""The BLEU that compression reports is that of ``onmt_translate`` and sacreBLEU, before and after."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sacrebleu

from nmt.translate.evaluation import joined
from shared_embeddings.cli.main import main
from tests.nmt.test_compression import STANDARD, Trained, compress

pytestmark = pytest.mark.usefixtures("installed_host")


def test_joined() -> None:
    assert joined("An@@ trie@@ b und Str@@", "bpe") == "Antrieb und Str"
    assert joined("▁An trieb ▁und ▁S tr", "sentencepiece") == "Antrieb und Str"
    assert joined("An@@ trieb ▁und", "none") == "An@@ trieb ▁und"


@pytest.mark.slow_except("none-none")
@pytest.mark.parametrize(("subwords", "tokenize"), [("none", "none"), ("bpe", "13a")])
def test_bleu_is_that_of_the_commands(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], subwords: str, tokenize: str
) -> None:
    host, model = trained(embedding=STANDARD, train_steps=60, save_checkpoint_steps=60)
    # With an empty line, which is not shown to the model.
    source = host.write("some.src", [*host.folder.joinpath("valid.src").read_text().splitlines(), ""])
    usual = ["-beam_size", "5", "-max_length", "250", "-max_length_ratio", "1.25"]
    lines = [f"{line} v1 v2." for line in host.translate(model, *usual, source="some.src")]
    target, small, report = host.write("some.tgt", lines), tmp_path / "small.pt", tmp_path / "report.json"
    sides = ["--validation-source", source, "--validation-target", target, "--validation-subwords", subwords]
    asked = ["--rank", 14, "--store", "int8", "--report", report]
    compress(model, "projective", small, *asked, *sides)
    found = json.loads(report.read_text())["quality"]
    wanted = []
    for path in (model, small):
        translations = host.translate(path, *usual, source="some.src")
        wanted.append(sacrebleu.corpus_bleu(translations, [lines], tokenize=tokenize, force=True).score)
    assert (found["before"], found["after"]) == pytest.approx(wanted)
    assert wanted[0] > 0 and wanted[0] != wanted[1]
    assert found["measure"] == "BLEU" and f"tok:{tokenize}" in found["how"] and "beam 5" in found["how"]
    shown = capsys.readouterr().out
    assert ["BLEU", *(f"{value:.2f}" for value in wanted)] in [line.split() for line in shown.splitlines()]


def test_mistakes_are_one_line_before_the_fit(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, model = trained(embedding=STANDARD)
    output = tmp_path / "small.pt"
    source, target, empty = host.folder / "valid.src", host.folder / "valid.tgt", tmp_path / "empty"
    empty.write_text("")
    pieces = tmp_path / "pieces"
    pieces.write_text("v1 v@@ 2\n" * 10)

    def fit(*arguments: object, **options: object) -> None:
        raise AssertionError("a fit began")

    monkeypatch.setattr("shared_embeddings.checkpoints.compress.fit", fit)
    asked = ["--model", model, "--method", "projective", "--rank", 4, "--output", output]
    given, wanted = "--validation-source", "--validation-target"
    for arguments, message in [
        ([given, tmp_path / "none", wanted, target], "no such file"),
        ([given, source, wanted, empty], "empty: is empty"),
        ([given, source, wanted, host.folder / "test.tgt"], "has 10 lines"),
        ([wanted, target], "without --validation-source"),
        ([given, source], "without --validation-target"),
        (["--validation", source], "is a translation model"),
        ([given, source, wanted, pieces, "--validation-subwords", "bpe"], "line 1 has subwords"),
    ]:
        capsys.readouterr()
        assert main(["compress", *map(str, [*asked, *arguments])]) == 2
        # Where translations were made before in this process, OpenNMT's log goes to stderr, too.
        (line,) = (text for text in capsys.readouterr().err.splitlines() if "Loading checkpoint" not in text)
        assert message in line
    assert not output.exists()
