"""Compressing a model of Hugging Face without naming a method: a folder is written."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from shared_embeddings import hf  # noqa: E402
from shared_embeddings.cli.main import main  # noqa: E402
from tests.shared_embeddings.hf.models import write  # noqa: E402


@pytest.mark.slow_except("llama")
@pytest.mark.parametrize("kind", ["llama", "t5_untied"])
def test_the_best_candidate_is_a_folder_that_loads(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(kind, tmp_path / "model")
    small = tmp_path / "small"
    arguments = ["compress", "--model", str(tmp_path / "model"), "--bits", "8", "--output", str(small)]
    assert main(arguments) == 0
    assert "kept" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "text.txt") == ["model", "small"]
    assert hf.load(str(small)) is not None
    assert main(arguments) == 2  # it is there already
    assert "--force" in capsys.readouterr().err
    assert main([*arguments, "--force"]) == 0
