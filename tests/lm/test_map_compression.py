"""Compressing the map of a DeFINE unit that the output is tied to, as in DeFINE's Table 5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shared_embeddings as se
from lm import models
from lm.checkpoint import load_model, save_model
from tests.lm.test_compression import compress, scores

pytestmark = pytest.mark.usefixtures("installed_host")

WORDS, DIM, MAP = 120, 12, 8
DEFINE: dict[str, Any] = {
    "method": "define",
    "map_dim": MAP,
    "expand_dim": 24,
    "depth": 2,
    "max_groups": 2,
    "output_bias": True,
}


def define_model(path: Path) -> Path:
    """A checkpoint of an untrained AWD-LSTM that ends in the width of its map; gives its path."""
    torch.manual_seed(3)
    options = {"embedding_dim": DIM, "hidden_dim": 10, "num_layers": 2}
    vocabulary = ["<eos>", "<unk>", *(f"w{number}" for number in range(WORDS - 2))]
    model = models.build("awd_lstm", vocabulary, DEFINE, options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    save_model(path, model, vocabulary, {"model": "awd_lstm", "embedding": DEFINE, **options}, None)
    return path


def test_the_map_becomes_codes_and_the_rest_stays(tmp_path: Path) -> None:
    model, small, report = define_model(tmp_path / "model.pt"), tmp_path / "small.pt", tmp_path / "report"
    codes = ["--num-codebooks", 4, "--codebook-size", 16, "--fit-steps", 20, "--seed", 5, "--store", "fp32"]
    assert compress(model, "compositional_code", small, *codes, "--report", report) == 0
    old, new = load_model(model).model.embedding, load_model(small).model.embedding
    # The codes of the map are those of a fit to its table, in both directions.
    options = {"num_codebooks": 4, "codebook_size": 16, "output_bias": True}
    wanted, _ = se.fit("compositional_code", old.inner_embedding().table(), seed=5, steps=20, **options)
    table = sum(wanted.codebooks[m][wanted.codes[:, m].long()] for m in range(4))
    torch.testing.assert_close(new.inner_embedding().table(), table)
    before, after = old.state_dict(), new.state_dict()
    rest = [name for name in before if not name.startswith("map.")]
    assert len(rest) > 8 and all(torch.equal(after[name], before[name]) for name in rest)
    torch.testing.assert_close(new.table(), new.reduction(new.expansion(new.entry(table))))
    bias = old.output_bias()
    assert bias is not None and torch.equal(new.output_bias(), bias)
    hidden = torch.randn(3, MAP, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(new.logits(hidden), hidden @ table.T + bias)
    # 4 codes of 4 bits for a word, and codebooks of 4 x 16 x 8 numbers; a bias for every word.
    (found,) = json.loads(report.read_text())["tables"]
    numbers = 4 * 16 * MAP + WORDS
    assert found["part"] == "map of define" and found["uses"] == ["input", "output"]
    assert found["parameters"] == {"before": WORDS * MAP + WORDS, "after": numbers}
    assert found["stored_bytes"]["after"] == 4 * numbers + WORDS * 4 * 4 // 8
    error = (old.inner_embedding().table() - table).norm() / old.inner_embedding().table().norm()
    assert found["fit"]["relative_error"] == pytest.approx(error.item(), rel=1e-4)


@pytest.mark.parametrize("store", ["fp32", "int8"])
def test_a_map_of_full_size_keeps_the_scores(tmp_path: Path, store: str) -> None:
    model, small = define_model(tmp_path / "model.pt"), tmp_path / "small.pt"
    assert compress(model, "projective", small, "--rank", MAP, "--store", store) == 0
    tolerance = 1e-4 if store == "fp32" else 0.1
    torch.testing.assert_close(scores(small), scores(model), atol=tolerance, rtol=0)
    names = {name for name in torch.load(small, weights_only=True)["model"] if name.endswith(".scale")}
    # The layers after the map are not those of the fit, and stay in 32 bits.
    assert names == (set() if store == "fp32" else {"embedding.map.codes.scale"})


def test_a_map_cannot_be_a_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = define_model(tmp_path / "model.pt")
    options = ["--map-dim", 4, "--expand-dim", 8, "--depth", 1, "--max-groups", 2]
    assert compress(model, "define", tmp_path / "small.pt", *options) == 2
    line = capsys.readouterr().err
    assert "option 'map' is 'define'" in line and line.count("\n") == 1
