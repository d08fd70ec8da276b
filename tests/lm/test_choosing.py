"""Compressing a language model without naming a method."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lm.adapter import CheckpointModel
from lm.checkpoint import load_model
from shared_embeddings.checkpoints import choosing
from shared_embeddings.checkpoints.quality import Quality, Validation
from shared_embeddings.cli.main import main
from shared_embeddings.method import Candidate
from shared_embeddings.sizing.targets import Target
from tests.lm.command_line import write_corpus
from tests.lm.runs import run as train
from tests.lm.runs import settings

pytestmark = pytest.mark.usefixtures("installed_host")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose table is wide enough for a few bits, and its validation text."""
    folder = tmp_path_factory.mktemp("choosing")
    data = write_corpus(folder / "corpus", " ".join(f"w{number}" for number in range(250)))
    changes = {"embedding": {"method": "standard"}, "embedding_dim": 32, "steps": 40}
    train(settings(data, folder / "run", **changes))
    return folder / "run/last.pt", folder / "corpus/valid.txt"


def compress(model: Path, *arguments: object) -> int:
    return main(["compress", "--model", str(model), *map(str, arguments)])


def rows(text: str) -> list[tuple[str, float]]:
    """The method and what is kept of every trial."""
    found = re.findall(r"^\{method: (\w+).*?([\d.]+)%$", text, flags=re.MULTILINE)
    return [(method, float(kept)) for method, kept in found]


def test_the_best_candidate_is_written(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, text = trained
    small, report = tmp_path / "small.pt", tmp_path / "report.json"
    asked = ["--target-ratio", 4, "--validation", text, "--output", small, "--report", report]
    assert compress(model, *asked) == 0
    printed = capsys.readouterr().out
    found = rows(printed)
    assert len(found) >= 3 and {method for method, _ in found} == {"quantized", "projective"}
    assert found == sorted(found, key=lambda row: -row[1])
    written = json.loads(report.read_text())
    assert written["output"] == str(small) and f"{small}: lm model" in printed
    assert written["method"] == found[0][0] == load_model(small).model.embedding.method
    assert written["kept"]["share"] == pytest.approx(found[0][1] / 100, abs=1e-3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "small.pt"]
    assert compress(model, *asked) == 2
    assert "add --force" in capsys.readouterr().err


def test_the_original_is_measured_once(
    trained: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = trained
    quality, measured = CheckpointModel.quality, []

    def counted(self: CheckpointModel, validation: Validation) -> Quality:
        measured.append(self)
        return quality(self, validation)

    monkeypatch.setattr(CheckpointModel, "quality", counted)
    assert compress(model, "--bits", 8, "--compare", "--validation", text) == 0
    assert len(measured) == 1 + len(rows(capsys.readouterr().out))


@pytest.mark.slow
def test_comparing_writes_nothing(
    trained: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert compress(trained[0], "--bits", 8, "--compare") == 0
    assert len(rows(capsys.readouterr().out)) >= 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_smallest_model_within_a_loss(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, text = trained
    sizes = []
    for loss in ("0.1%", "0.2"):
        small = tmp_path / f"{loss}.pt"
        assert compress(model, "--max-loss", loss, "--validation", text, "--output", small) == 0
        assert rows(capsys.readouterr().out)[0][1] >= {"0.1%": 99.9, "0.2": 80.0}[loss]
        sizes.append(load_model(small).model.embedding.counts()["stored_bits"])
    assert sizes[1] <= sizes[0]


def test_the_smallest_size_is_found_by_bisection(
    trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a model that loses 1% for each factor of its compression."""

    def lose(
        model: Path, output: Path, method: str, candidate: Candidate, target: Target, settings: Any
    ) -> Any:
        assert target.ratio is not None and (method, candidate) == next(iter(choosing.candidates()))
        return SimpleNamespace(share=1 - target.ratio / 100, quality_before=None)

    monkeypatch.setattr(choosing, "tried", lose)
    for loss in (0.03, 0.1, 0.5):
        ratio = choosing.smallest(trained[0], loss).ratio
        assert ratio is not None and 0.93 * 100 * loss <= ratio <= 100 * loss
    with pytest.raises(ValueError, match="loses more than 1.0% at all sizes"):
        choosing.smallest(trained[0], 0.01)


def test_options_that_contradict_each_other(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--output", tmp_path / "small.pt"]
    cases = [
        ([*output], "give exactly one of --target-ratio, --target-bytes, --bits and --max-loss"),
        ([*output, "--bits", 2, "--target-ratio", 4], "give exactly one of"),
        (["--bits", 2], "give either --output or --compare"),
        (["--bits", 2, "--compare", "--force"], "--force has no effect with --compare"),
        ([*output, "--bits", 2, "--compare"], "give either --output or --compare"),
        ([*output, "--bits", 2, "--rank", 4], "--rank is an option of a method"),
        ([*output, "--bits", 64], "below 32"),
        ([*output, "--bits", 2, "--store", "int8"], "--store needs --method"),
        ([*output, "--max-loss", "120%"], "write 1% or 0.01"),
        ([*output, "--method", "quantized", "--max-loss", "1%"], "remove --method"),
        (
            [*output, "--method", "quantized", "--bits", 2, "--target-ratio", 9],
            "'bits' is chosen by the target",
        ),
        ([*output, "--target-ratio", 1e6], "no method is possible at this size"),
    ]
    for arguments, message in cases:
        try:
            status = compress(trained[0], *arguments)
        except SystemExit as stopped:
            status = int(str(stopped.code))
        error = capsys.readouterr().err
        assert (status, message in error) == (2, True), (arguments, error)
    assert list(tmp_path.iterdir()) == []


def test_a_target_leaves_other_options_to_the_user(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small.pt"
    options = ["--codec", "uniform", "--group-size", 16, "--target-ratio", 4]
    assert compress(trained[0], "--method", "quantized", *options, "--output", small) == 0
    config = load_model(small).config["embedding"]
    assert (config["codec"], config["group_size"]) == ("uniform", 16)
