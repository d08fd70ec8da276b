"""Word similarity and correlation maps of translation models, with plain and with shared embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared_embeddings.cli.main import main
from tests.nmt.conftest import Trained
from tests.nmt.test_training import DEFINE_MAP

pytestmark = pytest.mark.usefixtures("installed_host")


def correlations(model: Path, output: Path) -> dict[str, dict[str, Any]]:
    """What the command writes about each layer, by its name."""
    assert main(["correlation", "--model", str(model), "--output", str(output)]) == 0
    layers = json.loads((output / "correlation.json").read_text())["layers"]
    assert all((output / layer["picture"]).exists() for layer in layers)
    return {f"{layer['embedding']}: {layer['layer']}": layer for layer in layers}


@pytest.mark.slow
def test_define_layer_by_layer(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, model = trained(embedding={**DEFINE_MAP, "output": "table", "output_projection": False})
    found = correlations(model, tmp_path)
    assert list(found) == [
        "target: map",
        "target: entry",
        "target: layer 1",
        "target: layer 1, group 1",
        "target: layer 1, group 2",
        "target: layer 2",
        "target: output",
    ]
    first, group = found["target: layer 1"], found["target: layer 1, group 2"]
    assert first["groups"] == 2 and first["between_groups"] > 0 and group["width"] * 2 == first["width"]
    # The padding word has no vector.
    assert {layer["words"] for layer in found.values()} == {88 - 1}
    assert f"{first['mean_correlation']:.4f}" in capsys.readouterr().out


@pytest.mark.slow
def test_both_sides_of_a_plain_model(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, model = trained(share_embeddings=False, share_decoder_embeddings=False)
    assert list(correlations(model, tmp_path / "maps")) == ["source: output", "target: output"]
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("w1\tw2\t1\nw1\tw3\t2\nv1\tnowhere\t3\n")
    capsys.readouterr()
    assert main(["similarity", "--model", str(model), "--pairs", str(pairs)]) == 0
    text = capsys.readouterr().out
    assert "source: 88 words in 16 dimensions" in text and "target: 88 words" in text
    assert "2 of 3 (67%)" in text
