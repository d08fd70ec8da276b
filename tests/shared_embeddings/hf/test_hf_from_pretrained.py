"""Compressed folders are read by ``from_pretrained`` and ``pipeline`` of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import shared_embeddings as se  # noqa: E402
from shared_embeddings import hf  # noqa: E402
from shared_embeddings.hf.sides import InputSide  # noqa: E402
from tests.helpers import (
    check_each,
    example,  # noqa: E402
)
from tests.shared_embeddings.hf.models import DIM, IDS, KINDS, WORDS, scores, shrink  # noqa: E402

AUTO = {
    "ForCausalLM": transformers.AutoModelForCausalLM,
    "LMHeadModel": transformers.AutoModelForCausalLM,
    "ForMaskedLM": transformers.AutoModelForMaskedLM,
    "ForConditionalGeneration": transformers.AutoModelForSeq2SeqLM,
    "MTModel": transformers.AutoModelForSeq2SeqLM,
}


def auto_class(kind: str) -> Any:
    """The class of transformers that chooses the class of a model."""
    name = KINDS[kind][0]
    return next(chosen for ending, chosen in AUTO.items() if name.endswith(ending))


def hidden(model: Any) -> torch.Tensor:
    """The last hidden states of a model without an output layer."""
    inputs = {"input_ids": IDS, **({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {})}
    with torch.no_grad():
        found: torch.Tensor = model(**inputs).last_hidden_state
    return found


@pytest.mark.slow_except("int8")
@pytest.mark.parametrize("store", ["fp32", "int8"])
def test_every_family(tmp_path: Path, store: str) -> None:
    """With and without its output layer; what it saves is read again."""
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
        assert not any(name.startswith("shared_embeddings.output.") for name in names), kind
        assert torch.equal(hidden(transformers.AutoModel.from_pretrained(base)), hidden(body)), kind


@pytest.mark.slow_except("int8")
@pytest.mark.parametrize("store", ["fp32", "int8", "int4"])
def test_every_method(tmp_path: Path, store: str) -> None:
    """In both dtypes; what it saves is read again."""

    def check(method: str) -> None:
        options = example(method, WORDS, DIM)
        emb = se.build(method, num_embeddings=WORDS, embedding_dim=DIM, **options)
        if not emb.has_linear_scores or emb.score_dim != DIM:
            return  # compress does not put it into these models
        small, again = tmp_path / method, tmp_path / f"{method}_again"
        wanted = scores(shrink("qwen2", small, store, method, **options))
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(small)
        if store == "fp32":
            torch.testing.assert_close(scores(model), wanted)
        model.save_pretrained(again)
        assert torch.equal(scores(load(again)), scores(model))
        assert scores(load(small, dtype=torch.bfloat16)).dtype == torch.bfloat16
        checked.append(method)

    checked: list[str] = []
    check_each(check, se.methods())
    assert len(checked) > 6


def test_layers_on_the_disk(tmp_path: Path) -> None:
    for kind in ("llama", "qwen2"):
        small = tmp_path / kind
        shrink(kind, small, "int8")
        load = transformers.AutoModelForCausalLM.from_pretrained
        parts = {
            "model.embed_tokens": "cpu",
            "model.norm": "cpu",
            "model.rotary_emb": "cpu",
            "lm_head": "cpu",
        }
        settings = {"offload_folder": str(tmp_path / "offload")}
        offloaded = load(small, device_map={**parts, "model.layers": "disk"}, **settings)
        assert torch.equal(scores(offloaded), scores(load(small)))
        with pytest.raises(ValueError, match="'shared_embeddings' cannot be on 'disk'; name a device"):
            load(
                small, device_map={"model": "cpu", "lm_head": "cpu", "shared_embeddings": "disk"}, **settings
            )


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
def test_the_dtype(tmp_path: Path, store: str) -> None:
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
