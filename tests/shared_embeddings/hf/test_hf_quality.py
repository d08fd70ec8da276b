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
    from shared_embeddings.hf.agreement import _nats

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


def test_positions_that_begin_behind_the_padding(tmp_path: Path) -> None:
    """Of 24 positions RoBERTa has 22 for tokens, since it counts from the id of padding, which is 1."""
    settings = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.XLMRobertaConfig(
        vocab_size=WORDS, max_position_embeddings=24, is_decoder=True, pad_token_id=1, **settings
    )
    transformers.XLMRobertaForCausalLM(config).save_pretrained(tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    text, report = tmp_path / "text", tmp_path / "report.json"
    text.write_text(" ".join(f"w{number}" for number in random.Random(1).choices(range(2, WORDS), k=80)))
    asked = ["--validation", text, "--report", report]
    assert compress(tmp_path / "model", "standard", tmp_path / "small", *asked) == 0
    found = json.loads(report.read_text())["quality"]
    assert found["after"] == pytest.approx(found["before"], rel=1e-6)


def test_a_tokenizer_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"n_embd": 16, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=WORDS - 1, **small))
    model.save_pretrained(tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    (tmp_path / "text").write_text(f"w1 w{WORDS - 1}\n")
    asked = ["--validation", tmp_path / "text"]
    assert compress(tmp_path / "model", "standard", tmp_path / "small", *asked) == 2
    assert f"token 'w{WORDS - 1}' has the id {WORDS - 1}, but the model has" in capsys.readouterr().err
