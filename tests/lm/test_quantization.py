"""Training a language model with a table that is rounded: what is evaluated is what is stored afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lm.checkpoint import load_model
from lm.train.config import parse
from shared_embeddings.cli.main import main
from shared_embeddings.options import OptionError
from tests.lm.runs import log_lines, run, settings, small_corpus

STANDARD = {"method": "standard", "output_bias": True}
ROUNDED = {"bits": 2, "codec": "lloyd_max", "count_exponent": 0}


def rounding(data: Path, save: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run with rounded rows."""
    changes = {"embedding": STANDARD, "embedding_quantization": ROUNDED, "valid_batch_size": 1, **changes}
    return settings(data, save, optimizer="sgd", nonmono=None, **changes)


def test_the_stored_model_is_the_one_that_was_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = small_corpus(tmp_path)
    run(rounding(data, tmp_path / "plain", embedding_quantization=None))
    run(rounding(data, tmp_path / "whole"))
    run(rounding(data, tmp_path / "parts", steps=9, save_every=3))
    run(rounding(data, tmp_path / "parts", steps=20, save_every=3))
    assert log_lines(tmp_path / "whole") != log_lines(tmp_path / "plain")
    whole, parts = (load_model(tmp_path / name / "last.pt") for name in ("whole", "parts"))
    states = zip(whole.model.state_dict().items(), parts.model.state_dict().values(), strict=True)
    assert all(torch.equal(tensor, other) for (_, tensor), other in states)

    best, small = tmp_path / "whole/best.pt", tmp_path / "small.pt"
    text = ["--text", str(tmp_path / "train.txt"), "--validation", str(tmp_path / "valid.txt")]
    options = ["--bits", "2", "--codec", "lloyd_max", "--count_exponent", "0", *text, "--store", "fp32"]
    assert (
        main(["compress", "--model", str(best), "--method", "quantized", *options, "--output", str(small)])
        == 0
    )
    (found,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("perplexity  "))
    before, after = map(float, found.split()[1:3])
    *_, best_line = (line for line in log_lines(tmp_path / "whole") if "best so far" in line)
    validated = float(best_line.split(" ppl ")[1].split()[0])
    assert after == pytest.approx(validated, abs=0.011) and before != after


def test_wrong_settings(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="embedding_quantization: unknown option 'bitz'"):
        parse(rounding(tmp_path, tmp_path, embedding_quantization={"bitz": 1}))
    with pytest.raises(OptionError, match="'compile' cannot include the code search"):
        parse(rounding(tmp_path, tmp_path, compile=True))
    with pytest.raises(OptionError, match="rounds the table of method standard, but the embedding is funnel"):
        run(rounding(small_corpus(tmp_path), tmp_path / "run", embedding={"method": "funnel", "rank": 4}))
