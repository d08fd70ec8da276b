"""What people do with models of transformers works with compressed ones; LoRA of PEFT on top of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from shared_embeddings.quant.packed_tensor import PackedTensor
from tests.shared_embeddings.hf.models import IDS, KINDS, add_tokenizer, scores, shrink
from tests.shared_embeddings.hf.test_hf_from_pretrained import auto_class

STORES = ("fp32", "int8")
SPEAKING = [kind for kind in KINDS if auto_class(kind) is not transformers.AutoModelForMaskedLM]


def opened(kind: str, folder: Path, store: str = "fp32") -> Any:
    """A small model of a kind, as ``from_pretrained`` reads it."""
    small = folder / f"{kind}_{store}"
    if not small.exists():
        shrink(kind, small, store)
    return auto_class(kind).from_pretrained(small)


GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 20},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
}


def output_of(model: Any, **how: Any) -> Tensor:
    """What a model says after some ids."""
    torch.manual_seed(4)
    given = {"attention_mask": torch.ones(1, 3), "max_new_tokens": 5, "pad_token_id": 0, **how}
    found: Tensor = model.generate(IDS[:1, :3], **given)
    return found


@pytest.mark.slow_except("marian")
@pytest.mark.parametrize("kind", SPEAKING)
def test_generation(tmp_path: Path, kind: str) -> None:
    for store in STORES:
        model, again = opened(kind, tmp_path, store), opened(kind, tmp_path, store)
        for name, how in GENERATION.items():
            if not (name == "prompt lookup" and model.config.is_encoder_decoder):
                assert torch.equal(output_of(model, **how), output_of(again, **how)), name
        # An assistant changes the speed, not the output.
        if not model.config.is_encoder_decoder:
            assert torch.equal(output_of(model, assistant_model=again), output_of(model))


def test_pipelines(tmp_path: Path) -> None:
    for kind in ("llama", "bert"):
        shrink(kind, tmp_path / kind)
        add_tokenizer(tmp_path / kind)
    message = transformers.pipeline("text-generation", model=str(tmp_path / "llama"))
    assert message("w5 w9", max_new_tokens=3, do_sample=False)[0]["generated_text"].startswith("w5 w9")
    vectors = transformers.pipeline("feature-extraction", model=str(tmp_path / "bert"))
    assert len(vectors("w5 w9 w3")[0]) == 3


def arguments(folder: Path) -> Any:
    """Settings of Trainer for four steps with a checkpoint after two."""
    return transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        seed=1,
        disable_tqdm=True,
        gradient_checkpointing=True,
    )


@pytest.mark.slow_except("gemma")
@pytest.mark.parametrize("kind", ["gemma", "bert", "t5_untied", "marian"])
def test_trainer_resumes(tmp_path: Path, kind: str) -> None:
    """To the same weights, with gradient checkpointing; packed embeddings are unchanged."""
    rows = [{"input_ids": ids, "labels": ids} for ids in IDS] * 4
    for store in ("fp32", "int4"):
        whole, model = opened(kind, tmp_path, store), opened(kind, tmp_path, store)
        before = {name: part.detach().clone() for name, part in model.named_parameters()}
        run = tmp_path / f"run_{store}"
        given = {"args": arguments(run), "train_dataset": rows}
        transformers.Trainer(model=whole, **given).train()
        transformers.Trainer(model=model, **given).train(resume_from_checkpoint=str(run / "checkpoint-2"))
        assert torch.equal(scores(model), scores(whole))
        for name, part in model.named_parameters():
            if name.startswith("shared_embeddings."):
                is_packed = isinstance(part, PackedTensor)
                assert is_packed == (store == "int4" and before[name].numel() >= 256)
                assert is_packed == bool((part == before[name]).all())
        again = auto_class(kind).from_pretrained(run / "checkpoint-4")
        assert torch.equal(scores(again), scores(model))


def test_packed_embeddings_become_trainable(tmp_path: Path) -> None:
    model = opened("llama", tmp_path, "int8")
    before = scores(model)
    assert not all(part.requires_grad for part in model.shared_embeddings.parameters())
    model.dequantize()
    assert all(part.requires_grad for part in model.shared_embeddings.parameters())
    torch.testing.assert_close(scores(model), before)
    model.save_pretrained(tmp_path / "plain")
    torch.testing.assert_close(
        scores(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "plain")), before
    )


def test_copies(tmp_path: Path) -> None:
    """A model is copied with its embeddings; a layer of it is not, as PEFT's modules_to_save would."""
    for store in STORES:
        model = opened("gemma", tmp_path, store)
        copied = copy.deepcopy(model)
        assert torch.equal(scores(copied), scores(model))
        assert copied.get_input_embeddings().embedding is copied.shared_embeddings["words"]
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            with pytest.raises(RuntimeError, match="cannot be copied without its model, as modules_to_save"):
                copy.deepcopy(layer)


@pytest.mark.slow
def test_compilation(tmp_path: Path) -> None:
    for store in STORES:
        model = opened("gemma", tmp_path, store)
        compiled = torch.compile(model, backend="aot_eager")
        with torch.no_grad():
            found = compiled(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
        torch.testing.assert_close(found, scores(model))


TARGETS: dict[str, Any] = {
    "attention": ["q_proj", "v_proj"],
    "all": "all-linear",
    "input": ["embed_tokens"],
    "output": ["lm_head"],
    "both": ["embed_tokens", "lm_head"],
}


def adapted(model: Any, **settings: Any) -> Any:
    """A model with LoRA, after two steps."""
    task = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    tuned = peft.get_peft_model(model, peft.LoraConfig(task_type=task, r=2, **settings))
    trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, 1.0)
    # RWKV changes weights in place unless it is in training.
    tuned.train(model.config.model_type == "rwkv")
    for _ in range(2):
        optimizer.zero_grad()
        tuned(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    return tuned.eval()


@pytest.mark.slow_except("input", "output")
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
            if target in ("attention", "all"):
                torch.testing.assert_close(scores(tuned.merge_and_unload()), scores(again), atol=1e-4, rtol=0)


# PEFT chooses the layers of RWKV by names such as "output". Of the others, the plain models, too, take
# contiguous labels only.
ADAPTED = {
    "RwkvForCausalLM": None,
    "PegasusForConditionalGeneration": "all-linear",
    "M2M100ForConditionalGeneration": "all-linear",
    "LEDForConditionalGeneration": "all-linear",
    "T5GemmaForConditionalGeneration": "all-linear",
    "marian": "all-linear",
    "marian_two_vocabularies": ["embed_tokens", "lm_head"],
}


@pytest.mark.slow_except("RwkvForCausalLM", "marian")
@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_of_families(tmp_path: Path, kind: str) -> None:
    """LoRA on layers that PEFT chooses, with three kinds of tables."""
    kinds = {"projective": {}, "standard": {"store": "int8"}, "quantized": {"store": "fp16", "bits": 4}}
    for method, options in kinds.items():
        small, adapter = tmp_path / method, tmp_path / f"{method}_adapter"
        shrink(kind, small, method=method, **options)
        model, again = (auto_class(kind).from_pretrained(small) for _ in range(2))
        before = scores(model)
        tuned = adapted(model, target_modules=ADAPTED[kind])
        assert not torch.allclose(scores(tuned), before), method
        tuned.save_pretrained(adapter)
        torch.testing.assert_close(scores(peft.PeftModel.from_pretrained(again, adapter)), scores(tuned))


def test_unsupported_adapters(tmp_path: Path) -> None:
    """Each fails before it trains or saves placeholders."""
    with pytest.raises(
        RuntimeError, match="cannot be copied without its model, as modules_to_save of PEFT does"
    ):
        adapted(opened("llama", tmp_path), target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    for target in ("embed_tokens", "lm_head"):
        tuned = peft.get_peft_model(opened("llama", tmp_path), peft.LoraConfig(target_modules=[target]))
        for safe_merge in (False, True):
            with pytest.raises(RuntimeError, match="no rows that an adapter can read or change"):
                tuned.merge_and_unload(safe_merge=safe_merge)
    for target, settings in (
        ("embed_tokens", {"use_dora": True}),
        ("lm_head", {"use_dora": True}),
        ("lm_head", {"init_lora_weights": "pissa"}),
        ("lm_head", {"init_lora_weights": "olora"}),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            with pytest.raises(RuntimeError, match="no rows that an adapter can read or change"):
                adapted(opened("llama", tmp_path).to(dtype), target_modules=[target], **settings)
    for target in ("q_proj", "embed_tokens"):
        config = peft.LoraConfig(target_modules=[target], trainable_token_indices=[1, 2])
        with pytest.raises((RuntimeError, ValueError), match="trainable_token"):
            peft.get_peft_model(opened("llama", tmp_path), config)
