"""The search of `compress` for a method, a codec and a size."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.adapter import TrainedLanguageModel
from lm.checkpoint import load_model
from shared_embeddings.compress import search, session
from shared_embeddings.compress.measure import Quality, Retention, Validation
from shared_embeddings.compress.options import CompressOptions, MaxLoss
from shared_embeddings.compress.search import Trial
from shared_embeddings.compress.session import Session
from shared_embeddings.compress.sizing import Target
from shared_embeddings.fitting.task import FitTask
from shared_embeddings.modules.quantized import QuantizedEmbedding
from shared_embeddings.spec import Candidate
from tests.lm.runs import Ended, compress, settings, tool, write_corpus
from tests.lm.runs import run as train

pytestmark = pytest.mark.usefixtures("installed_host")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose table is wide enough for a few bits, and its validation text."""
    folder = tmp_path_factory.mktemp("choosing")
    data = write_corpus(folder / "corpus", " ".join(f"w{number}" for number in range(250)))
    changes = {"embedding": {"method": "standard"}, "embedding_dim": 32, "steps": 40}
    train(settings(data, folder / "run", **changes))
    return folder / "run/last.pt", folder / "corpus/valid.txt"


def choose(model: Path, *arguments: object) -> Ended:
    return tool("compress", "--model", model, *arguments)


def rows(text: str) -> list[tuple[str, float]]:
    """The method and the kept quality of every trial."""
    trials = text.partition("\n\n")[0]
    found = re.findall(r"^\{method: (\w+).*?([\d.]+)%$", trials, flags=re.MULTILINE)
    return [(method, float(kept)) for method, kept in found]


def test_candidates_are_ranked_by_divergence_or_else_by_share() -> None:
    def trial(share: float | None, kl: float | None) -> Trial:
        retention = Retention(share, "predictions", "how", needs_training=False, kl=kl)
        return Trial("standard", {}, "fp16", retention=retention)

    for better, worse in [
        (trial(0.90, 0.1), trial(0.95, 0.2)),
        (trial(0.95, None), trial(0.90, None)),
        (trial(0.0, 1.0), trial(None, None)),
    ]:
        assert better.rank < worse.rank


def test_the_original_is_measured_once(trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = trained
    quality, measured = TrainedLanguageModel.quality, []

    def counted(self: TrainedLanguageModel, validation: Validation) -> Quality:
        measured.append(self)
        return quality(self, validation)

    monkeypatch.setattr(TrainedLanguageModel, "quality", counted)
    ended = choose(model, "--bits", 8, "--compare", "--validation", text)
    assert ended.status == 0 and len(measured) == 1 + len(rows(ended.out))


def test_words_are_counted_once_for_all_candidates(
    trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = trained
    counts_of, counted = session.counts_of, []

    def count(words: Sequence[str], *given: Any) -> torch.Tensor:
        counted.append(len(words))
        return counts_of(words, *given)

    monkeypatch.setattr(session, "counts_of", count)
    ended = choose(model, "--bits", 8, "--compare", "--text", text)
    assert ended.status == 0 and len(rows(ended.out)) > 1 == len(counted)


@pytest.mark.slow
def test_the_smallest_model_within_a_loss(trained: tuple[Path, Path], tmp_path: Path) -> None:
    model, text = trained
    sizes = []
    for loss, least in (("0.1%", 99.9), ("0.2", 80.0)):
        small = tmp_path / f"{loss}.pt"
        ended = choose(model, "--max-loss", loss, "--validation", text, "--output", small)
        assert ended.status == 0 and rows(ended.out)[0][1] >= least
        sizes.append(load_model(small).model.embedding.counts()["stored_bits"])
    assert sizes[1] <= search.CLOSE_RATIO * sizes[0]


def test_few_sizes_are_tried_for_the_smallest(
    trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With models that lose in proportion to their ratio, and by a factor for each bit."""
    losses: dict[float, float] = {}
    opened = Session(CompressOptions(model=trained[0], compare=True, bits=4.0))
    for loss_at in (lambda ratio: ratio / 100, lambda ratio: min(9 * 16 ** (-32 / ratio), 1)):

        def losing(
            session: Session,
            method: str,
            candidate: Candidate,
            target: Target,
            in_full: bool,
            loss_at: Callable[[float], float] = loss_at,
        ) -> Trial:
            assert target.ratio is not None
            # One of several candidates loses less than the others.
            loss = min(1.0, loss_at(target.ratio) * (1 if candidate.options == {"codec": "spectral"} else 2))
            losses[target.ratio] = min(loss, losses.get(target.ratio, 1.0))
            retention = Retention(1 - loss, "predictions", "how", needs_training=False, kl=loss / 2)
            return Trial(method, candidate.options, candidate.store, retention=retention)

        monkeypatch.setattr(search, "attempt", losing)
        for loss in (0.03, 0.1, 0.5):
            for largest in (MaxLoss(loss, in_nats=False), MaxLoss(loss / 2, in_nats=True)):
                losses.clear()
                ratio = search.smallest_within(opened, largest).ratio
                assert ratio is not None and losses[ratio] <= loss and len(losses) <= 7
                is_last = any(ratio < tried <= search.CLOSE_RATIO * ratio for tried in losses)
                assert is_last or losses[ratio] >= 0.8 * loss
    failed = Trial("quantized", {}, "fp16", "needs more")
    monkeypatch.setattr(search, "attempt", lambda *_, **__: failed)
    with pytest.raises(ValueError, match="at all sizes that were tried; needs more"):
        search.smallest_within(opened, MaxLoss(0.01, in_nats=False))


def test_candidates_for_a_large_table_are_ranked_on_a_sample(
    trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = trained
    asked = ["--bits", 4, "--compare", "--text", text]
    whole = choose(model, *asked).out
    assert "on a sample of rows" not in whole
    too_small = ["--size", "24x", "--compare", "--text", text]
    refused = choose(model, *too_small).out.count("needs at least")
    monkeypatch.setattr(search, "SAMPLED_ROWS", 50)
    sampled = choose(model, *asked).out
    assert 1 <= len(rows(sampled)) < len(rows(whole)) and set(rows(sampled)) <= set(rows(whole))
    skipped = sampled.count("on a sample of rows, its error is")
    assert skipped == len(rows(whole)) - len(rows(sampled)) > 0
    assert choose(model, *too_small).out.count("needs at least") == refused > 0


@pytest.mark.parametrize("sample", [10**6, 50], ids=["whole", "sample"])
def test_a_candidate_that_fails_costs_its_row_only(
    trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: int
) -> None:
    fit, failing = QuantizedEmbedding.fit.__func__, {"spectral"}

    def partly(kind: type[QuantizedEmbedding], task: FitTask) -> Any:
        if task.options["codec"] in failing or "all" in failing:
            raise RuntimeError("these dtypes do not match\nsecond line")
        return fit(kind, task)

    def full(kind: type[QuantizedEmbedding], task: FitTask) -> Any:
        raise OSError(28, "No space left on device")

    asked = ["--size", "8x", "--output", tmp_path / "small.pt", "--force"]
    monkeypatch.setattr(QuantizedEmbedding, "fit", classmethod(partly))
    monkeypatch.setattr(search, "SAMPLED_ROWS", sample)
    ended = choose(trained[0], *asked)
    assert ended.status == 0 and len(rows(ended.out)) >= 1
    (failed,) = (line for line in ended.out.splitlines() if "RuntimeError: these dtypes do not match" in line)
    assert "codec: spectral" in failed
    failing.add("all")
    ended = choose(trained[0], "--size", "60x", "--compare")
    assert ended.status == 2 and ended.err.count("\n") == 1
    assert "no method is possible at this size" in ended.err
    monkeypatch.setattr(QuantizedEmbedding, "fit", classmethod(full))
    ended = choose(trained[0], *asked)
    assert ended.status == 2 and "No space left" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["small.pt"]


def test_a_target_leaves_other_options_to_the_user(trained: tuple[Path, Path], tmp_path: Path) -> None:
    options = ["--codec", "uniform", "--group-size", 16, "--size", "4x"]
    assert compress(trained[0], "quantized", tmp_path / "small.pt", *options).status == 0
    config = load_model(tmp_path / "small.pt").config["embedding"]
    assert (config["codec"], config["group_size"]) == ("uniform", 16)
