"""Trimming Hugging Face models: covered texts have the same tokens, kept tokens the same probabilities."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import models, pre_tokenizers, trainers

from shared_embeddings import hf
from shared_embeddings.compress.options import TrimOptions
from shared_embeddings.compress.report import Sizes
from shared_embeddings.compress.trim import trim as trim_model
from shared_embeddings.hf.folder import INDEX
from shared_embeddings.hf.trim import word_axes
from shared_embeddings.hf.word_layers import without_weights
from shared_embeddings.quant.storage import HEADER
from tests.helpers import main
from tests.shared_embeddings.hf.models import (
    FAMILIES,
    KINDS,
    TRIMMED,
    add_tokenizer,
    byte_level,
    compress,
    error_line,
    log_probabilities,
    make_model,
    output_of,
    save,
    sentences,
    trim,
    unigram,
)


def new_ids(output: Path) -> dict[int, int]:
    """The new id of every word that was kept."""
    lines = (output / "ids.tsv").read_text().splitlines()
    return {int(old): int(new) for old, new in (line.split("\t") for line in lines)}


@pytest.mark.slow_except("gpt2", "bert", "t5_untied")
@pytest.mark.parametrize("kind", TRIMMED)
def test_covered_texts(kind: str, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = save(tmp_path / "model", kind), tmp_path / "trimmed"
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    assert trim("--model", model, "--text", text, "--output", output) == 0
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before
    assert "100.00% of" in capsys.readouterr().out
    ids_after = new_ids(output)
    old_ids = list(ids_after)
    old, new = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (model, output))
    assert len(new) == len(ids_after) < 0.8 * len(old)
    assert [new.convert_ids_to_tokens(i) for i in range(len(new))] == old.convert_ids_to_tokens(old_ids)
    for line in [*sentences(30, 1), "\n".join(sentences(9, 1))]:
        ids = old(line)["input_ids"]
        assert new(line)["input_ids"] == [ids_after[token] for token in ids]
        assert new.decode(new(line)["input_ids"]) == old.decode(ids)
    ids = old(sentences(1, 1)[0])["input_ids"]
    expected = log_probabilities(model, kind, ids)[:, old_ids].log_softmax(dim=-1)
    logs = log_probabilities(output, kind, [ids_after[token] for token in ids])
    torch.testing.assert_close(logs, expected, rtol=0, atol=1e-5)
    config = json.loads((output / "config.json").read_text())
    was = json.loads((model / "config.json").read_text())
    assert config["vocab_size"] == len(new)
    for name in ("pad_token_id", "bos_token_id", "decoder_start_token_id", "forced_eos_token_id"):
        if was.get(name) is not None:
            assert config[name] == ids_after[was[name]]
    for name in ("pad", "bos", "eos", "unk", "mask", "sep"):
        if (id_before := getattr(old, f"{name}_token_id")) is not None:
            assert getattr(new, f"{name}_token_id") == ids_after[id_before]


def test_shards_counts_and_words_to_keep(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save(tmp_path / "model", "marian", max_shard_size="6KB")
    output, keep = tmp_path / "out", tmp_path / "keep"
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    unused = max(set(tokenizer.get_vocab()) - set(tokenizer.tokenize(text.read_text())) - {"<sep>"}, key=len)
    keep.write_text(f"{unused}\n", encoding="utf-8")
    asked = ["--min-count", 5, "--keep", keep]
    assert trim("--model", model, "--text", text, "--output", output, *asked) == 0
    printed = capsys.readouterr().out
    trimmed = transformers.AutoTokenizer.from_pretrained(output)
    assert unused in trimmed.get_vocab()
    shards = sorted(output.glob("*.safetensors"))
    assert len(shards) > 1 and not any("100.00% of" in line for line in printed.splitlines())
    written = [tensor for shard in shards for tensor in load_file(shard).values()]
    total = sum(tensor.nbytes for tensor in written)
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total and f"{total:,}  (" in printed
    # The bad words were the padding and a removed word.
    assert json.loads((output / "generation_config.json").read_text())["bad_words_ids"] == [[0]]
    loaded = transformers.MarianMTModel.from_pretrained(output)
    assert loaded.final_logits_bias.shape == (1, len(trimmed))


def test_user_errors(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output, empty = save(tmp_path / "model", "gpt2"), tmp_path / "out" / "trimmed", tmp_path / "empty"
    empty.write_text("")
    for written, options, reason in (
        (output, ["--text", empty], "has no word of the vocabulary 'tokens'"),
        (model, ["--text", text], "would replace an input"),
        (text / "trimmed", ["--text", text], "cannot be written"),
    ):
        assert reason in error_line(capsys, trim, "--model", model, "--output", written, *options)
    asked = ["--model", model, "--output", output, "--text", text]
    (model / "tokenizer.json").unlink()
    assert "cannot be loaded (there is no tokenizer.json; " in error_line(capsys, trim, *asked)
    assert not output.exists()


@pytest.mark.parametrize("name", ["RobertaForMaskedLM", "XGLMForCausalLM", "LlamaForCausalLM"])
def test_positions_relative_to_the_padding(name: str, tmp_path: Path, text: Path) -> None:
    """The padding id is kept only then."""
    words = [f"w{number}" for number in range(40)]
    words[10], words[11] = "<pad>", "<unk>"
    chosen = getattr(transformers, name)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "XGLMForCausalLM":
        sizes = {"d_model": 16, "ffn_dim": 24, "num_layers": 1, "attention_heads": 2}
    torch.manual_seed(2)
    config = chosen.config_class(vocab_size=40, pad_token_id=10, bos_token_id=11, eos_token_id=11, **sizes)
    model = chosen(config).eval()
    model.save_pretrained(tmp_path / "model")
    add_tokenizer(tmp_path / "model", words, pad_token="<pad>", unk_token="<unk>")
    text.write_text("w20 w31 w22\n")
    assert trim("--model", tmp_path / "model", "--text", text, "--output", tmp_path / "out") == 0
    new = new_ids(tmp_path / "out")
    assert len(new) < 20 and (new[10] == 10) == (name != "LlamaForCausalLM")
    logs = output_of(chosen.from_pretrained(tmp_path / "out").eval(), [new[word] for word in (20, 31, 22)])
    wanted = output_of(model, [20, 31, 22])[:, list(new)].log_softmax(dim=-1)
    torch.testing.assert_close(logs, wanted, rtol=0, atol=1e-5)


def test_second_vocabularies_fail() -> None:
    """Gemma 3n looks ids up in each layer, in tables of another size."""
    config = transformers.Gemma3nTextConfig(
        vocab_size=300, vocab_size_per_layer_input=280, hidden_size=16, intermediate_size=24
    )
    with pytest.raises(ValueError, match=r"a second vocabulary \(vocab_size_per_layer_input: 280\)"):
        word_axes(without_weights(transformers.Gemma3nForCausalLM, config))


@pytest.mark.parametrize(
    ("kind", "tables"), [("BltForCausalLM", "ngrams"), ("Qwen4ExpForCausalLM", "ngrams_0 and ngrams_1")]
)
def test_rows_that_are_not_words_fail(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], kind: str, tables: str
) -> None:
    """Other ids of tokens would have other hashes."""
    chosen = getattr(transformers, kind)
    config = chosen.config_class(**{**FAMILIES[kind], "vocab_size": 600})
    chosen(config).save_pretrained(tmp_path / "model")
    byte_level().save_pretrained(tmp_path / "model")
    asked = ["--model", tmp_path / "model", "--text", text, "--output", tmp_path / "out"]
    assert f"{kind}: looks up {tables} by hashes of the ids of tokens" in error_line(capsys, trim, *asked)
    assert not (tmp_path / "out").exists()


def test_models_with_submodels_fail(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = unigram()
    half = transformers.BertConfig(**{**KINDS["bert"][1], "vocab_size": len(tokenizer)})
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(half, half)
    transformers.EncoderDecoderModel(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    line = error_line(
        capsys, trim, "--model", tmp_path / "model", "--text", text, "--output", tmp_path / "out"
    )
    assert "is made of several models (encoder-decoder)" in line


UNKNOWN = "Kato 漢字 xyzzy!  zwei"


# The class of a tokenizer -> the lines with unknown characters that round-trip.
TOKENIZERS = {
    "GPT2Tokenizer": 1,
    "Qwen2Tokenizer": 1,
    "CLIPTokenizer": 0,
    "LlamaTokenizer": 1,
    "GemmaTokenizer": 1,
    "NllbTokenizer": 0,
    "T5Tokenizer": 0,
    "XLMRobertaTokenizer": 0,
    "BertTokenizer": 0,
}
# Special tokens of those that fall back to bytes.
FALLING_BACK = {"LlamaTokenizer": "<unk> <s> </s>", "GemmaTokenizer": "<pad> <eos> <bos> <unk> <mask>"}


def trained(kind: str) -> Any:
    """A tokenizer of a class for generated words."""
    chosen = getattr(transformers, kind)
    if kind not in FALLING_BACK:
        return chosen().train_new_from_iterator(sentences(300, 2), 600, show_progress=False)
    specials = [*FALLING_BACK[kind].split(), *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=specials, show_progress=False)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(sentences(300, 2), trainer)
    bpe = json.loads(tokenizer.to_str())["model"]
    return chosen(vocab=bpe["vocab"], merges=[tuple(merge) for merge in bpe["merges"]])


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizers(kind: str, tmp_path: Path, text: Path) -> None:
    tokenizer, unknown = trained(kind), TOKENIZERS[kind]
    model, other = tmp_path / "model", tmp_path / "other"
    make_model("llama", len(tokenizer)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    unseen = sentences(20, 5)
    other.write_text("\n".join([*unseen, UNKNOWN]) + "\n", encoding="utf-8")
    options = TrimOptions(model=model, text=(text,), held_out=(other,), output=tmp_path / "out")
    (vocabulary,) = trim_model(options).vocabularies
    lines = len(text.read_text(encoding="utf-8").splitlines())
    assert vocabulary.rows.after < vocabulary.rows.before
    assert [coverage.whole for coverage in vocabulary.texts][0] == lines
    assert vocabulary.texts[1].round_trips == Sizes(*[len(unseen) + unknown] * 2)
    before = transformers.AutoTokenizer.from_pretrained(model)
    after = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert type(after) is type(tokenizer)
    for line in text.read_text(encoding="utf-8").splitlines():
        assert after.tokenize(line) == before.tokenize(line)
    for line in unseen:
        assert after.decode(after(line)["input_ids"]) == before.decode(before(line)["input_ids"])


def test_trim_and_compress_in_one_step(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, output, report = save(tmp_path / "model", "gpt2"), tmp_path / "out", tmp_path / "report.json"
    (model / "README.md").write_text(
        "---\nlicense: mit\nbase_model: some/model\n---\n# Original\n\n## Data\n"
    )
    asked = ["compress", "--model", model, "--trim-to", text, "--method", "projective", "--rank", 4]
    writing = ["--output", output, "--report", report]
    assert main(list(map(str, [*asked, *writing]))) == 0
    printed = capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == sorted(["model", "out", "report.json", text.name])
    content = json.loads(report.read_text())
    sizes = content["trimmed"]["bytes_of_weights"]
    line = (
        f"bytes of weights: {sizes['before']:,} before, {sizes['after']:,} after trimming, "
        f"{content['bytes_of_weights']['after']:,} after compressing"
    )
    card = (output / "README.md").read_text()
    assert line in printed and line in card and "\nlicense: mit\n" in card
    assert [heading for heading in card.splitlines() if heading.startswith("#")] == [
        "# Word embeddings compressed with shared-embeddings",
        "## Quality",
        "## How it was compressed",
        "## How to load it",
        "## Earlier step: Vocabulary trimmed with shared-embeddings",
        "# Original",
        "## Data",
    ]
    assert "trimmed-vocabulary\n- compressed-embeddings\n" in card
    # With this library and without.
    assert card.count("from_pretrained") == 2 and card.count("[some/model](https://") == 1
    rows = len((output / "ids.tsv").read_text().splitlines())
    assert json.loads((output / "config.json").read_text())["vocab_size"] == rows
    assert content["model"] == str(model) and content["output"] == str(output)
    assert content["trimmed"]["vocabularies"][0]["map_file"] == str(output / "ids.tsv")
    assert str(tmp_path / ".out") not in printed + card + report.read_text()
    capsys.readouterr()
    assert main(list(map(str, [*asked, *writing]))) == 2
    assert "already exists; add --force" in capsys.readouterr().err
    assert main(list(map(str, [*asked, *writing, "--force"]))) == 0


def test_tokenizers_of_other_models(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save(tmp_path / "model", "gpt2")
    asked = ["--model", model, "--text", text, "--dry-run"]
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    whole = content["model"]["vocab"]
    content["model"] |= {"vocab": {word: whole[word] for word in list(whole)[:100]}, "merges": []}
    file.write_text(json.dumps(content))
    assert "belongs to another model" in error_line(capsys, trim, *asked)
    content["added_tokens"].append({**content["added_tokens"][0], "id": 10_000, "content": "<far>"})
    file.write_text(json.dumps(content))
    assert "token '<far>' has the id 10000, but the model has" in error_line(capsys, trim, *asked)
    assert compress(model, "standard", tmp_path / "small") == 2
    assert "belongs to another model" in capsys.readouterr().err


COMPRESSED: list[tuple[str, list[Any], str]] = [
    ("gpt2", ["projective", "--rank", 4], "1GB"),
    ("llama", ["projective", "--rank", 4], "6KB"),
    ("llama", ["projective", "--rank", 4, "--store", "int8"], "1GB"),
    ("marian", ["structured", "--num-groups", 4, "--num-clusters", 16, "--fit-steps", 5], "1GB"),
]


@pytest.mark.slow_except("gpt2-*", "*-6KB")
@pytest.mark.parametrize(("kind", "method", "shard"), COMPRESSED)
def test_compressed_models(kind: str, method: list[Any], shard: str, tmp_path: Path, text: Path) -> None:
    """Probabilities are those of the compressed model, over the kept words; also of a model in shards."""
    model, small, output = save(tmp_path / "model", kind), tmp_path / "small", tmp_path / "trimmed"
    assert compress(model, method[0], tmp_path / "one", *method[1:]) == 0
    old = hf.load(tmp_path / "one")
    old.save_pretrained(small, max_shard_size=shard)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.save_pretrained(small)
    assert trim("--model", small, "--text", text, "--output", output) == 0
    ids_after = new_ids(output)
    new = hf.load(output)
    ids = tokenizer(sentences(1, 1)[0])["input_ids"]
    expected = output_of(old, ids)[:, list(ids_after)].log_softmax(dim=-1)
    logs = output_of(new, [ids_after[token] for token in ids])
    torch.testing.assert_close(logs, expected, rtol=0, atol=1e-5)
    before, after = (
        {
            name: (file.name, tensor)
            for file in folder.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        for folder in (small, output)
    )
    assert before.keys() == after.keys()
    for name, (_, tensor) in after.items():
        if name != HEADER:
            assert tensor.dtype == before[name][1].dtype
    if shard == "6KB":
        where = json.loads((output / INDEX).read_text())["weight_map"]
        assert where == {name: file for name, (file, _) in after.items()} and len({*where.values()}) > 1
    assert {table.num_embeddings for table in new.shared_embeddings.values()} == {len(ids_after)}
    assert new.config.vocab_size == len(ids_after)
