"""The reconstruction recipe on a few random vectors, from the file of vectors to the README."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import shared_embeddings as se
from recipes import reconstruction
from recipes.common.recipe import Recipe, find_recipe
from recipes.common.results import find_result, read_results
from recipes.common.tools import run_main
from recipes.reconstruction import Cell, evaluate, preprocess, read_grid, train
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import sha256

RECIPE = find_recipe("glove_reconstruction")
GRID: dict[str, Any] = {
    "words": 60,
    "alone": {"alone_real": {"filter": "real"}, "alone_fixed": {"filter": "binary", "train_base": False}},
    "fixed": {"half": {"method": "standard", "store": "fp16"}, "two": {"method": "quantized", "bits": 2}},
    "hidden": [16, 40],
    "seeds": [0, 1],
    "training": {"epochs": 3, "batch_size": 20, "learning_rate": 0.01, "schedule": "cosine"},
}


class Experiment:
    """A folder with vectors of 80 words in 12 dimensions, pairs of them, and a grid."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.recipe = folder, Recipe(folder / "glove_reconstruction")
        self.recipe.folder.mkdir()
        self.home = folder / "runs" / "glove_reconstruction"
        self.vectors, self.pairs = folder / "vectors.txt", folder / "set.tsv"
        draw = np.random.default_rng(4)
        rows = draw.normal(size=(80, 12))
        lines = [f"w{n} " + " ".join(f"{x:.5f}" for x in row) for n, row in enumerate(rows)]
        self.vectors.write_text("\n".join(lines) + "\n")
        scores = [f"w{n}\tw{n + 5}\t{draw.random():.4f}" for n in range(60)]
        self.pairs.write_text("\n".join(scores) + "\n")
        self.configure()

    def configure(self, **changes: Any) -> None:
        data = RECIPE.data_settings()[1]
        content = {"kind": "reconstruction", "data": data, "grids": {"full": {**GRID, **changes}}}
        (self.recipe.folder / "rows.yaml").write_text(yaml.safe_dump(content))

    def run(self, step: Any, *arguments: object) -> int:
        return run_main("recipe", partial(step, self.recipe), list(map(str, arguments)))

    def prepare(self, *arguments: object) -> int:
        return self.run(preprocess, "--vectors", self.vectors, "--pairs", self.pairs, *arguments)

    def result(self, cell: str) -> dict[str, Any]:
        result = find_result(self.home, cell)
        assert result is not None
        return result


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Experiment]:
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("DATA_DIR", raising=False)
    torch.set_num_threads(1)
    yield Experiment(tmp_path)


def test_end_to_end(setting: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    assert setting.prepare() == 0
    data = json.loads((setting.home / "data" / "data.json").read_text())
    assert data["source"]["set"]["pairs"] == 60 and data["source"]["set"]["known"] == 55
    assert data["source_all_words"]["set"]["known"] == 60
    assert setting.run(train, "alone_*", "projective-40-0", "structured-40-0") == 0
    records = {record["row"]: record for record in read_results(setting.home)}
    assert len(records) == 10
    parameters = se.num_parameters("alone", num_embeddings=60, embedding_dim=12, hidden_dim=40)
    assert records["alone_real-40-1"]["counts"]["embedding"] == parameters
    assert records["alone_real-40-1"]["config"]["embedding"]["seed"] == 1
    assert records["structured-40-0"]["counts"]["stored_bits"] <= 32 * parameters
    assert "fit_steps" not in records["structured-40-0"]["config"]
    # A rank above D is equivalent to a table.
    metrics = records["projective-40-0"]["metrics"]
    assert metrics["relative_error"] < 1.0 and metrics["similarity"]["set"]["known"] == 55
    readme = setting.folder / "README.md"
    readme.write_text("kept\n<!-- BEGIN results -->\n<!-- END results -->\n")
    assert setting.run(evaluate, "--readme", readme) == 0
    text = readme.read_text()
    mean = np.mean(
        [records[f"alone_real-16-{seed}"]["metrics"]["similarity"]["set"]["rho"] for seed in (0, 1)]
    )
    assert f"{mean:.3f} ± " in text and f"{data['source']['set']['rho']:.3f}" in text
    assert text.startswith("kept\n") and "](figure3.png)" in text and "| projective | 16 | not run |" in text
    assert (setting.folder / "figure3.png").read_bytes().startswith(b"\x89PNG")


def test_measured_cells_are_skipped(setting: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    assert setting.prepare() == 0
    assert setting.run(train, "alone_real-16-0") == 0
    before = setting.result("alone_real-16-0")
    capsys.readouterr()
    assert setting.run(train, "alone_real-16-*") == 0
    assert "alone_real-16-0: has a result" in capsys.readouterr().out
    assert setting.result("alone_real-16-0") == before and setting.result("alone_real-16-1")
    setting.configure(learning_rates={"alone_fixed": 0.02})
    assert setting.run(train, "alone_*-16-0") == 0
    rates = [
        setting.result(f"alone_{row}-16-0")["config"]["training"]["learning_rate"]
        for row in ("real", "fixed")
    ]
    assert rates == [0.01, 0.02]
    setting.configure(training={**GRID["training"], "epochs": 4})
    assert setting.run(train, "alone_real-16-0") == 2
    assert "has other settings or vectors" in capsys.readouterr().err


@pytest.mark.slow
def test_vectors_with_rows_of_one_size_are_compared(setting: Experiment) -> None:
    assert setting.prepare() == 0
    assert setting.run(train, "alone_real-*", "projective-16-0", "two") == 0
    first = (setting.home / "results.jsonl").read_text()
    (setting.home / "results.jsonl").unlink()
    setting.vectors.write_text(setting.vectors.read_text().replace(" 0.", " 1."))
    assert setting.prepare() == 0
    assert setting.run(train, "half", "two", "alone_real-16-0") == 0
    half = setting.result("half")
    assert half["counts"]["stored_bits"] == 16 * 60 * 12 and half["metrics"]["relative_error"] < 1e-3
    with (setting.home / "results.jsonl").open("a") as file:
        file.write(first)
    readme = setting.folder / "README.md"
    markers = (f"<!-- BEGIN {name} -->\n<!-- END {name} -->\n" for name in ("results", "comparison"))
    readme.write_text("".join(markers))
    assert setting.run(evaluate, "--readme", readme) == 0
    of_figure, compared = readme.read_text().split("<!-- END results -->")
    assert "| projective | 16 |" in of_figure and "| half " not in of_figure
    rows = [line.split(" | ") for line in compared.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[2:]] == ["| source, 12 dimensions", "| two", "| half", "| alone_real"]
    assert [float(row[3]) for row in rows[3:]] == sorted(float(row[3]) for row in rows[3:])
    assert (setting.folder / "compressed.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_fit_of_alone_is_seeded_and_lowers_the_loss() -> None:
    teacher = torch.randn(30, 8)
    options = {"hidden_dim": 60, "seed": 3}
    training = {"epochs": 150, "batch_size": 10, "learning_rate": 0.01, "schedule": "constant"}
    before = torch.get_rng_state()
    first = reconstruction.fit_alone(teacher, options, training, "fit")
    assert torch.equal(torch.get_rng_state(), before)
    second = reconstruction.fit_alone(teacher, options, training, "fit")
    assert torch.equal(first.table(), second.table())
    with torch.no_grad():
        assert float((first.table() - teacher).square().sum() / teacher.square().sum()) < 0.3


def test_own_vectors_of_a_text(tmp_path: Path) -> None:
    pytest.importorskip("gensim")
    text = tmp_path / "text"
    text.write_text("The sun <unk> shines\nthe moon shines\nrare\n" * 3 + "once\n")
    settings = {"dim": 4, "window": 2, "epochs": 1, "seed": 0, "min_count": 3}
    reconstruction.train_source([text], settings, tmp_path / "own.npz")
    source = reconstruction.read_source(tmp_path / "own.npz")
    assert source.words == ["the", "shines", "sun", "moon", "rare"] and source.vectors.shape == (5, 4)


def test_glove_is_unpacked_from_a_verified_archive(setting: Experiment) -> None:
    archive = setting.home / "downloads" / "vectors.zip"
    archive.parent.mkdir(parents=True)
    with zipfile.ZipFile(archive, "w") as packed:
        packed.write(setting.vectors, "vectors.txt")
    entry = {"url": "https://example.invalid/vectors.zip", "file": "vectors.txt", "sha256": sha256(archive)}
    assert reconstruction.download_glove(entry, archive.parent).read_bytes() == setting.vectors.read_bytes()


def test_methods_get_as_many_bytes_as_alone() -> None:
    grid = read_grid(RECIPE)
    assert list(grid.hidden) == [600, 1200, 1800, 2400] and len(grid.seeds) == 5
    compared = {*grid.alone, *se.methods()} - {"alone", "standard"}
    assert {cell.row for cell in grid.cells()} == compared | set(grid.fixed)
    for row in ("projective", "structured", "compositional_code", "uncle"):
        options = grid.config(Cell(row, 600, 0), 5000, 300)["embedding"]
        assert options.pop("method") == row and "random_classes" not in options
    assert grid.config(Cell("projective", 600, 0), 5000, 300)["embedding"]["rank"] == 360_300 // 5300


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"words": 100}, "there are 80 words"),
        ({"training": {"epoch": 1}}, "training.epoch"),
        ({"learning_rates": {"alone_real": "fast"}}, "learning_rates"),
    ],
)
def test_errors_in_the_grid(
    setting: Experiment, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    setting.configure(**changes)
    assert setting.prepare() == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err


def test_errors_on_the_command_line(setting: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    assert setting.run(train, "alone_real-16-0") == 2
    assert "run preprocess.sh" in capsys.readouterr().err
    assert setting.prepare() == 0
    assert setting.run(train, "alone_real-17-0") == 2
    assert "no cell matches 'alone_real-17-0'" in capsys.readouterr().err
    setting.configure(words=50)
    assert setting.run(train, "alone_real-16-0") == 2
    assert "60 words are prepared, but the grid has 'words: 50'" in capsys.readouterr().err
    # DeFINE's smallest unit is larger than such a small ALONE.
    setting.configure(hidden=[4])
    assert setting.run(train, "define-4-0") == 2
    assert "needs at least" in capsys.readouterr().err


def test_the_cells_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    train(RECIPE, ["--list", "alone_real-*-0", "--grid", "short"])
    listed = capsys.readouterr().out.split()
    assert listed == [f"alone_real-{hidden}-0" for hidden in (600, 1200, 1800, 2400)]
    short = read_grid(RECIPE, "short")
    assert short.training.epochs == 100 and short.words == 5000 and short.learning_rates
    with pytest.raises(UserError, match="no grid 'tiny'; there are: full, short"):
        read_grid(RECIPE, "tiny")
