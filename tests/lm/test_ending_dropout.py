"""Dropout inside of an embedding that ends after a number of updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lm.checkpoint import load_model
from lm.train.loop import Trainer
from shared_embeddings.methods.alone import AloneEmbedding
from tests.lm.runs import run, settings, small_corpus


class Stop(Exception):
    """Ends training."""


@pytest.mark.slow
def test_batches_in_parts_count_once_and_a_run_that_resumes_goes_on_counting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    token_rows = AloneEmbedding.token_rows

    def noted(self: AloneEmbedding, *given: torch.Tensor) -> torch.Tensor:
        if self.training:
            seen.append(self.draws_per_token)
        return token_rows(self, *given)

    monkeypatch.setattr(AloneEmbedding, "token_rows", noted)
    alone = {"method": "alone", "hidden_dim": 12, "relu_dropout": 0.5, "relu_dropout_steps": 4}
    common: dict[str, Any] = {"embedding": alone, "grad_accum_steps": 2, "steps": 6, "save_every": 1}
    data = small_corpus(tmp_path)
    run(settings(data, tmp_path / "whole", **common))
    expected = [True] * 4 * 2 + [False] * 2 * 2
    assert seen == expected
    weights = load_model(tmp_path / "whole/last.pt").model.state_dict()
    for end in (3, 5):
        seen.clear()

        def stops(self: Trainer, end: int = end) -> bool:
            if self.step == end:
                raise Stop
            return False

        parts = settings(data, tmp_path / f"parts{end}", **common)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
            patch.setattr(Trainer, "_asked_to_stop", stops)
            run(parts)
        run(parts)
        assert seen == expected
        for name, tensor in load_model(tmp_path / f"parts{end}/last.pt").model.state_dict().items():
            assert torch.equal(tensor, weights[name]), (end, name)
