"""Word similarity and correlation maps of language models, through the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared_embeddings.cli.main import main
from tests.lm.command_line import write_corpus, write_model

pytestmark = pytest.mark.usefixtures("installed_host")


def test_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus"), "awd_lstm"))
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("a\tb\t1\na\tc\t2\nb\tc\t3\na\tunheard\t4\n")
    capsys.readouterr()
    assert main(["similarity", "--model", model, "--pairs", str(pairs), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["tables"].values()
    assert found["dimensions"] == 8 and found["sets"][0]["known"] == 3
    output = tmp_path / "maps"
    assert main(["correlation", "--model", model, "--output", str(output)]) == 0
    record = json.loads((output / "correlation.json").read_text())
    assert [layer["layer"] for layer in record["layers"]] == ["output"]
    assert (output / record["layers"][0]["picture"]).read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main(["correlation", "--model", model, "--output", str(pairs)]) == 2
    assert main(["correlation", "--model", str(pairs), "--output", str(output)]) == 2
    assert main(["similarity", "--model", model, "--pairs", str(pairs), "--limit", "3"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 3
