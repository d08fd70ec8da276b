"""LoRA of PEFT on top of compressed models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tests.shared_embeddings.hf.models import IDS, scores  # noqa: E402
from tests.shared_embeddings.hf.test_hf_uses import STORES, opened  # noqa: E402

TARGETS: dict[str, Any] = {"attention": ["q_proj", "v_proj"], "all": "all-linear", "input": ["embed_tokens"]}


def adapted(model: Any, **settings: Any) -> Any:
    """A model with LoRA, after two steps."""
    task = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    tuned = peft.get_peft_model(model, peft.LoraConfig(task_type=task, r=2, **settings))
    trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, 1.0)
    for _ in range(2):
        optimizer.zero_grad()
        tuned(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    return tuned.eval()


@pytest.mark.slow_except("input")
@pytest.mark.parametrize("target", TARGETS)
def test_adapters_round_trip(tmp_path: Path, target: str) -> None:
    for kind in ("llama", "gemma", "bart"):
        for store in STORES:
            before = scores(opened(kind, tmp_path, store))
            tuned = adapted(opened(kind, tmp_path, store), target_modules=TARGETS[target])
            assert not torch.allclose(scores(tuned), before), kind
            tuned.save_pretrained(tmp_path / "adapter")
            again = peft.PeftModel.from_pretrained(opened(kind, tmp_path, store), tmp_path / "adapter")
            torch.testing.assert_close(scores(again), scores(tuned))
            if target != "input":
                torch.testing.assert_close(scores(tuned.merge_and_unload()), scores(again), atol=1e-4, rtol=0)


def test_unsupported_adapters(tmp_path: Path) -> None:
    """Each fails before it trains or saves placeholders."""
    with pytest.raises(
        RuntimeError, match="cannot be copied without its model, as modules_to_save of PEFT does"
    ):
        adapted(opened("llama", tmp_path), target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    with pytest.raises(ValueError, match=r"Target module OutputSide\(.*\) is not supported"):
        adapted(opened("llama", tmp_path), target_modules=["lm_head"])
    tuned = peft.get_peft_model(opened("llama", tmp_path), peft.LoraConfig(target_modules=["embed_tokens"]))
    for safe_merge in (False, True):
        with pytest.raises(RuntimeError, match="no rows that an adapter can read or change: keep a LoRA"):
            tuned.merge_and_unload(safe_merge=safe_merge)
    for target in ("q_proj", "embed_tokens"):
        settings = peft.LoraConfig(target_modules=[target], trainable_token_indices=[1, 2])
        with pytest.raises((RuntimeError, ValueError), match="use LoRA on the input layer|trainable_token"):
            peft.get_peft_model(opened("llama", tmp_path), settings)
