"""The perplexity of models of Hugging Face, before and after they are compressed."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import tokenizers  # noqa: E402
import transformers  # noqa: E402

from shared_embeddings import hf  # noqa: E402
from tests.shared_embeddings.hf.models import WORDS, compress, write  # noqa: E402


def add_tokenizer(folder: Path) -> None:
    """Words w0 to w299, whose ids are their numbers."""
    words = {f"w{number}": number for number in range(WORDS)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="w0").save_pretrained(folder)


def measured(model: Any, ids: list[int]) -> float:
    """The perplexity in one window."""
    with torch.no_grad():
        loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss
    return math.exp(float(loss))


def test_perplexity_before_and_after(tmp_path: Path) -> None:
    model = write("gpt2", tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    ids = random.Random(1).choices(range(WORDS), k=80)
    text, report = tmp_path / "text", tmp_path / "report.json"
    text.write_text(" ".join(f"w{number}" for number in ids))
    asked = ["--rank", 4, "--store", "int8", "--validation", text, "--report", report]
    assert compress(tmp_path / "model", "projective", tmp_path / "small", *asked) == 0
    found = json.loads(report.read_text())["quality"]
    assert found["before"] == pytest.approx(measured(model, ids), rel=1e-5)
    assert found["after"] == pytest.approx(measured(hf.load(tmp_path / "small"), ids), rel=1e-4)
    assert found["before"] != pytest.approx(found["after"], rel=1e-3)


def test_windows_score_every_token_once() -> None:
    """A model that sees one token back says the same in any window."""
    from shared_embeddings.hf.quality import _nats

    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(2))

    class Bigrams:
        def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            return transformers.modeling_outputs.CausalLMOutput(logits=table[input_ids])

    ids = random.Random(3).choices(range(9), k=23)
    logs = table.log_softmax(dim=1)
    wanted = -sum(float(logs[a, b]) for a, b in zip(ids, ids[1:]))
    for window in (2, 3, 6, 7, 23, 50):
        assert _nats(Bigrams(), [], ids, window) == (pytest.approx(wanted), 22)
    first = -float(logs[4, ids[0]])
    assert _nats(Bigrams(), [4], ids, 50) == (pytest.approx(wanted + first), 23)


@pytest.mark.parametrize("kind", ["bert", "t5", "marian"])
def test_what_has_no_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    write(kind, tmp_path / "model")
    (tmp_path / "text").write_text("w1 w2\n")
    asked = ["--rank", 4, "--validation", tmp_path / "text"]
    capsys.readouterr()
    assert compress(tmp_path / "model", "projective", tmp_path / "small", *asked) == 2
    line = capsys.readouterr().err
    assert "has no perplexity" in line and line.count("\n") == 1
    assert not (tmp_path / "small").exists()
