"""The recipe `shrink_a_model`: its rows, its measures, its table and picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from recipes.common.recipe import find_recipe
from recipes.common.results import FILE, write_result
from recipes.common.tools import run_main
from recipes.shrink_a_model import preprocess
from recipes.shrink_a_model.encoder import WORDS, Texts, agreement, measure, similarities
from recipes.shrink_a_model.models import (
    PICTURE,
    ShrinkRow,
    chosen_rows,
    decoder_table,
    read_grid,
    table,
    write_report,
)
from shared_embeddings.analysis import WordPair, WordPairs
from shared_embeddings.utils.errors import UserError

RECIPE = find_recipe("shrink_a_model")
MARKERS = "<!-- BEGIN results -->\n<!-- END results -->\n"


def test_rows_are_chosen_by_pattern_in_the_order_of_the_file() -> None:
    rows = read_grid(RECIPE)
    assert [row.name for row in chosen_rows(RECIPE, ["trimmed", "original"])] == ["original", "trimmed"]
    assert not rows["trimmed"].is_compressed and rows["automatic_8x"].is_compressed
    assert rows["automatic_8x"].ratio == 8 and not rows["automatic_8x"].embedding
    assert [row.name for row in rows.values() if row.decoder] == [name for name in rows if "gemma" in name]
    with pytest.raises(UserError, match="no row is called 'small'; there are: original, trimmed"):
        chosen_rows(RECIPE, ["small"])


def test_scores_of_the_original_encoder() -> None:
    draw = np.random.default_rng(0)
    vectors = {name: unit(draw.normal(size=(30, 8))) for name in Texts.__dataclass_fields__}
    vectors["descriptions"] = vectors["headlines"]
    vectors[WORDS] = np.array([[1, 0], [0.8, 0.6], [0, 1]], dtype=np.float32)
    pairs = [WordPair("a", "b", 9.0), WordPair("a", "c", 1.0), WordPair("b", "c", 5.0)]
    found = measure(vectors, vectors, [WordPairs("set", pairs)])
    assert found == {"rho": {"set": 1.0}, "found": 1.0, "top1": 1.0, "top10": 1.0, "correlation": 1.0}


def test_agreement_counts_shared_neighbors() -> None:
    own = similarities(unit(np.array([[1, 0], [0.9, 0.1], [0, 1], [0.2, 0.8]])))
    other = similarities(unit(np.array([[1, 0], [0, 1], [0.9, 0.1], [0.2, 0.8]])))
    assert agreement(own, own, 1) == 1
    assert agreement(own, other, 1) == 0
    assert agreement(own, other, 3) == 1


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors of length one."""
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_table_and_picture_of_measured_rows(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(MARKERS)
    rows = {name: ShrinkRow(name) for name in ("original", "small", "left")}
    scores = {"found": 0.5, "top1": 0.9, "top10": 0.8, "correlation": 0.99, "speed": 1.0}
    for name, size, onnx in (
        ("original", 800, None),
        ("small", 100, {"bytes": 5e5, "difference": 2e-7, "speed": 1.5}),
    ):
        write_result(
            tmp_path,
            name,
            config={"embedding": {"method": "quantized" if name == "small" else "standard"}},
            counts={"words": 10, "folder_bytes": 3e6, "stored_bits": 8 * size},
            metrics={**scores, "rho": {"EN-RG-65": None}, "onnx": onnx},
            data_checksum="",
        )
    write_report(rows, tmp_path / FILE, readme)
    lines = readme.read_text().splitlines()
    assert lines[3].startswith("| original | plain | 10 | 3.0 | 0.00 | 1.0x | undefined | 50.0 % |")
    assert "| 8.0x |" in lines[4] and lines[4].endswith("| 0.5 | 2e-07 | 1.50x |")
    assert lines[5].startswith("| left | not run |")
    assert (tmp_path / PICTURE).read_bytes().startswith(b"\x89PNG")


def test_readme_table_matches_the_results() -> None:
    records = {
        record["row"]: record for record in map(json.loads, (RECIPE.folder / FILE).read_text().splitlines())
    }
    text = (RECIPE.folder / "README.md").read_text(encoding="utf-8")
    rows = read_grid(RECIPE)
    for is_decoder, made in ((False, table), (True, decoder_table)):
        measured = [
            records[name] for name, row in rows.items() if name in records and row.decoder == is_decoder
        ]
        assert measured and set(made(measured).splitlines()) <= set(text.splitlines())


def test_a_model_without_a_configuration_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODEL", str(tmp_path))
    assert run_main("preprocess", lambda arguments: preprocess.main(RECIPE, arguments), []) == 2
    assert f"MODEL={tmp_path}: no config.json there; name the folder of a model" in capsys.readouterr().err
