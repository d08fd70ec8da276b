"""Trimming tokenizers of every kind; trimming and compressing in both orders, and in one step."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import models, normalizers, pre_tokenizers, trainers

from shared_embeddings.cli.main import main
from shared_embeddings.compress.report import Sizes
from shared_embeddings.compress.session import Settings
from shared_embeddings.compress.trim import Keep, Texts, trimmed_copy
from shared_embeddings.compress.trim import trim as trim_model
from shared_embeddings.hosts import hf
from shared_embeddings.hosts.hf.folder import INDEX
from shared_embeddings.quant.storage import HEADER
from tests.shared_embeddings.hf.models import compress
from tests.shared_embeddings.hf.trimming import (
    error_line,
    llama,
    log_probabilities,
    output_of,
    save,
    sentences,
    trim,
)

UNKNOWN = "Kato 漢字 xyzzy!  zwei"


def trained(model: Any, trainer: Any, splitter: Any, normalizer: Any = None) -> dict[str, Any]:
    """The model part of a tokenizer for generated words."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = splitter
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(sentences(300, 2), trainer)
    found: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return found


def merges(specials: Sequence[str], splitter: Any, alphabet: Sequence[str] = (), **settings: str) -> Any:
    """The vocabulary and merges of a BPE model."""
    size = 300 + len(specials)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(specials),
        initial_alphabet=list(alphabet),
        show_progress=False,
        **settings,
    )
    found = trained(models.BPE(**settings), trainer, splitter)
    return {"vocab": found["vocab"], "merges": [tuple(merge) for merge in found["merges"]]}


def byte_level(*specials: str, **settings: str) -> Any:
    """A BPE model of bytes."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return merges([*specials, *sorted(alphabet)], splitter, alphabet, **settings)


def fallback(*specials: str) -> Any:
    """A BPE model of characters that falls back to bytes."""
    return merges([*specials, *(f"<0x{byte:02X}>" for byte in range(256))], pre_tokenizers.Metaspace())


def unigram(*specials: str) -> Any:
    """The pieces of a Unigram model with their scores."""
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=list(specials), unk_token="<unk>", show_progress=False
    )
    found = trained(models.Unigram(), trainer, pre_tokenizers.Metaspace())
    return {"vocab": [(piece, score) for piece, score in found["vocab"]]}


def wordpiece() -> Any:
    """The pieces of a WordPiece model."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=specials, show_progress=False)
    splitter, normalizer = pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()
    return {"vocab": trained(models.WordPiece(unk_token="[UNK]"), trainer, splitter, normalizer)["vocab"]}


# The class of a tokenizer -> its vocabulary, and the lines with unknown characters that round-trip.
KINDS: dict[str, tuple[Callable[[], Any], int]] = {
    "GPT2Tokenizer": (lambda: byte_level("<|endoftext|>"), 1),
    "Qwen2Tokenizer": (lambda: byte_level("<|endoftext|>"), 1),
    "CLIPTokenizer": (lambda: byte_level("<|startoftext|>", "<|endoftext|>", end_of_word_suffix="</w>"), 0),
    "LlamaTokenizer": (lambda: fallback("<unk>", "<s>", "</s>"), 1),
    "GemmaTokenizer": (lambda: fallback("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"), 1),
    "NllbTokenizer": (lambda: merges(["<s>", "<pad>", "</s>", "<unk>"], pre_tokenizers.Metaspace()), 0),
    "T5Tokenizer": (lambda: unigram("<pad>", "</s>", "<unk>"), 0),
    "XLMRobertaTokenizer": (lambda: unigram("<s>", "<pad>", "</s>", "<unk>"), 0),
    "BertTokenizer": (wordpiece, 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str, tmp_path: Path, text: Path) -> None:
    make, unknown = KINDS[kind]
    tokenizer = getattr(transformers, kind)(**make())
    model, other = tmp_path / "model", tmp_path / "other"
    llama(len(tokenizer)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    unseen = sentences(20, 5)
    other.write_text("\n".join([*unseen, UNKNOWN]) + "\n", encoding="utf-8")
    texts = Texts([text], held_out=[other])
    (found,) = trim_model(model, texts, tmp_path / "out").vocabularies
    lines = len(text.read_text(encoding="utf-8").splitlines())
    assert found.rows.after < found.rows.before
    assert [one.whole for one in found.texts][0] == lines
    assert found.texts[1].round_trips == Sizes(*[len(unseen) + unknown] * 2)
    before = transformers.AutoTokenizer.from_pretrained(model)
    after = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert type(after) is type(tokenizer)
    for line in text.read_text(encoding="utf-8").splitlines():
        assert after.tokenize(line) == before.tokenize(line)
    for line in unseen:
        assert after.decode(after(line)["input_ids"]) == before.decode(before(line)["input_ids"])
    (dropped,) = trim_model(model, texts, None, Keep(characters=False)).vocabularies
    needs_characters = isinstance(tokenizer.backend_tokenizer.model, (models.Unigram, models.WordPiece))
    assert (dropped.texts[1].round_trips.after < len(unseen)) == needs_characters


def test_trim_and_compress_in_one_step(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, output, report = save(tmp_path / "model", "gpt2"), tmp_path / "out", tmp_path / "report.json"
    (model / "README.md").write_text("---\nlicense: mit\n---\n# Original\n")
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
    assert line in printed and line in card and card.startswith("---\nlicense: mit\n---\n")
    steps = [heading for heading in card.splitlines() if heading.startswith("#")]
    assert steps == [
        "# Word embeddings compressed with shared-embeddings",
        "## Earlier step: Vocabulary trimmed with shared-embeddings",
        "# Original",
    ]
    assert card.count("from_pretrained") == 1
    rows = len((output / "ids.tsv").read_text().splitlines())
    assert json.loads((output / "config.json").read_text())["vocab_size"] == rows
    assert content["model"] == str(model) and content["output"] == str(output)
    assert content["trimmed"]["vocabularies"][0]["map_file"] == str(output / "ids.tsv")
    assert str(tmp_path / ".out") not in printed + card + report.read_text()
    capsys.readouterr()
    assert main(list(map(str, [*asked, *writing]))) == 2
    assert "already exists; add --force" in capsys.readouterr().err
    (output / "diary.doc").write_text("")
    assert main(list(map(str, [*asked, *writing, "--force"]))) == 2
    assert "contains diary.doc" in capsys.readouterr().err
    (output / "diary.doc").unlink()
    assert main(list(map(str, [*asked, *writing, "--force"]))) == 0


def test_a_failure_leaves_no_files(tmp_path: Path, text: Path) -> None:
    model = save(tmp_path / "model", "gpt2")
    copy = trimmed_copy(model, tmp_path / "out", [text], Settings())
    with pytest.raises(OSError, match="no space"), copy as (small, settings):
        assert small.is_dir() and settings.trimmed is not None
        assert settings.trimmed.output == str(tmp_path / "out")
        raise OSError("no space")
    assert sorted(os.listdir(tmp_path)) == sorted(["model", text.name])


def test_tokenizers_of_other_models(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save(tmp_path / "model", "gpt2")
    asked = ["--model", model, "--text", text, "--dry-run"]
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    whole = content["model"]["vocab"]
    content["model"] |= {"vocab": {word: whole[word] for word in list(whole)[:100]}, "merges": []}
    file.write_text(json.dumps(content))
    assert "belongs to another model" in error_line(capsys, *asked)
    content["added_tokens"].append({**content["added_tokens"][0], "id": 10_000, "content": "<far>"})
    file.write_text(json.dumps(content))
    assert "token '<far>' has the id 10000, but the model has" in error_line(capsys, *asked)
    assert compress(model, "standard", tmp_path / "small") == 2
    assert "belongs to another model" in capsys.readouterr().err


def test_dry_runs_reject_output(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", text, "--text", text]
    assert "give either --output or --dry-run" in error_line(capsys, *asked)
    with pytest.raises(SystemExit):
        main(["trim", *map(str, asked), "--dry-run", "--coverage", "150%"])
    assert "'150%' is not a percentage" in capsys.readouterr().err


COMPRESSED = [
    ("gpt2", ["projective", "--rank", 4]),
    ("llama", ["projective", "--rank", 4, "--store", "int8"]),
    ("llama", ["projective", "--rank", 4, "--store", "int4"]),
    ("marian", ["structured", "--num-groups", 4, "--num-clusters", 16, "--fit-steps", 5]),
]


def new_ids(output: Path) -> dict[int, int]:
    """The new id of every word that was kept."""
    lines = (output / "ids.tsv").read_text().splitlines()
    return {int(old): int(new) for old, new in (line.split("\t") for line in lines)}


@pytest.mark.slow_except("gpt2-method0")
@pytest.mark.parametrize(("kind", "method"), COMPRESSED)
def test_compressed_models(kind: str, method: list[Any], tmp_path: Path, text: Path) -> None:
    """Probabilities are those of the compressed model, over the kept words."""
    model, small, output = save(tmp_path / "model", kind), tmp_path / "small", tmp_path / "trimmed"
    assert compress(model, method[0], small, *method[1:]) == 0
    assert trim("--model", small, "--text", text, "--output", output) == 0
    ids_after = new_ids(output)
    old, new = hf.load(small), hf.load(output)
    ids = transformers.AutoTokenizer.from_pretrained(small)(sentences(1, 1)[0])["input_ids"]
    expected = output_of(old, ids)[:, list(ids_after)].log_softmax(dim=-1)
    found = output_of(new, [ids_after[token] for token in ids])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    before, after = (load_file(folder / "model.safetensors") for folder in (small, output))
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        if name != HEADER:
            assert tensor.dtype == before[name].dtype
    assert {table.num_embeddings for table in new.shared_embeddings.values()} == {len(ids_after)}
    assert new.config.vocab_size == len(ids_after)


def test_trimmed_models_are_compressed(tmp_path: Path, text: Path) -> None:
    """The other order: removing rows before the fit does not change a full-rank one."""
    model, output, small = save(tmp_path / "model", "llama"), tmp_path / "trimmed", tmp_path / "small"
    assert trim("--model", model, "--text", text, "--output", output) == 0
    assert compress(output, "projective", small, "--rank", 16) == 0
    ids = transformers.AutoTokenizer.from_pretrained(small)(sentences(1, 1)[0])["input_ids"]
    expected = log_probabilities(output, "llama", ids)
    torch.testing.assert_close(output_of(hf.load(small), ids), expected, rtol=0, atol=1e-4)


def test_words_without_own_rows_are_kept(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, small, output = save(tmp_path / "model", "gpt2"), tmp_path / "small", tmp_path / "trimmed"
    options = ["--vocab-shape", "20,30", "--dim-shape", "4,4", "--rank", 2, "--fit-steps", 5]
    assert compress(model, "tensor_train", small, *options) == 0
    line = error_line(capsys, "--model", small, "--text", text, "--output", output)
    assert "trim the plain model first" in line and not output.exists()


def test_shards_of_a_compressed_model(tmp_path: Path, text: Path) -> None:
    model, small, output = save(tmp_path / "model", "llama"), tmp_path / "small", tmp_path / "trimmed"
    assert compress(model, "projective", tmp_path / "one", "--rank", 4) == 0
    old = hf.load(tmp_path / "one")
    old.save_pretrained(small, max_shard_size="6KB")
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(small)
    assert trim("--model", small, "--text", text, "--output", output) == 0
    shards = sorted(output.glob("*.safetensors"))
    where = json.loads((output / INDEX).read_text())["weight_map"]
    assert len(shards) > 1
    assert where == {name: shard.name for shard in shards for name in load_file(shard)}
    kept = list(new_ids(output))
    expected = output_of(old, kept[:5])[:, kept].log_softmax(dim=-1)
    torch.testing.assert_close(output_of(hf.load(output), list(range(5))), expected, rtol=0, atol=1e-5)
