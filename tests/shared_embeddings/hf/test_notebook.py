"""The notebook about a Hugging Face model, with a tiny one instead of the model that it downloads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.shared_embeddings.hf.models import write

NOTEBOOK = Path(__file__).parents[3] / "docs" / "notebooks" / "shrink_a_model.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_with_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write("bert", tmp_path / "model")
    monkeypatch.setenv("MODEL", str(tmp_path / "model"))
    monkeypatch.chdir(NOTEBOOK.parent)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    exec(compile(code, str(NOTEBOOK), "exec"), {})
    assert "of the paragraphs keep their nearest one" in capsys.readouterr().out
