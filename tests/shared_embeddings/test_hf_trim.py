"""Trimming models of Hugging Face: covered texts are cut as before, kept tokens keep their probabilities."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_embeddings import compression_hosts, trim_hosts
from shared_embeddings.cli import main

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from safetensors.torch import load_file  # noqa: E402
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers  # noqa: E402

from shared_embeddings import hf  # noqa: E402
from shared_embeddings.storage import HEADER  # noqa: E402

HOSTS = {
    compression_hosts.GROUP: "shared_embeddings.hf.host:Host",
    trim_hosts.GROUP: "shared_embeddings.hf.trim:Host",
}
SYLLABLES = ["ka", "to", "mi", "re", "shu", "lon", "ber", "ti", "na", "ou", "gra", "ph", "ing", "é"]
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
SEQUENCES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
}


def sentences(number: int, seed: int) -> list[str]:
    """Sentences of made-up words, of which the first half of a lexicon is in those of seed 1."""
    draw = random.Random(3)
    lexicon = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(150)]
    draw = random.Random(seed)
    words = lexicon[:30] if seed == 1 else lexicon
    return [" ".join(draw.choices(words, k=draw.randint(3, 9))).capitalize() + "." for _ in range(number)]


def byte_level() -> Any:
    """A BPE tokenizer of bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(300, 2), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def unigram() -> Any:
    """A Unigram tokenizer as SentencePiece has it."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(sentences(300, 2), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.add_special_tokens(["<sep>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", pad_token="<pad>", sep_token="<sep>"
    )


def wordpiece() -> Any:
    """A WordPiece tokenizer as BERT has it."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(sentences(300, 2), trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(
        zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), specials, strict=True)
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def llama(words: int) -> Any:
    """A causal model whose output is a table of its own, and has rows without a token."""
    ids = {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 2}
    config = transformers.LlamaConfig(vocab_size=words + 7, num_key_value_heads=2, **SIZES, **ids)
    return transformers.LlamaForCausalLM(config)


def gpt2(words: int) -> Any:
    """A causal model with tied tables, whose configuration names an id that is no token."""
    config = transformers.GPT2Config(
        vocab_size=words, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=50256
    )
    return transformers.GPT2LMHeadModel(config)


def t5(words: int) -> Any:
    """A sequence-to-sequence model with an output layer of its own."""
    config = transformers.T5Config(
        vocab_size=words,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def marian(words: int) -> Any:
    """A sequence-to-sequence model with a bias for every word."""
    ids = {
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": words - 1,
        "forced_eos_token_id": 1,
    }
    model = transformers.MarianMTModel(transformers.MarianConfig(vocab_size=words, **SEQUENCES, **ids))
    model.generation_config.bad_words_ids = [[0], [words // 2]]
    return model


def bert(words: int) -> Any:
    """A masked language model."""
    config = transformers.BertConfig(vocab_size=words, max_position_embeddings=64, **SIZES)
    return transformers.BertForMaskedLM(config)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[int], Any], str]] = {
    "llama": (byte_level, llama, "AutoModelForCausalLM"),
    "gpt2": (byte_level, gpt2, "AutoModelForCausalLM"),
    "t5": (unigram, t5, "AutoModelForSeq2SeqLM"),
    "marian": (unigram, marian, "AutoModelForSeq2SeqLM"),
    "bert": (wordpiece, bert, "AutoModelForMaskedLM"),
}


@pytest.fixture(autouse=True)
def installed_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of this source tree, whichever one is installed."""
    monkeypatch.setattr(
        compression_hosts,
        "entry_points",
        lambda group: [EntryPoint("hf", HOSTS[group], group)],
    )


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Sentences of few words."""
    path = tmp_path / "text"
    path.write_text("\n".join(sentences(30, 1)) + "\n", encoding="utf-8")
    return path


def save(folder: Path, kind: str, **how: Any) -> Path:
    """A folder with a tiny random model and its tokenizer."""
    torch.manual_seed(5)
    tokenizer = KINDS[kind][0]()
    model = KINDS[kind][1](len(tokenizer))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("bias", "embed_tokens.weight", "shared.weight")):
            torch.nn.init.normal_(tensor, std=0.5)
    model.save_pretrained(folder, **how)
    tokenizer.save_pretrained(folder)
    return folder


def log_probabilities(folder: Path, kind: str, ids: list[int]) -> torch.Tensor:
    """The log-probabilities ``(T, V)`` of the plain model in a folder of a text."""
    return said(getattr(transformers, KINDS[kind][2]).from_pretrained(folder).eval(), ids)


def said(model: Any, ids: list[int]) -> torch.Tensor:
    """The log-probabilities ``(T, V)`` of a model of a text, which encoder and decoder both read."""
    given = {"input_ids": torch.tensor([ids])}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = given["input_ids"]
    with torch.no_grad():
        return model(**given).logits[0].log_softmax(dim=-1)


def trim(*arguments: object) -> int:
    """The exit status of the command."""
    return main(["trim", *map(str, arguments)])


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
def test_any_text_can_still_be_cut(tokenizer: Callable[[], Any], tmp_path: Path, text: Path) -> None:
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
    # The bad words were the padding and one word that has gone.
    assert json.loads((output / "generation_config.json").read_text())["bad_words_ids"] == [[0]]
    found = transformers.MarianMTModel.from_pretrained(output)
    assert found.final_logits_bias.shape == (1, len(trimmed))


def compress(*arguments: object) -> int:
    """The exit status of the command."""
    return main(["compress", *map(str, arguments)])


COMPRESSED = [
    ("gpt2", ["--method", "projective", "--rank", 4]),
    ("llama", ["--method", "projective", "--rank", 4, "--store", "int8"]),
    ("marian", ["--method", "structured", "--num-groups", 2, "--num-clusters", 16, "--fit-steps", 5]),
]


@pytest.mark.parametrize(("kind", "method"), COMPRESSED)
def test_compressed_models(kind: str, method: list[Any], tmp_path: Path, text: Path) -> None:
    """Probabilities are those of the compressed model, over the kept words."""
    model, small, output = save(tmp_path / "model", kind), tmp_path / "small", tmp_path / "trimmed"
    assert compress("--model", model, "--output", small, *method) == 0
    assert trim("--model", small, "--text", text, "--output", output) == 0
    pairs = [map(int, line.split("\t")) for line in (output / "ids.tsv").read_text().splitlines()]
    new_ids = dict(pairs)
    old, new = hf.load(small), hf.load(output)
    ids = transformers.AutoTokenizer.from_pretrained(small)(sentences(1, 1)[0])["input_ids"]
    expected = said(old, ids)[:, list(new_ids)].log_softmax(dim=-1)
    found = said(new, [new_ids[token] for token in ids])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    before, after = (load_file(folder / "model.safetensors") for folder in (small, output))
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        if name != HEADER:
            assert tensor.dtype == before[name].dtype
    codes = [tensor for name, tensor in after.items() if name.endswith(".codes") and tensor.dim() == 2]
    assert all(len(table) == len(new_ids) for table in codes)
    assert new.config.vocab_size == len(new_ids)


def test_trimmed_models_are_compressed(tmp_path: Path, text: Path) -> None:
    """The other order: rows that are left out before the fit do not change a full-rank one."""
    model, output, small = save(tmp_path / "model", "llama"), tmp_path / "trimmed", tmp_path / "small"
    assert trim("--model", model, "--text", text, "--output", output) == 0
    assert compress("--model", output, "--output", small, "--method", "projective", "--rank", 16) == 0
    ids = transformers.AutoTokenizer.from_pretrained(small)(sentences(1, 1)[0])["input_ids"]
    expected = log_probabilities(output, "llama", ids)
    torch.testing.assert_close(said(hf.load(small), ids), expected, rtol=0, atol=1e-4)


def test_words_without_rows_of_their_own_stay(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, small, output = save(tmp_path / "model", "gpt2"), tmp_path / "small", tmp_path / "trimmed"
    method = ["--method", "tensor_train", "--vocab-shape", "20,30", "--dim-shape", "4,4", "--rank", 2]
    assert compress("--model", model, "--output", small, *method, "--fit-steps", 5) == 0
    line = refused(capsys, "--model", small, "--text", text, "--output", output)
    assert "trim the plain model first" in line and not output.exists()


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that the command prints on stderr for a mistake."""
    capsys.readouterr()
    assert trim(*arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("shared-embeddings")]
    assert len(lines) == 1
    return lines[0]


def test_refusals(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, output, empty = save(tmp_path / "model", "gpt2"), tmp_path / "out" / "trimmed", tmp_path / "empty"
    empty.write_text("")
    asked = ["--model", model, "--output", output]
    assert "has no word of the vocabulary 'tokens'" in refused(capsys, *asked, "--text", empty)
    assert "No such file" in refused(capsys, *asked, "--text", tmp_path / "none")
    found = [*asked, "--text", text]
    assert "word to keep 'Kato to'" in refused(
        capsys, *found, "--keep", _file(tmp_path / "words", "Kato to\n")
    )
    assert "is there already" in refused(capsys, *found, "--output", model)
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", _full_disk)
        assert "No space left" in refused(capsys, *found)
    assert not output.parent.exists() or list(output.parent.iterdir()) == []
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    assert "cut short" in refused(capsys, *found)
    weights.rename(model / "pytorch_model.bin")
    assert "pytorch_model.bin is not opened" in refused(capsys, *found)
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace("{", '{"auto_map": {"AutoModel": "x.Y"},', 1))
    assert "needs code that comes with it" in refused(capsys, *found)
    (model / "config.json").write_text(config)
    (model / "tokenizer.json").unlink()
    assert "its tokenizer is a slow one" in refused(capsys, *found)
    assert not output.exists()


def _file(path: Path, content: str) -> Path:
    """A new file."""
    path.write_text(content, encoding="utf-8")
    return path


def _full_disk(tensors: object, path: Path, metadata: object = None) -> None:
    """What writing does when there is no room left."""
    Path(path).write_bytes(b"half")
    raise OSError(28, "No space left on device")
