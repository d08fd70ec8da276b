"""Trimming Hugging Face models: covered texts have the same tokens, kept tokens the same probabilities."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from shared_embeddings.hosts.hf.trim import check_ids, with_new_ids, word_axes  # noqa: E402
from shared_embeddings.hosts.hf.word_layers import without_weights  # noqa: E402
from tests.shared_embeddings.hf.trimming import (  # noqa: E402
    KINDS,
    SIZES,
    byte_level,
    error_line,
    log_probabilities,
    output_of,
    save,
    sentences,
    trim,
    unigram,
    wordpiece,
)


@pytest.mark.slow_except("gpt2", "bert", "t5")
@pytest.mark.parametrize("kind", KINDS)
def test_covered_texts(kind: str, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = save(tmp_path / "model", kind), tmp_path / "trimmed"
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    assert trim("--model", model, "--text", text, "--output", output) == 0
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before
    assert "100.00% of" in capsys.readouterr().out
    pairs = [map(int, line.split("\t")) for line in (output / "ids.tsv").read_text().splitlines()]
    new_ids = dict(pairs)
    old_ids = list(new_ids)
    old, new = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (model, output))
    assert len(new) == len(new_ids) < 0.8 * len(old)
    assert [new.convert_ids_to_tokens(i) for i in range(len(new))] == old.convert_ids_to_tokens(old_ids)
    for line in [*sentences(30, 1), "\n".join(sentences(9, 1))]:
        ids = old(line)["input_ids"]
        assert new(line)["input_ids"] == [new_ids[token] for token in ids]
        assert new.decode(new(line)["input_ids"]) == old.decode(ids)
    ids = old(sentences(1, 1)[0])["input_ids"]
    expected = log_probabilities(model, kind, ids)[:, old_ids].log_softmax(dim=-1)
    found = log_probabilities(output, kind, [new_ids[token] for token in ids])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    config = json.loads((output / "config.json").read_text())
    was = json.loads((model / "config.json").read_text())
    assert config["vocab_size"] == len(new)
    for name in ("pad_token_id", "bos_token_id", "decoder_start_token_id", "forced_eos_token_id"):
        if was.get(name) is not None:
            assert config[name] == new_ids[was[name]]
    for name in ("pad", "bos", "eos", "unk", "mask", "sep"):
        if getattr(old, f"{name}_token_id") is not None:
            assert getattr(new, f"{name}_token_id") == new_ids[getattr(old, f"{name}_token_id")]


@pytest.mark.parametrize("tokenizer", [byte_level, unigram, wordpiece])
def test_any_text_can_still_be_tokenized(tokenizer: Callable[[], Any], tmp_path: Path, text: Path) -> None:
    kind = {byte_level: "gpt2", unigram: "t5", wordpiece: "bert"}[tokenizer]
    model, output = save(tmp_path / "model", kind), tmp_path / "trimmed"
    assert trim("--model", model, "--text", text, "--output", output) == 0
    trimmed = transformers.AutoTokenizer.from_pretrained(output)
    strange = "Kato 漢字 xyzzy!"
    ids = trimmed(strange)["input_ids"]
    assert max(ids) < len(trimmed)
    if kind == "gpt2":
        assert trimmed.decode(ids, skip_special_tokens=True) == strange
    else:
        assert trimmed.unk_token_id in ids


def test_shards_counts_and_words_to_keep(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    model, output, keep = (
        save(tmp_path / "model", "marian", max_shard_size="6KB"),
        tmp_path / "out",
        tmp_path / "keep",
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    unused = max(set(tokenizer.get_vocab()) - set(tokenizer.tokenize(text.read_text())) - {"<sep>"}, key=len)
    keep.write_text(f"{unused}\n", encoding="utf-8")
    asked = ["--min-count", 5, "--keep", keep, "--keep-first", 7]
    assert trim("--model", model, "--text", text, "--output", output, *asked) == 0
    printed = capsys.readouterr().out
    trimmed = transformers.AutoTokenizer.from_pretrained(output)
    assert unused in trimmed.get_vocab()
    assert trimmed.convert_ids_to_tokens(range(7)) == tokenizer.convert_ids_to_tokens(range(7))
    shards = sorted(output.glob("*.safetensors"))
    assert len(shards) > 1 and not any("100.00% of" in line for line in printed.splitlines())
    written = [tensor for shard in shards for tensor in load_file(shard).values()]
    total = sum(tensor.nbytes for tensor in written)
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total and f"{total:,}  (" in printed
    # The bad words were the padding and a removed word.
    assert json.loads((output / "generation_config.json").read_text())["bad_words_ids"] == [[0]]
    found = transformers.MarianMTModel.from_pretrained(output)
    assert found.final_logits_bias.shape == (1, len(trimmed))


def test_user_errors(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, output, empty = save(tmp_path / "model", "gpt2"), tmp_path / "out" / "trimmed", tmp_path / "empty"
    empty.write_text("")
    asked = ["--model", model, "--output", output]
    assert "has no word of the vocabulary 'tokens'" in error_line(capsys, *asked, "--text", empty)
    assert "no such file" in error_line(capsys, *asked, "--text", tmp_path / "none")
    found = [*asked, "--text", text]
    assert "word to keep 'Kato to'" in error_line(
        capsys, *found, "--keep", _file(tmp_path / "words", "Kato to\n")
    )
    assert "would replace the file of --model" in error_line(
        capsys, "--model", model, "--output", model, "--text", text
    )
    assert "cannot be written" in error_line(
        capsys, "--model", model, "--output", text / "trimmed", "--text", text
    )
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", _full_disk)
        assert "No space left" in error_line(capsys, *found)
    assert not output.parent.exists() or list(output.parent.iterdir()) == []
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    assert "truncated" in error_line(capsys, *found)
    weights.rename(model / "pytorch_model.bin")
    assert "pytorch_model.bin is not loaded" in error_line(capsys, *found)
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace("{", '{"auto_map": {"AutoModel": "x.Y"},', 1))
    assert "needs code that comes with it" in error_line(capsys, *found)
    (model / "config.json").write_text(config)
    weights.write_bytes(content)
    (model / "tokenizer.json").unlink()
    assert "cannot be loaded (there is no tokenizer.json; " in error_line(capsys, *found)
    assert not output.exists()


def test_lists_of_ids() -> None:
    """Removed ids are dropped, and transformers rejects empty lists."""
    new_ids = {0: 0, 1: 1, 9: 3}
    settings = {
        "suppress_tokens": [9, 400],
        "begin_suppress_tokens": [400],
        "bad_words_ids": [[400], [9, 400]],
        "force_words_ids": [[1, 9]],
        "sequence_bias": [[[9, 1], -5.0], [[400], 3.0]],
        "forced_decoder_ids": [[1, 9], [2, 400]],
        "eos_token_id": [9, 400],
        "pad_index": 9,
        "temperature": 9,
    }
    check_ids("", settings)
    assert with_new_ids(settings, new_ids) == {
        "suppress_tokens": [3],
        "begin_suppress_tokens": None,
        "bad_words_ids": None,
        "force_words_ids": [[1, 3]],
        "sequence_bias": [[[3, 1], -5.0]],
        "forced_decoder_ids": [[1, 3], [2, None]],
        "eos_token_id": [3],
        "pad_index": 3,
        "temperature": 9,
    }
    assert with_new_ids({"sequence_bias": [[[400], 3.0]]}, new_ids) == {"sequence_bias": None}


@pytest.mark.parametrize(
    "wrong",
    [
        {"suppress_tokens": 5},
        {"suppress_tokens": [[1]]},
        {"eos_token_id": [[1]]},
        {"bad_words_ids": [1]},
        {"sequence_bias": [[1, 5.0]]},
        {"text_config": {"sequence_bias": {"1": 5.0}}},
        {"forced_decoder_ids": [1, 2]},
    ],
    ids=str,
)
def test_wrongly_nested_lists(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the file: .* expected .*; correct it"):
        check_ids("the file", wrong)


@pytest.mark.parametrize("name", ["RobertaForMaskedLM", "XGLMForCausalLM", "LlamaForCausalLM"])
def test_positions_relative_to_the_padding(name: str, tmp_path: Path, text: Path) -> None:
    """The padding id is kept only then."""
    words = [f"w{number}" for number in range(40)]
    words[10], words[11] = "<pad>", "<unk>"
    plain = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    chosen = getattr(transformers, name)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "XGLMForCausalLM":
        sizes = {"d_model": 16, "ffn_dim": 24, "num_layers": 1, "attention_heads": 2}
    torch.manual_seed(2)
    config = chosen.config_class(vocab_size=40, pad_token_id=10, bos_token_id=11, eos_token_id=11, **sizes)
    model = chosen(config).eval()
    model.save_pretrained(tmp_path / "model")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(tmp_path / "model")
    text.write_text("w20 w31 w22\n")
    assert trim("--model", tmp_path / "model", "--text", text, "--output", tmp_path / "out") == 0
    new_ids = dict(map(int, line.split("\t")) for line in (tmp_path / "out/ids.tsv").read_text().splitlines())
    assert len(new_ids) < 20 and (new_ids[10] == 10) == (name != "LlamaForCausalLM")
    found = output_of(
        chosen.from_pretrained(tmp_path / "out").eval(), [new_ids[word] for word in (20, 31, 22)]
    )
    wanted = output_of(model, [20, 31, 22])[:, list(new_ids)].log_softmax(dim=-1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_second_vocabularies_fail() -> None:
    """Gemma 3n looks ids up in each layer, in tables of another size."""
    config = transformers.Gemma3nTextConfig(
        vocab_size=300, vocab_size_per_layer_input=280, hidden_size=16, intermediate_size=24
    )
    with pytest.raises(ValueError, match=r"a second vocabulary \(vocab_size_per_layer_input: 280\)"):
        word_axes(without_weights(transformers.Gemma3nForCausalLM, config))


def test_models_with_submodels_fail(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = unigram()
    half = transformers.BertConfig(vocab_size=len(tokenizer), **SIZES)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(half, half)
    transformers.EncoderDecoderModel(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    line = error_line(capsys, "--model", tmp_path / "model", "--text", text, "--output", tmp_path / "out")
    assert "is made of several models (encoder-decoder)" in line


def _json(change: Callable[[Any], object]) -> Callable[[bytes], bytes]:
    """A change of the content of a JSON file."""
    return lambda content: json.dumps(change(json.loads(content))).encode()


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "nothing in it": ("tokenizer.json", lambda _: b"{}"),
    "no added tokens": ("tokenizer.json", _json(lambda found: {**found, "added_tokens": None})),
    "a list for a model": ("tokenizer.json", _json(lambda found: {**found, "model": []})),
    "a size in words": ("config.json", _json(lambda found: {**found, "vocab_size": "many"})),
    "no heads": ("config.json", _json(lambda found: {**found, "n_head": 0})),
    "ids that are no list": ("generation_config.json", lambda _: b'{"forced_decoder_ids": 5}'),
    "an unknown type": ("model.safetensors", lambda content: content.replace(b'"F32"', b'"F99"', 1)),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_folders(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    model = save(tmp_path / "model", "gpt2")
    file, damage = DAMAGES[name]
    content = (model / file).read_bytes()
    (model / file).write_bytes(damage(content))
    assert (model / file).read_bytes() != content
    line = error_line(capsys, "--model", model, "--output", tmp_path / "out", "--text", text)
    assert str(model) in line


def _file(path: Path, content: str) -> Path:
    """A new file."""
    path.write_text(content, encoding="utf-8")
    return path


def _full_disk(tensors: object, path: Path, metadata: object = None) -> None:
    """What writing does when there is no room left."""
    Path(path).write_bytes(b"half")
    raise OSError(28, "No space left on device")
