"""Compressed folders in ``from_pretrained``, with ``trust_remote_code``, in training, and with LoRA."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import shared_embeddings as se
from shared_embeddings import hf
from shared_embeddings.hf.word_layers import InputSide
from shared_embeddings.quant.codec import codecs
from shared_embeddings.quant.decoder import decoded_table
from shared_embeddings.quant.packed_tensor import PackedTensor
from tests.helpers import example
from tests.shared_embeddings.hf.models import DIM, FAMILIES, IDS, KINDS, WORDS, add_tokenizer, scores, shrink

AUTO = {
    "ForCausalLM": transformers.AutoModelForCausalLM,
    "LMHeadModel": transformers.AutoModelForCausalLM,
    "ForMaskedLM": transformers.AutoModelForMaskedLM,
    "ForConditionalGeneration": transformers.AutoModelForSeq2SeqLM,
    "MTModel": transformers.AutoModelForSeq2SeqLM,
}


def auto_class(kind: str) -> Any:
    """The class of transformers that chooses the class of a model."""
    name = KINDS[kind][0] if kind in KINDS else kind
    return next(chosen for ending, chosen in AUTO.items() if name.endswith(ending))


def hidden(model: Any) -> torch.Tensor:
    """The last hidden states of a model without an output layer."""
    inputs = {"input_ids": IDS, **({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {})}
    with torch.no_grad():
        states: torch.Tensor = model(**inputs).last_hidden_state
    return states


@pytest.mark.slow_except("int8")
@pytest.mark.parametrize("store", ["fp32", "int8"])
def test_every_family(tmp_path: Path, store: str) -> None:
    """With and without its output layer, and after saving and loading."""
    for kind in KINDS:
        small, again, base = (tmp_path / f"{kind}_{name}" for name in ("small", "again", "base"))
        shrink(kind, small, store)
        wanted = hf.load(small)
        model, info = auto_class(kind).from_pretrained(small, output_loading_info=True)
        assert type(model) is type(wanted) and not any(info.values()), kind
        assert torch.equal(scores(model), scores(wanted)), kind
        model.save_pretrained(again, max_shard_size="10KB")
        assert len(list(again.glob("*.safetensors"))) > 1
        model, info = auto_class(kind).from_pretrained(again, output_loading_info=True)
        assert not any(info.values()) and torch.equal(scores(model), scores(wanted)), kind
        body = transformers.AutoModel.from_pretrained(small)
        assert isinstance(body.get_input_embeddings(), InputSide), kind
        body.save_pretrained(base)
        names = load_file(base / "model.safetensors").keys()
        assert not any(name.startswith("shared_embeddings.output_words.") for name in names), kind
        assert torch.equal(hidden(transformers.AutoModel.from_pretrained(base)), hidden(body)), kind


def goes_into_models(method: str) -> bool:
    """Whether `compress` puts a method into the models of these tests."""
    emb = se.build(method, num_embeddings=WORDS, embedding_dim=DIM, **example(method, WORDS, DIM))
    return emb.has_linear_scores and emb.score_dim == DIM


@pytest.mark.slow_except("int8-*")
@pytest.mark.parametrize("method", [name for name in se.methods() if goes_into_models(name)])
@pytest.mark.parametrize("store", ["fp32", "int8"])
def test_every_method(tmp_path: Path, store: str, method: str) -> None:
    """In both dtypes, and after saving and loading."""
    small, again = tmp_path / "small", tmp_path / "again"
    wanted = scores(shrink("qwen2", small, store, method, **example(method, WORDS, DIM)))
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(small)
    if store == "fp32":
        torch.testing.assert_close(scores(model), wanted)
    model.save_pretrained(again)
    assert torch.equal(scores(load(again)), scores(model))
    assert scores(load(small, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_disk_offload(tmp_path: Path, kind: str) -> None:
    small, settings = tmp_path / "small", {"offload_folder": str(tmp_path / "offload")}
    shrink(kind, small, "int8")
    load = transformers.AutoModelForCausalLM.from_pretrained
    parts = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    offloaded = load(small, device_map={**parts, "model.layers": "disk"}, **settings)
    assert torch.equal(scores(offloaded), scores(load(small)))
    with pytest.raises(ValueError, match="'shared_embeddings' cannot be on 'disk'; name a device"):
        load(small, device_map={"model": "cpu", "lm_head": "cpu", "shared_embeddings": "disk"}, **settings)


@pytest.mark.slow_except("gemma4-*")
@pytest.mark.parametrize(
    ("kind", "mapped", "others"),
    [
        ("gemma4", {"per_layer_words"}, {"words"}),
        ("BltForCausalLM", {"input_words", "ngrams"}, {"output_words"}),
        ("Qwen4ExpForCausalLM", {"input_words", "ngrams_0", "ngrams_1"}, {"output_words"}),
    ],
)
def test_tables_for_input_only_stay_on_the_disk(
    tmp_path: Path, kind: str, mapped: set[str], others: set[str]
) -> None:
    """Also when the model is saved where it was loaded from."""
    shrink(kind, tmp_path / "small", method="quantized", bits=4.0)
    model = auto_class(kind).from_pretrained(tmp_path / "small")
    wanted = scores(model)
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if line.endswith("model.safetensors")]
    is_mapped = {
        name: any(int(start, 16) <= codes.data_ptr() < int(end, 16) for start, end in ranges)
        for name, embedding in model.shared_embeddings.items()
        for buffer, codes in embedding.named_buffers()
        if buffer.startswith("streams")
    }
    assert is_mapped == dict.fromkeys(mapped, True) | dict.fromkeys(others, False)
    model.save_pretrained(tmp_path / "small")
    assert torch.equal(scores(model), wanted)
    assert torch.equal(scores(auto_class(kind).from_pretrained(tmp_path / "small")), wanted)


def test_other_tasks(tmp_path: Path) -> None:
    small = tmp_path / "small"
    shrink("bert", small)
    classifier, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        small, output_loading_info=True
    )
    assert all(name.startswith(("classifier.", "bert.pooler.")) for name in info["missing_keys"])
    assert isinstance(classifier.get_input_embeddings(), InputSide)
    base = transformers.AutoModel.from_pretrained(small)
    base.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="layer for words of BertForMaskedLM; load the class"):
        transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "base")


@pytest.mark.parametrize("store", ["fp32", "int8"])
def test_dtype(tmp_path: Path, store: str) -> None:
    small = tmp_path / "small"
    shrink("llama", small, store)
    load = transformers.AutoModelForCausalLM.from_pretrained
    whole = load(small)
    for model in (
        load(small, dtype=torch.bfloat16),
        hf.load(small, dtype="bfloat16"),
        hf.load(small, torch_dtype=torch.bfloat16),
        load(small).bfloat16(),
        load(small, dtype=torch.bfloat16, device_map="auto"),
        load(small, device_map={"": "cpu"}).to(torch.bfloat16),
        load(small, device_map={"model": "cpu", "lm_head": "cpu"}).to(torch.bfloat16),
    ):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        torch.testing.assert_close(scores(model).float(), scores(whole), atol=0.03, rtol=0)
    halved = load(small).half()
    halved.save_pretrained(tmp_path / "half")
    assert load(tmp_path / "half").dtype == hf.load(tmp_path / "half").dtype == torch.float16
    assert load(small, ignore_mismatched_sizes=True).dtype == torch.float32


# Kind of model, storage, method and options.
FOLDERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "low_rank": ("llama", "int8", "projective", {"rank": 6}),
    "int8": ("gpt2", "int8", "standard", {}),
    "uniform": ("gemma3", "fp16", "quantized", {"bits": 4, "codec": "uniform", "group_size": 5}),
    "uniform_1bit": ("bert", "fp16", "quantized", {"bits": 1, "codec": "uniform"}),
    "spectral": ("qwen2", "fp16", "quantized", {"bits": 3, "codec": "spectral"}),
    "trellis": ("marian", "fp16", "quantized", {"bits": 2.5}),
    "trellis_5bits": ("bart", "int8", "quantized", {"bits": 5}),
    "two_tables": ("t5_untied", "fp16", "quantized", {"bits": 1.5}),
    "other_names": ("gpt_neox", "fp16", "quantized", {"bits": 4}),
    "shards": ("Qwen4ExpForCausalLM", "fp16", "quantized", {"bits": 4}),
}

# Loads a folder, saves it, loads the plain model, and writes the scores of both.
PROGRAM = """
import json, sys, torch, transformers
from pathlib import Path
found = {}
for folder, auto, ids in json.loads(sys.argv[1]):
    ids = torch.tensor(ids)
    scores = []
    for name, trusted in ((folder, True), (folder + "_saved", False)):
        model, info = getattr(transformers, auto).from_pretrained(
            name, trust_remote_code=trusted, output_loading_info=True
        )
        assert not any(info.values()), (folder, info)
        given = {"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}
        with torch.no_grad():
            scores.append(model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits)
        if trusted:
            model.save_pretrained(folder + "_saved")
    found[folder] = scores
assert "shared_embeddings" not in sys.modules
torch.save(found, sys.argv[2])
"""


def run_without_the_library(folder: Path, program: str, *arguments: str) -> str:
    """What a program prints that loads models with code of their folders."""
    environment = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", program, *arguments]
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


FAMILY = ("fp16", "quantized", {"bits": 4, "codec": "uniform"})
WITHOUT_LIBRARY = {"codecs": FOLDERS, "families": {kind: (kind, *FAMILY) for kind in (*KINDS, *FAMILIES)}}


@pytest.mark.slow_except("codecs")
@pytest.mark.parametrize("folders", WITHOUT_LIBRARY.values(), ids=WITHOUT_LIBRARY)
def test_without_the_library(
    tmp_path: Path, folders: Mapping[str, tuple[str, str, str, dict[str, Any]]]
) -> None:
    """The scores equal those with the library; saving writes a plain model."""
    requests = []
    for name, (kind, store, method, options) in folders.items():
        shrink(kind, tmp_path / name, store, method, **options)
        requests.append((str(tmp_path / name), auto_class(kind).__name__, IDS.tolist()))
    run_without_the_library(tmp_path, PROGRAM, json.dumps(requests), str(tmp_path / "scores.pt"))
    results = torch.load(tmp_path / "scores.pt")
    for name in folders:
        for again in results[str(tmp_path / name)]:
            torch.testing.assert_close(again, scores(hf.load(tmp_path / name)), rtol=1e-4, atol=1e-4)


def test_missing_tensors_without_the_library(tmp_path: Path) -> None:
    """They are not filled with random numbers, as transformers does."""
    program = """
import sys, transformers
try:
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
except ValueError as error:
    print(error)
transformers.AutoModelForSequenceClassification.from_pretrained(sys.argv[1], trust_remote_code=True)
"""
    small = tmp_path / "small"
    shrink("gpt_neox", small)
    state = load_file(small / "model.safetensors")
    del state["embed_out.weight"]
    save_file(state, small / "model.safetensors", {"format": "pt"})
    printed = run_without_the_library(tmp_path, program, str(small))
    assert "GPTNeoXForCausalLM: the folder has no lm_head.weight" in printed


# Codec, width of rows, bits, and a width that some words have: words of several widths, some with none or
# half a bit, and directions of several widths.
DECODED = [
    *(
        (name, DIM, bits, None)
        for name, codec in codecs().items()
        for bits in (1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0)
        if bits <= max(codec.rates)
    ),
    ("spectral", DIM, 1.3, 0),
    ("trellis", 44, 0.6, 9),
    ("spectral", 36, 0.6, 10),
]


@pytest.mark.parametrize(("codec", "dim", "bits", "narrowest"), DECODED)
def test_codecs_without_the_library(codec: str, dim: int, bits: float, narrowest: int | None) -> None:
    scales = torch.linspace(3.0, 0.1, dim) * torch.linspace(4.0, 0.1, WORDS).unsqueeze(1)
    embedding, _ = se.fit("quantized", torch.randn(WORDS, dim) * scales + 0.1, codec=codec, bits=bits)
    options = embedding.stored_options()
    assert narrowest is None or 0 < options["words_per_width"][narrowest] < WORDS
    arrays = {name: tensor.numpy() for name, tensor in embedding.state_dict().items()}
    table = torch.from_numpy(decoded_table("quantized", WORDS, dim, options, arrays))
    torch.testing.assert_close(table, embedding.table(), rtol=1e-5, atol=1e-5)


def test_other_methods_have_no_remote_code(tmp_path: Path) -> None:
    shrink("gpt2", tmp_path / "small", method="funnel", rank=4)
    assert not list((tmp_path / "small").glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "small/config.json").read_text())


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
    settings = {"attention_mask": torch.ones(1, 3), "max_new_tokens": 5, "pad_token_id": 0, **how}
    output: Tensor = model.generate(IDS[:1, :3], **settings)
    return output


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
    for store in ("fp32", "int8"):
        whole, model = opened(kind, tmp_path, store), opened(kind, tmp_path, store)
        before = {name: part.detach().clone() for name, part in model.named_parameters()}
        run = tmp_path / f"run_{store}"
        options = {"args": arguments(run), "train_dataset": rows}
        transformers.Trainer(model=whole, **options).train()
        transformers.Trainer(model=model, **options).train(resume_from_checkpoint=str(run / "checkpoint-2"))
        assert torch.equal(scores(model), scores(whole))
        for name, part in model.named_parameters():
            if name.startswith("shared_embeddings."):
                is_packed = isinstance(part, PackedTensor)
                assert is_packed == (store == "int8" and before[name].numel() >= 256)
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


def test_torch_saves_and_loads_models_and_their_tensors(tmp_path: Path) -> None:
    """As training loops other than Trainer do."""
    for store in STORES:
        model, file = opened("gemma", tmp_path, store), tmp_path / f"{store}.pt"
        torch.save(model, file)
        assert torch.equal(scores(torch.load(file, weights_only=False)), scores(model))
        torch.save(model.state_dict(), file)
        other = copy.deepcopy(model)
        torch.nn.init.zeros_(other.model.norm.weight)
        other.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(scores(other), scores(model))


@pytest.mark.slow
def test_compilation(tmp_path: Path) -> None:
    for store in STORES:
        model = opened("gemma", tmp_path, store)
        compiled = torch.compile(model, backend="aot_eager")
        with torch.no_grad():
            logits = compiled(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
        torch.testing.assert_close(logits, scores(model))


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


ALL, BOTH = "all-linear", ["embed_tokens", "lm_head"]
# PEFT chooses the layers of RWKV by names such as "output". Of the last ones, the plain models, too, take
# contiguous labels only.
ADAPTED: list[tuple[str, Any]] = [
    *(
        (kind, targets)
        for kind in ("llama", "gemma", "bart")
        for targets in (["q_proj", "v_proj"], ALL, ["embed_tokens"], ["lm_head"], BOTH)
    ),
    ("RwkvForCausalLM", None),
    ("marian", ALL),
    ("marian_two_vocabularies", BOTH),
    *((f"{name}ForConditionalGeneration", ALL) for name in ("Pegasus", "M2M100", "LED", "T5Gemma")),
]
TABLES: dict[str, dict[str, Any]] = {
    "projective": {},
    "standard": {"store": "int8"},
    "quantized": {"store": "fp16", "bits": 4},
}


@pytest.mark.slow_except("llama-embed_tokens", "llama-lm_head", "RwkvForCausalLM-*", "marian-*")
@pytest.mark.parametrize(
    ("kind", "targets"), ADAPTED, ids=lambda val: val if isinstance(val, str) else "-".join(val or ["own"])
)
def test_adapters_round_trip(tmp_path: Path, kind: str, targets: Any) -> None:
    """LoRA on layers of the model, its tables or both, with three kinds of tables."""
    for method, options in TABLES.items():
        small, adapter = tmp_path / method, tmp_path / f"{method}_adapter"
        shrink(kind, small, method=method, **options)
        model, again = (auto_class(kind).from_pretrained(small) for _ in range(2))
        before = scores(model)
        tuned = adapted(model, target_modules=targets)
        assert not torch.allclose(scores(tuned), before), method
        tuned.save_pretrained(adapter)
        again = peft.PeftModel.from_pretrained(again, adapter)
        torch.testing.assert_close(scores(again), scores(tuned))
        if kind in KINDS and (targets == ALL or "q_proj" in targets):
            torch.testing.assert_close(scores(tuned.merge_and_unload()), scores(again), atol=1e-4, rtol=0)


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
