"""Encoders of sentences, in the layouts of sentence-transformers, by an independent pooling of batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared_embeddings import hf
from shared_embeddings.compress.calibration import calibrate
from shared_embeddings.compress.measure import SHARPNESS, sampled_lines
from shared_embeddings.hf.adapter import FolderModel
from tests.helpers import main
from tests.shared_embeddings.hf.models import DIM, KINDS, compress, sentences, trim, unigram, wordpiece

_DECODER = KINDS["qwen2"][1]
_LAST = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
# Name -> the class of the model, the one that config.json names, settings, the one that reads a folder,
# of the pooling, (width, activation, bias) of dense layers, and prompts.
LAYOUTS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "model": "Qwen3Model",
        "named": "Qwen3ForCausalLM",
        "pooling": _LAST,
        "prompts": {"prompts": {"query": "Mi re:", "document": ""}, "default_prompt_name": None},
    },
    "gte": {"model": "MistralForCausalLM", "read": "MistralModel", "pooling": _LAST, "tied": False},
    "e5_mistral": {"model": "MistralModel", "pooling": _LAST, "prompts": {"prompts": {"query": "Mi re:"}}},
    "embedding_gemma": {
        "model": "Gemma3TextModel",
        "settings": {"use_bidirectional_attention": True, "sliding_window": 8},
        "pooling": {"pooling_mode_mean_tokens": True},
        "dense": [(24, "torch.nn.modules.linear.Identity", False)] * 2,
        "prompts": {"prompts": {"query": "Mi re:", "document": "Ka to lon: "}, "default_prompt_name": None},
    },
    "sgpt": {
        "model": "GPT2LMHeadModel",
        "read": "GPT2Model",
        "pooling": {"pooling_mode_weightedmean_tokens": True, "pooling_mode_max_tokens": True},
    },
    "bert": {
        "model": "BertModel",
        "pooling": {"pooling_mode": "cls"},
        "dense": [(12, "torch.nn.modules.activation.Tanh", True)],
        "prompts": {"prompts": {"text": "Ka to. "}, "default_prompt_name": "text"},
    },
    "masked": {"model": "BertForMaskedLM", "pooling": {"pooling_mode": ["mean", "mean_sqrt_len_tokens"]}},
    "instructor": {
        "model": "T5EncoderModel",
        "pooling": {"pooling_mode_mean_tokens": True, "include_prompt": False},
        "prompts": {"prompts": {"passage": "Ka to mi:"}},
    },
}


def write(layout: str, folder: Path) -> None:
    """A folder with a tiny random model, its tokenizer and its other layers."""
    parts = LAYOUTS[layout]
    torch.manual_seed(7)
    tokenizer = wordpiece() if "Bert" in parts["model"] else unigram()
    chosen = getattr(transformers, parts["model"])
    base = next(kind for kind in ("bert", "gpt2", "t5", "qwen2") if kind in f"{parts['model'].lower()} qwen2")
    settings = {**KINDS[base][1], "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    settings |= {"tie_word_embeddings": parts.get("tied", True), **parts.get("settings", {})}
    model = chosen(chosen.config_class(**settings)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [parts.get("named", parts["model"])]
    (folder / "config.json").write_text(json.dumps(config))
    package = "sentence_transformers.models"
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": DIM, **parts["pooling"]}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    width = DIM
    for number, (wanted, activation, has_bias) in enumerate(parts.get("dense", []), 2):
        place = folder / f"{number}_Dense"
        place.mkdir()
        about = {"in_features": width, "out_features": wanted, "bias": has_bias}
        (place / "config.json").write_text(json.dumps({**about, "activation_function": activation}))
        tensors = {"linear.weight": torch.randn(wanted, width)}
        if has_bias:
            tensors["linear.bias"] = torch.randn(wanted)
        save_file(tensors, place / "model.safetensors")
        modules.append((place.name, "Dense"))
        width = wanted
    modules.append((f"{len(modules)}_Normalize", "Normalize"))
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": number, "name": str(number), "path": path, "type": f"{package}.{kind}"}
                for number, (path, kind) in enumerate(modules)
            ]
        )
    )
    (folder / "config_sentence_transformers.json").write_text(json.dumps(parts.get("prompts", {})))


@torch.no_grad()
def encode(layout: str, folder: Path, lines: list[str], padding_side: str = "right") -> Tensor:
    """The normalized vectors of lines, read together with padding."""
    parts = LAYOUTS[layout]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side=padding_side)
    kind = transformers.T5EncoderModel if "T5" in parts["model"] else transformers.AutoModel
    model = kind.from_pretrained(folder).eval()
    prompts = {"embedding_gemma": "Ka to lon: ", "bert": "Ka to. ", "instructor": "Ka to mi:"}
    prompt = prompts.get(layout, "")
    batch = tokenizer([prompt + line for line in lines], padding=True, return_tensors="pt")
    states, mask = model(**batch).last_hidden_state, batch["attention_mask"].float()
    if layout == "instructor":
        mask[:, : len(tokenizer(prompt, add_special_tokens=False)["input_ids"])] = 0.0
    place = mask.cumsum(dim=1) * mask
    last = place.argmax(dim=1)
    rows = torch.arange(len(lines))
    mask, place = mask[..., None], place[..., None]
    mean = (states * mask).sum(dim=1) / mask.sum(dim=1)
    vectors = {
        "qwen3": states[rows, last],
        "gte": states[rows, last],
        "e5_mistral": states[rows, last],
        "embedding_gemma": mean,
        "instructor": mean,
        "sgpt": torch.cat(
            [
                states.masked_fill(mask == 0, -torch.inf).amax(dim=1),
                (states * place).sum(dim=1) / place.sum(dim=1),
            ],
            dim=1,
        ),
        "bert": states[:, 0],
        "masked": torch.cat([mean, (states * mask).sum(dim=1) / mask.sum(dim=1).sqrt()], dim=1),
    }[layout]
    for number, (_, activation, _) in enumerate(parts.get("dense", []), 2):
        layer = load_file(folder / f"{number}_Dense" / "model.safetensors")
        vectors = vectors @ layer["linear.weight"].T + layer.get("linear.bias", torch.zeros(()))
        vectors = vectors.tanh() if "Tanh" in activation else vectors
    return F.normalize(vectors, dim=1)


def cosines(folder: Path, text: Path) -> Tensor:
    """Those of the vectors of sampled lines, by the model that a folder has."""
    samples = FolderModel(folder).samples([text], 1, 300)
    with torch.no_grad():
        scores = torch.cat([batch.scores for batch in samples.batches()])
    return scores.fill_diagonal_(SHARPNESS) / SHARPNESS


@pytest.mark.slow_except("qwen3", "embedding_gemma", "bert")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_encoders_are_compared_by_their_own_vectors(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    """Before and after; as another kind of folder, and without being run."""
    model, small, plain = tmp_path / "model", tmp_path / "small", tmp_path / "plain"
    write(layout, model)
    lines = sampled_lines([text], 1)
    vectors = encode(layout, model, lines)
    torch.testing.assert_close(cosines(model, text), vectors @ vectors.T, atol=2e-5, rtol=0)
    if layout not in ("bert", "instructor", "masked"):  # have absolute positions, or a prompt to cut
        left = encode(layout, model, lines, "left") if layout != "sgpt" else vectors
        torch.testing.assert_close(left, vectors, atol=1e-4, rtol=0)
    asked = ["--bits", 4, "--text", text]
    assert compress(model, "quantized", small, *asked) == 0
    printed = capsys.readouterr().out
    assert (
        "nearest neighbors of " in printed and "by pooling " in printed and "cannot be probed" not in printed
    )
    after = encode(layout, small, lines)
    torch.testing.assert_close(cosines(small, text), after @ after.T, atol=2e-5, rtol=0)
    assert 1e-4 < float((after - vectors).abs().max()) < 0.9
    assert type(hf.load(small)).__name__ == LAYOUTS[layout].get("read", LAYOUTS[layout]["model"])
    assert main([*map(str, ["export", "--model", small, "--format", "dense", "--output", plain])]) == 0
    torch.testing.assert_close(encode(layout, plain, lines), after, atol=1e-5, rtol=0)
    unread = tmp_path / "unread"
    assert compress(model, "projective", unread, "--rank", DIM, "--no-check") == 0
    torch.testing.assert_close(encode(layout, unread, lines), vectors, atol=1e-3, rtol=0)


@pytest.mark.slow_except("embedding_gemma")
@pytest.mark.parametrize("layout", ["qwen3", "gte", "embedding_gemma", "bert"])
def test_trimmed_encoders_keep_the_tokens_of_their_prompts(tmp_path: Path, layout: str) -> None:
    model, trimmed, text = tmp_path / "model", tmp_path / "trimmed", tmp_path / "text"
    write(layout, model)
    lines = sentences(20, 1)
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert trim("--model", model, "--text", text, "--output", trimmed) == 0
    old, new = encode(layout, model, lines), encode(layout, trimmed, lines)
    torch.testing.assert_close(old, new, atol=1e-5, rtol=0)
    prompts = json.loads((model / "config_sentence_transformers.json").read_text()).get("prompts", {})
    tokenizers = [transformers.AutoTokenizer.from_pretrained(folder) for folder in (model, trimmed)]
    for prompt in prompts.values():
        before, after = (tokenizer.tokenize(prompt) for tokenizer in tokenizers)
        assert before == after
    assert len(tokenizers[1]) < len(tokenizers[0])


def _keep_rows(folder: Path, number: int) -> None:
    """The first rows of a dense layer, and zeros."""
    weight = load_file(folder / "model.safetensors")["linear.weight"]
    weight[number:] = 0.0
    save_file({"linear.weight": weight}, folder / "model.safetensors")


def test_gradients_pass_the_layers_of_sentences(tmp_path: Path, text: Path) -> None:
    """The metric without the second dense layer, or with another pooling, is another one."""
    metrics = []
    for change in ("", "dense", "pooling"):
        model = tmp_path / f"model{change}"
        write("embedding_gemma", model)
        if change == "dense":
            _keep_rows(model / "3_Dense", 4)
        elif change == "pooling":
            (model / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
        read = FolderModel(model)
        metric = calibrate(read, read.tables(), [text], 1, progress=False)["words"].metric
        assert bool(metric.isfinite().all()) and float(metric.trace()) > 0
        metrics.append(metric / metric.trace())
    assert all(float((metrics[0] - other).norm()) > 0.02 for other in metrics[1:])


def test_calibrated_codes_keep_more_of_the_vectors(tmp_path: Path, text: Path) -> None:
    """Dense layers that read four directions make the errors of others count less."""
    model = tmp_path / "model"
    write("embedding_gemma", model)
    _keep_rows(model / "2_Dense", 4)
    lines = sentences(60, 5)
    text.write_text("\n".join(sentences(200, 4)) + "\n", encoding="utf-8")
    vectors = encode("embedding_gemma", model, lines)
    errors = []
    for calibration in ([], ["--calibration", "none"]):
        asked = ["--bits", 3, "--text", text, *calibration, "--force"]
        assert compress(model, "quantized", tmp_path / "small", *asked) == 0
        after = encode("embedding_gemma", tmp_path / "small", lines)
        errors.append(1.0 - float((after * vectors).sum(dim=1).mean()))
    assert errors[0] < 0.95 * errors[1]


@pytest.mark.slow
def test_the_notebook_runs_with_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a tiny encoder instead of the model that it downloads."""
    notebook = Path(__file__).parents[3] / "docs" / "notebooks" / "shrink_a_model.ipynb"
    write("e5_mistral", tmp_path / "model")
    monkeypatch.setenv("MODEL", str(tmp_path / "model"))
    monkeypatch.chdir(notebook.parent)
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    exec(compile(code, str(notebook), "exec"), {})
    assert "of the paragraphs keep their nearest one" in capsys.readouterr().out
