"""Folders that cannot be compressed fail with one line, and failures change no files."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

import transformers  # noqa: E402

from shared_embeddings.cli.main import main  # noqa: E402
from shared_embeddings.hosts import hf  # noqa: E402
from shared_embeddings.hosts.hf.adapter import Adapter  # noqa: E402
from tests.shared_embeddings.hf.models import DIM, KINDS, WORDS, compress, write  # noqa: E402
from tests.shared_embeddings.hf.trimming import save  # noqa: E402


def error_line(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """The one line that the command prints on stderr."""
    capsys.readouterr()
    assert compress(*arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("shared-embeddings")]
    assert len(lines) == 1
    return lines[0]


def content(folder: Path) -> dict[str, bytes]:
    """The files of a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def with_settings(folder: Path, **settings: Any) -> Path:
    """The folder, with other settings in its configuration."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return folder


def test_models_of_other_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = tmp_path / "small"
    asked = ("standard", small)
    model = tmp_path / "model"
    write("qwen2", model)
    plain = json.loads((model / "config.json").read_text())
    quantized = with_settings(model, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "is quantized" in error_line(capsys, quantized, *asked)
    (model / "config.json").write_text(json.dumps(plain))
    with_settings(model, architectures=["Own"], auto_map={"AutoModel": "own.Own"})
    (model / "own.py").write_text("raise SystemExit('code of the folder was run')")
    assert "code in the folder is not run" in error_line(capsys, model, *asked)
    (model / "config.json").write_text(json.dumps(plain))
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-40])
    assert "cannot be read" in error_line(capsys, model, *asked)
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "pytorch_model.bin is not loaded" in error_line(capsys, model, *asked)
    (model / "pytorch_model.bin").unlink()
    assert "has no model.safetensors" in error_line(capsys, model, *asked)
    assert not small.exists()


def test_models_that_take_more_than_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = {**KINDS["qwen2"][1], "model_type": "qwen2"}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    settings = transformers.LlavaConfig(
        text_config=text,
        vision_config={"model_type": "clip_vision_model", "image_size": 4, "patch_size": 2, **vision},
    )
    transformers.LlavaForConditionalGeneration(settings).save_pretrained(tmp_path / "model")
    line = error_line(capsys, tmp_path / "model", "standard", tmp_path / "small")
    assert "takes more than text (vision_config)" in line


def test_models_with_other_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They multiply with the weight of their output layer, or do not expose their word embeddings."""
    bert = KINDS["bert"][1]
    narrow = {**bert, "embedding_size": DIM, "hidden_size": 24}
    sizes = {"d_model": DIM, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "langs": ["en", "de"]}
    for number, (name, settings, output_of) in enumerate(
        [
            ("MobileBertForMaskedLM", narrow, f"its output layer (Linear ({WORDS}, {DIM}))"),
            ("DebertaV2ForMaskedLM", {**bert, "legacy": False}, f"its output layer (Linear ({DIM}, {DIM}))"),
            (
                "FSMTForConditionalGeneration",
                {**sizes, "src_vocab_size": WORDS, "tgt_vocab_size": WORDS},
                "does not define where its word embeddings are",
            ),
        ]
    ):
        chosen = getattr(transformers, name)
        chosen(chosen.config_class(**settings)).save_pretrained(tmp_path / f"model{number}")
        assert output_of in error_line(capsys, tmp_path / f"model{number}", "standard", tmp_path / "small")
    assert not (tmp_path / "small").exists()


DAMAGES: dict[str, tuple[str, Any]] = {
    "a size in words": (
        "config.json",
        lambda text: text.replace(f'"vocab_size": {WORDS}', '"vocab_size": "x"'),
    ),
    "no heads": ("config.json", lambda text: text.replace('"n_head": 2', '"n_head": 0')),
    "classes by name": ("config.json", lambda text: text.replace("[", '{"a": [', 1).replace("]", "]}", 1)),
    "no names of files": ("model.safetensors.index.json", lambda _: '{"weight_map": {"a": 5}}'),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    model = tmp_path / "model"
    write("gpt2", model)
    file, damage = DAMAGES[name]
    before = (model / file).read_text() if (model / file).exists() else ""
    (model / file).write_text(damage(before))
    assert (model / file).read_text() != before
    if file.endswith(".index.json"):
        (model / "model.safetensors").unlink()
    line = error_line(capsys, model, "standard", tmp_path / "small")
    assert f"model {model}: " in line
    assert not (tmp_path / "small").exists()


def test_existing_outputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, small = tmp_path / "model", tmp_path / "small"
    write("bert", model)
    before = content(model)
    assert compress(model, "standard", small) == 0
    assert "already exists; add --force" in error_line(capsys, model, "standard", small)
    assert "would replace the file of --model" in error_line(capsys, model, "standard", model, "--force")
    assert "is already compressed" in error_line(capsys, small, "standard", tmp_path / "again")
    assert compress(model, "projective", small, "--rank", 4, "--force") == 0
    assert hf.load(small).shared_embeddings["words"].method == "projective"
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter").write_text("dear")
    with monkeypatch.context() as patch:
        # A fit may take long, so unwritable outputs fail before it.
        patch.setattr("shared_embeddings.compress.tables.fit", lambda *_, **__: pytest.fail("was fitted"))
        assert "is not a model" in error_line(capsys, model, "standard", other, "--force")
        inside = other / "letter" / "small"
        assert "cannot be written" in error_line(capsys, model, "standard", inside)
        assert "cannot be written" in error_line(
            capsys, model, "standard", tmp_path / "new", "--report", inside
        )
        report = model / "config.json"
        line = error_line(capsys, model, "standard", tmp_path / "new", "--report", report, "--force")
        assert "would replace the file of --model" in line
    assert content(other) == {"letter": b"dear"} and content(model) == before


@pytest.mark.parametrize("name", ["thesis.tex", "checkpoint-500/model.safetensors"])
def test_other_files_are_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A folder of Trainer holds a model, too."""
    model, small = tmp_path / "model", tmp_path / "small"
    write("gpt2", model)
    assert compress(model, "standard", small) == 0
    (small / name).parent.mkdir(exist_ok=True)
    (small / name).write_text("weeks of work")
    line = error_line(capsys, model, "standard", small, "--force")
    assert f"contains {name.split('/')[0]}, which is not part of a model and would be lost" in line
    assert (small / name).read_text() == "weeks of work"


def test_links_and_leftovers_of_killed_processes(tmp_path: Path) -> None:
    model, small, link = tmp_path / "model", tmp_path / "small", tmp_path / "link"
    write("gpt2", model)
    assert compress(model, "standard", small) == 0
    link.symlink_to(small)
    (tmp_path / ".small.99999.tmp").mkdir()
    (tmp_path / ".small.99999.tmp" / "model.safetensors").write_bytes(b"half")
    assert compress(model, "projective", link, "--rank", 4, "--force") == 0
    assert link.is_symlink() and hf.load(small).shared_embeddings["words"].method == "projective"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "model", "small"]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_full_disk_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    model, small = tmp_path / "model", tmp_path / "small"
    write("gpt2", model)
    if is_there:
        assert compress(model, "standard", small) == 0
    before = {folder.name: content(folder) for folder in tmp_path.iterdir()}

    def full_disk(tensors: object, path: Path, metadata: object = None) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full_disk)
    line = error_line(capsys, model, "projective", small, "--rank", 4, "--force")
    assert "No space left" in line
    assert {folder.name: content(folder) for folder in tmp_path.iterdir()} == before


def test_a_text_of_blank_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "model", "gpt2")
    text = tmp_path / "blank"
    text.write_text("\n\n   \n\n")
    for size in (["--target-ratio", "4"], ["--method", "standard"]):
        asked = ["--model", str(tmp_path / "model"), "--output", str(tmp_path / "small"), *size]
        assert main(["compress", *asked, "--text", str(text)]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and f"{text}: has no words" in line


@pytest.mark.parametrize("command", ["compress", "choose", "trim"])
def test_a_terminated_command_leaves_no_files(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    save(tmp_path / "model", "bert")
    arguments = {
        "compress": ["compress", "--method", "standard"],
        "choose": ["compress", "--target-ratio", "4"],
        "trim": ["trim", "--text", str(text)],
    }[command]

    def terminated(*arguments: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("shutil.copymode", terminated)  # the last step before the folder gets its name
    output = ["--model", str(tmp_path / "model"), "--output", str(tmp_path / "small")]
    assert main([*arguments, *output]) == 143
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text"]


def test_folders_that_cannot_be_loaded(tmp_path: Path) -> None:
    model, small = tmp_path / "model", tmp_path / "small"
    write("llama", model)
    with pytest.raises(ValueError, match="is a plain model"):
        hf.load(model)
    assert compress(model, "projective", small, "--rank", 4) == 0
    loaded = hf.load(small)
    with pytest.raises(ValueError, match="cannot be resized"):
        loaded.resize_token_embeddings(WORDS + 1)
    with_settings(small, quantization_config={"quant_method": "shared_embeddings", "version": 2})
    for read in (hf.load, transformers.LlamaForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match="has version 2, but this program supports 1"):
            read(small)


def test_without_this_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of transformers without a registered quantizer."""
    from transformers.quantizers import auto

    model, small = tmp_path / "model", tmp_path / "small"
    write("llama", model)
    assert compress(model, "projective", small, "--rank", 4) == 0
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "shared_embeddings")
    warned: list[str] = []
    monkeypatch.setattr(auto.logger, "warning", warned.append)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        transformers.LlamaForCausalLM.from_pretrained(small)
    assert "Unknown quantization type, got shared_embeddings" in warned[0]


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_tables_are_found(tmp_path: Path, kind: str) -> None:
    """For analysis: tables of plain models are exact, those of full-rank models almost."""
    model, same = tmp_path / "model", tmp_path / "same"
    whole = write(kind, model)
    assert compress(model, "projective", same, "--rank", DIM) == 0
    own = {"words": whole.get_input_embeddings()}
    if kind == "llama":
        own = {
            "input_words": whole.get_input_embeddings(),
            "output_words": whole.get_output_embeddings(),
        }
    for folder in (model, same):
        found = Adapter().read(folder).embeddings()
        assert [embedding.name for embedding in found] == list(own)
        for embedding in found:
            assert len(embedding.words) == WORDS
            torch.testing.assert_close(embedding.table(), own[embedding.name].weight, atol=1e-4, rtol=0)


def test_transformers_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("bert", tmp_path / "model")

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'shared-embeddings\[hf\]'"):
        Adapter().read(tmp_path / "model")


def test_words_and_counts_come_from_the_tokenizer(tmp_path: Path) -> None:
    model, text = tmp_path / "model", tmp_path / "text"
    write("bert", model)
    names = ["[UNK]", "[SEP]", "the", "cat", "dog", *map(str, range(WORDS // 2))]
    vocabulary = {word: index for index, word in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A [SEP]", special_tokens=[("[SEP]", 1)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", sep_token="[SEP]"
    ).save_pretrained(model)
    text.write_text("the cat the dog\n\nthe bird\n")
    read = Adapter().read(model)
    (table,) = read.tables()
    assert table.words[: len(names)] == names and table.words[len(names)] == f"<unused {len(names)}>"
    assert len(set(table.words)) == WORDS and table.table.shape == (WORDS, DIM)
    assert table.sentence_marks == ("[SEP]",)
    assert read.count_text([text]) == {"the": 3, "cat": 1, "dog": 1, "[UNK]": 1}
    asked = ["--rank", 4, "--text", text, "--report", tmp_path / "report.json"]
    assert compress(model, "projective", tmp_path / "small", *asked) == 0
    assert json.loads((tmp_path / "report.json").read_text())["tables"][0]["order"] == "by count"
    copied = transformers.AutoTokenizer.from_pretrained(tmp_path / "small")
    assert copied("the dog")["input_ids"] == [2, 4, 1]
    text.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read.count_text([text])
    assert torch.equal(read.tables()[0].table, table.table)
