"""How much of a model was kept: by hand, and which line says so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from shared_embeddings.checkpoints.agreement import (
    USABLE_SHARE,
    Comparison,
    Kept,
    Predictions,
    Probe,
    agreement,
    kept_quality,
    sampled_lines,
)
from shared_embeddings.checkpoints.quality import Quality, QualityReport, Validation

TEXT = Validation(text=Path("text"))


def predictions(words: list[int], probabilities: list[float]) -> Predictions:
    return Predictions(torch.tensor(words), torch.tensor(probabilities))


class Model:
    """Has a quality and predictions that are to be changed."""

    def __init__(
        self, measure: str = "BLEU", value: float = 0.0, words: Sequence[int] = (1, 2, 3, 4)
    ) -> None:
        self.measured = Quality(measure, value, "of a text")
        self.words = list(words)
        self.asked: list[tuple[Sequence[Path] | None, int]] = []

    def quality(self, validation: Validation) -> Quality:
        assert validation is TEXT
        return self.measured

    def probe(self, texts: Sequence[Path] | None, seed: int) -> Probe:
        self.asked.append((texts, seed))
        return Probe("4 tokens", lambda: predictions(self.words, [0.5, 0.25, 0.125, 0.125]))


def test_what_the_original_was_sure_of_counts_more() -> None:
    before = predictions([1, 2, 3, 4], [0.4, 0.2, 0.1, 0.1])
    # (0.4 + 0.1) / 0.8; what the other model is sure of does not matter.
    assert agreement(before, predictions([1, 0, 3, 0], [0.9, 0.9, 0.1, 0.9])) == pytest.approx(0.625)
    assert agreement(before, before) == 1.0
    assert agreement(before, predictions([2, 1, 1, 1], [1.0] * 4)) == 0.0


def test_predictions_of_many_states() -> None:
    hidden = torch.randn(150, 3, generator=torch.Generator().manual_seed(1))
    table = torch.randn(7, 3, generator=torch.Generator().manual_seed(2))
    found = Predictions.of(hidden, lambda rows: rows @ table.T)
    exponentials = (hidden @ table.T).exp()
    wanted = exponentials / exponentials.sum(dim=1, keepdim=True)
    assert found.words.tolist() == wanted.argmax(dim=1).tolist()
    torch.testing.assert_close(found.probabilities, wanted.amax(dim=1))
    with pytest.raises(ValueError, match="are NaN"):
        Predictions.of(hidden, lambda rows: rows @ table.T * math.nan)


@pytest.mark.parametrize(
    ("share", "line"),
    [
        (0.0399, "warning: kept 3% of the BLEU of the original (how): train this model before using it"),
        (
            math.nan,
            "warning: kept 0% of the BLEU of the original (how): train this model before using it",
        ),
        (USABLE_SHARE - 1e-6, "warning: kept 84%"),
        (USABLE_SHARE, "kept 85% of the BLEU of the original (how)"),
        (1.02, "kept 102% of the BLEU of the original (how)"),
    ],
)
def test_the_line(share: float, line: str) -> None:
    kept = Kept.measured(share, "BLEU", "how")
    assert kept.described().startswith(line) and "\n" not in kept.described()
    assert kept.needs_training == line.startswith("warning")


@pytest.mark.parametrize(
    ("measure", "before", "after", "share"),
    [
        ("perplexity", 100.0, 125.0, 0.8),
        ("perplexity", 100.0, 80.0, 1.25),
        ("perplexity", 100.0, math.inf, 0.0),
        ("BLEU", 20.0, 18.0, 0.9),
        ("BLEU", 20.0, 0.0, 0.0),
    ],
)
def test_share_of_a_quality(measure: str, before: float, after: float, share: float) -> None:
    kept = kept_quality(QualityReport(measure, "how", before, after))
    assert kept.share == pytest.approx(share) and kept.needs_training == (share < 0.85)


def test_the_quality_goes_before_the_predictions() -> None:
    model = Model("BLEU", 20.0)
    comparison = Comparison(model, TEXT, None, 5)
    model.measured, model.words = Quality("BLEU", 5.0, "of a text"), [0, 0, 0, 0]
    quality, kept = comparison.result()
    assert quality == QualityReport("BLEU", "of a text", 20.0, 5.0)
    assert (kept.share, kept.of, kept.how, model.asked) == (0.25, "BLEU", "of a text", [])


@pytest.mark.parametrize("validation", [None, TEXT])
def test_predictions_where_there_is_no_quality_that_could_get_worse(validation: Validation | None) -> None:
    model, texts = Model(), [Path("a")]
    comparison = Comparison(model, validation, texts, 5)
    model.words = [1, 0, 3, 0]
    quality, kept = comparison.result()
    assert model.asked == [(texts, 5)] and (quality is None) == (validation is None)
    assert kept == Kept(0.625, "predictions", "4 tokens", needs_training=True)


def test_what_cannot_be_asked_was_not_shown_to_work() -> None:
    class Graphs(Model):
        def probe(self, texts: Sequence[Path] | None, seed: int) -> Probe:
            raise ValueError("reads graphs")

    quality, kept = Comparison(Graphs(), None, None, 1).result()
    assert quality is None and kept.share is None and kept.needs_training
    assert kept.described() == (
        "warning: could not verify that this model still works (reads graphs); evaluate it on a text"
    )


def test_sampled_lines(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("a\n\n \nb\n")
    second.write_text("c\nd")
    assert sorted(sampled_lines([first, second], 1)) == ["a", "b", "c", "d"]
    assert sampled_lines([first, second], 1) == sampled_lines([first, second], 1)
    drawn = [sampled_lines([first, second], seed, number=2) for seed in range(400)]
    assert all(len(set(lines)) == 2 for lines in drawn)
    for line in "abcd":  # 200 of 400 are expected, with a standard deviation of 10
        assert 160 < sum(line in lines for lines in drawn) < 240
