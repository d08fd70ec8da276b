"""Training compressed translation models until they predict as the original."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import CODES
from tests.nmt.conftest import Host, Trained
from tests.nmt.test_compression import STANDARD, UNTIED, compress, scores

pytestmark = pytest.mark.usefixtures("short_recovery")


def check_falls(model: Path, folder: Path, *arguments: object, method: tuple[Any, ...] = CODES) -> None:
    """The divergence falls, and two trainings give the same model."""
    report, found = folder / "report.json", []
    for number in range(2):
        name, *options = method
        small = folder / f"small{number}.pt"
        asked = [*options, *arguments, "--recover-steps", 12, "--report", report, "--force"]
        compress(model, name, small, *asked)
        found.append(scores(small))
    content = json.loads(report.read_text())
    trained = content["recovery"]
    assert trained["kl_after"] < 0.98 * trained["kl_before"]
    assert trained["kl_after"] == pytest.approx(content["kept"]["kl"], rel=1e-3)
    assert torch.equal(*found)


@pytest.mark.slow_except("tied-codes", "untied-rank")
@pytest.mark.parametrize("method", [CODES, ("projective", "--rank", 3)], ids=["codes", "rank"])
@pytest.mark.parametrize("ties", [{}, UNTIED], ids=["tied", "untied"])
def test_translations_are_learned(
    trained: Trained, tmp_path: Path, ties: dict[str, Any], method: tuple[Any, ...]
) -> None:
    host, model = trained(embedding=STANDARD, **ties)
    texts = [host.folder / "train.src", host.folder / "train.tgt"]
    check_falls(model, tmp_path, "--text", *texts, method=method)


def test_without_a_text_random_words_are_translated(trained: Trained, tmp_path: Path) -> None:
    _, model = trained(embedding=STANDARD)
    check_falls(model, tmp_path)


def test_a_plain_model_and_a_language_model(host: Host, tmp_path: Path) -> None:
    plain = host.train("plain")
    check_falls(plain, tmp_path, "--text", host.folder / "train.src")
    language = host.train("language", **host.language_model())
    check_falls(language, tmp_path, "--text", host.folder / "train.src")
