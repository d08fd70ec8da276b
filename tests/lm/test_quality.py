"""The perplexity that compression reports is that of ``lm_eval``, before and after."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lm.command_line import run, write_corpus, write_model
from tests.lm.test_compression import compress

pytestmark = pytest.mark.usefixtures("installed_host")


def evaluated(model: Path, data: Path, record: Path, *arguments: object) -> float:
    """What ``lm_eval`` says."""
    record.unlink(missing_ok=True)
    assert run("lm_eval", "-model", model, "-data", data, "-output", record, *arguments) == 0
    return float(json.loads(record.read_text())["metrics"]["perplexity"])


@pytest.mark.slow_except("fp32-awd_lstm")
@pytest.mark.parametrize("kind", ["awd_lstm", "transformer_xl"])
@pytest.mark.parametrize("store", ["fp32", "int8", "int4"])
def test_perplexity_is_that_of_lm_eval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, store: str
) -> None:
    words = " ".join(f"w{number}" for number in range(60))
    data = write_corpus(tmp_path / "corpus", words)
    model, small, report = (
        write_model(tmp_path / "model.pt", data, kind),
        tmp_path / "small.pt",
        tmp_path / "r",
    )
    text = tmp_path / "corpus" / "test.txt"
    asked = ["--rank", 5, "--store", store, "--validation", text, "--report", report]
    assert compress(model, "projective", small, *asked) == 0
    shown = capsys.readouterr().out
    found = json.loads(report.read_text())["quality"]
    before, after = (evaluated(path, text, tmp_path / "record") for path in (model, small))
    assert found["measure"] == "perplexity" and str(text) in found["how"]
    assert found["before"] == pytest.approx(before, rel=1e-6)
    assert found["after"] == pytest.approx(after, rel=1e-6)
    assert abs(before - after) > 0.001 * before
    (line,) = (line for line in shown.splitlines() if line.startswith("perplexity"))
    assert line.split() == ["perplexity", f"{before:.2f}", f"{after:.2f}"]
    # Of a prepared corpus, the validation text.
    assert compress(model, "standard", small, "--validation", data, "--report", report, "--force") == 0
    found = json.loads(report.read_text())["quality"]
    wanted = evaluated(model, data, tmp_path / "record", "-split", "valid")
    assert found["before"] == found["after"] == pytest.approx(wanted, rel=1e-6)


def test_mistakes_are_one_line_before_the_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_corpus(tmp_path / "corpus")
    model, text, empty = write_model(tmp_path / "model.pt", data), tmp_path / "text", tmp_path / "empty"
    text.write_text("a b c\n")
    empty.write_text("")
    short, latin = tmp_path / "short", tmp_path / "latin"
    short.write_text("\n")
    latin.write_bytes(b"a b\n\xff c\n")

    def fit(*arguments: object, **options: object) -> None:
        raise AssertionError("a fit began")

    monkeypatch.setattr("shared_embeddings.checkpoints.compress.fit", fit)
    sides = ["--validation-source", text, "--validation-target", text]
    for arguments, message in [
        (["--validation", tmp_path / "none"], "--validation: no such file"),
        (["--validation", empty], "empty: is empty"),
        (["--validation", short], "at least 2 are needed"),
        (["--validation", latin], "not UTF-8 at byte 4"),
        (sides, "this is a language model; give --validation"),
        (["--validation-target", text], "without --validation-source"),
        ([*sides, "--validation", text], "give those that fit the model"),
        (["--validation", text, "--validation-subwords", "bpe"], "translations only"),
        (["--validation-subwords", "bpe"], "give those that fit the model"),
    ]:
        capsys.readouterr()
        assert compress(model, "projective", tmp_path / "small.pt", "--rank", 2, *arguments) == 2
        line = capsys.readouterr().err
        assert message in line and line.count("\n") == 1, line
    assert not (tmp_path / "small.pt").exists()
