"""Damaged or odd folders fail with one line in every command, and failures change no files."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from shared_embeddings.checkpoints import recorded_checksum
from shared_embeddings.cli.main import main
from shared_embeddings.hosts import hf
from shared_embeddings.hosts.hf.adapter import Adapter
from tests.helpers import flip, names_file, offsets
from tests.shared_embeddings.hf.models import DIM, KINDS, WORDS, add_tokenizer, compress, save, trim, write


def error_line(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """The one line that compressing prints on stderr."""
    capsys.readouterr()
    assert compress(*arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("shared-embeddings")]
    assert len(lines) == 1
    return lines[0]


def content(folder: Path) -> dict[str, bytes]:
    """The files of a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# Damaged folders.

INDEX = "model.safetensors.index.json"


def changed(**settings: Any) -> Callable[[bytes], bytes]:
    """A JSON file with other settings."""
    return lambda old: json.dumps({**json.loads(old), **settings}).encode()


# File -> its new content, None to remove it, and what the line says.
DAMAGES: dict[str, tuple[dict[str, Callable[[bytes], bytes] | None], str]] = {
    "quantized": ({"config.json": changed(quantization_config={"quant_method": "gptq"})}, "is quantized"),
    "another class": (
        {"config.json": changed(architectures=["Own"]), "own.py": lambda _: b"raise SystemExit('was run')"},
        "code in the folder is not run",
    ),
    "a size in words": ({"config.json": changed(vocab_size="x")}, ""),
    "no heads": ({"config.json": changed(n_head=0)}, ""),
    "classes by name": ({"config.json": changed(architectures={"a": ["b"]})}, "its class None"),
    "truncated": ({"model.safetensors": lambda old: old[:-40]}, "truncated"),
    "an unknown type": (
        {"model.safetensors": lambda old: old.replace(b'"F32"', b'"F99"', 1)},
        "cannot be read",
    ),
    "no weights": ({"model.safetensors": None}, "has no model.safetensors"),
    "pickled": (
        {"model.safetensors": None, "pytorch_model.bin": lambda _: b"x"},
        "pytorch_model.bin is not loaded",
    ),
    "no names of files": (
        {"model.safetensors": None, INDEX: lambda _: b'{"weight_map": {"a": 5}}'},
        "not a safetensors file in the folder",
    ),
    "an empty tokenizer": ({"tokenizer.json": lambda _: b"{}"}, ""),
    "no added tokens": ({"tokenizer.json": changed(added_tokens=None)}, ""),
    "a list for a tokenizer": ({"tokenizer.json": changed(model=[])}, ""),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model."""
    return save(tmp_path_factory.mktemp("original") / "model", "gpt2")


@pytest.mark.parametrize("command", ["compress", "trim"])
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_folders(
    original: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], name: str, command: str
) -> None:
    model, (changes, reason) = Path(shutil.copytree(original, tmp_path / "model")), DAMAGES[name]
    for file, change in changes.items():
        old = (model / file).read_bytes() if (model / file).exists() else b""
        if change is None:
            (model / file).unlink()
        else:
            (model / file).write_bytes(change(old))
            assert (model / file).read_bytes() != old
    asked = ["--method", "standard"] if command == "compress" else ["--text", str(text)]
    assert main([command, "--model", str(model), "--output", str(tmp_path / "small"), *asked]) == 2
    error = capsys.readouterr().err
    assert names_file(error, "shared-embeddings", model) and reason in error, error
    assert not (tmp_path / "small").exists()


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


OTHER_SCORES = {
    "MobileBertForMaskedLM": (
        {**KINDS["bert"][1], "embedding_size": DIM, "hidden_size": 24},
        f"its output layer (Linear ({WORDS}, {DIM}))",
    ),
    "DebertaV2ForMaskedLM": (
        {**KINDS["bert"][1], "legacy": False},
        f"its output layer (Linear ({DIM}, {DIM}))",
    ),
    "FSMTForConditionalGeneration": (
        {"d_model": DIM, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "langs": ["en", "de"]}
        | {"src_vocab_size": WORDS, "tgt_vocab_size": WORDS},
        "does not define where its word embeddings are",
    ),
}


@pytest.mark.parametrize("name", OTHER_SCORES)
def test_models_with_other_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """They multiply with the weight of their output layer, or do not expose their word embeddings."""
    settings, reason = OTHER_SCORES[name]
    chosen = getattr(transformers, name)
    chosen(chosen.config_class(**settings)).save_pretrained(tmp_path / "model")
    assert reason in error_line(capsys, tmp_path / "model", "standard", tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_every_command_detects_a_flipped_byte(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last shard of a model that was trimmed, which is a plain one."""
    model, small, output = tmp_path / "model", tmp_path / "small", tmp_path / "output"
    save(model, "llama", max_shard_size="30KB")
    assert trim("--model", model, "--text", text, "--output", small) == 0
    files = sorted(small.glob("*.safetensors"))
    assert len(files) > 1 and None not in map(recorded_checksum, files)
    pairs = tmp_path / "pairs"
    pairs.write_text("ka to 1\nmi re 2\n")
    flip(files[-1], offsets(files[-1])[0])
    commands: list[list[object]] = [
        ["trim", "--model", small, "--text", text, "--output", output],
        ["compress", "--model", small, "--method", "projective", "--rank", 4, "--output", output],
        ["similarity", "--model", small, "--pairs", pairs],
    ]
    for command in commands:
        capsys.readouterr()
        assert main([str(one) for one in command]) == 2
        error = capsys.readouterr().err
        assert f"{files[-1]}: does not match its checksum" in error and error.count("\n") == 1
        assert not output.exists()
    monkeypatch.setenv("SHARED_EMBEDDINGS_VERIFY", "0")
    assert main([str(one) for one in commands[0]]) == 0


def test_models_without_checksum_load(tmp_path: Path) -> None:
    model = save(tmp_path / "model", "gpt2")
    assert recorded_checksum(model / "model.safetensors") is None
    assert compress(model, "projective", tmp_path / "small", "--rank", 4) == 0
    loaded = hf.load(tmp_path / "small")
    loaded.save_pretrained(tmp_path / "tuned")
    assert recorded_checksum(tmp_path / "tuned" / "model.safetensors") is None
    hf.load(tmp_path / "tuned")
    hf.save(loaded, tmp_path / "saved")
    assert len(str(recorded_checksum(tmp_path / "saved" / "model.safetensors"))) == 64
    hf.load(tmp_path / "saved")


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_weights_that_are_not_finite(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], number: str
) -> None:
    model = save(tmp_path / "model", "gpt2")
    state = load_file(model / "model.safetensors")
    name = next(name for name in state if "ln_f" in name)
    state[name].view(-1)[3] = float(number)
    save_file(state, model / "model.safetensors", {"format": "pt"})
    assert compress(model, "projective", tmp_path / "small", "--rank", 4) == 2
    error = capsys.readouterr().err
    assert str(model) in error and "NaN or infinity" in error and "Traceback" not in error


ODD: dict[str, Any] = {
    "None": None,
    "a list": [1, None],
    "a string": "odd",
    "a number": 5,
    "a negative number": -3,
    "a mapping": {"a": None},
    "true": True,
}
SETTINGS = ("architectures", "model_type", "vocab_size", "n_embd", "n_layer", "eos_token_id", "dtype")
IDS = ("bad_words_ids", "suppress_tokens", "forced_decoder_ids", "sequence_bias", "bos_token_id")
TABLE = ("method", "num_embeddings", "embedding_dim", "options", "inputs", "outputs")


def odd_folders(model: Path, small: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Folders with an error in a JSON file, by its description."""
    plain, whole = (json.loads((one / "config.json").read_text()) for one in (model, small))
    entry = whole["quantization_config"]
    ((name, table),) = entry["tables"].items()
    for kind, value in ODD.items():
        changes: list[tuple[Path, str, str, Any]] = [
            (model, "config.json", "all", value),
            (model, "generation_config.json", "all", value),
            *((model, "config.json", key, {**plain, key: value}) for key in SETTINGS),
            *((model, "generation_config.json", key, {key: value}) for key in IDS),
        ]
        entries = [
            ("entry", value),
            *((key, {**entry, key: value}) for key in ("version", "tables")),
            *((key, {**entry, "tables": {name: {**table, key: value}}}) for key in TABLE),
        ]
        odd = [("n_embd", {**whole, "n_embd": value})]
        odd += [(key, {**whole, "quantization_config": content}) for key, content in entries]
        for source, file, key, content in [*changes, *((small, "config.json", *one) for one in odd)]:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(source, folder)
            (folder / file).write_text(json.dumps(content))
            yield f"{source.name} {file} {key}: {kind}", folder


@pytest.mark.slow
def test_settings_of_another_type(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback for any content of a JSON file; three commands take turns."""
    model, small, output = save(tmp_path / "model", "gpt2"), tmp_path / "small", tmp_path / "output"
    assert compress(model, "projective", small, "--rank", 4) == 0
    pairs = tmp_path / "pairs"
    pairs.write_text("ka to 1\nmi re 2\n")
    asked: list[list[object]] = [
        ["trim", "--text", text, "--output", output],
        ["compress", "--method", "projective", "--rank", 4, "--output", output],
        ["similarity", "--pairs", pairs],
    ]
    failures = []
    for number, (kind, folder) in enumerate(odd_folders(model, small, tmp_path / "odd")):
        command = [*asked[number % len(asked)], "--model", folder]
        capsys.readouterr()
        try:
            status: object = main([str(one) for one in command])
        except Exception as error:
            status = repr(error)
        error = capsys.readouterr().err
        shutil.rmtree(output, ignore_errors=True)
        # Keys that a command does not use may have any value.
        if status != 0 and not (status == 2 and names_file(error, "shared-embeddings", folder)):
            failures.append(f"{kind}: {command[0]}: {status} {error[-400:]}")
    assert not failures, "\n".join(failures)


# Outputs.


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
        patch.setattr("shared_embeddings.compress.session.fit", lambda *_, **__: pytest.fail("was fitted"))
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


def test_a_text_of_blank_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "model", "gpt2")
    text = tmp_path / "blank"
    text.write_text("\n\n   \n\n")
    for size in (["--target-ratio", "4"], ["--method", "standard"]):
        asked = ["--model", str(tmp_path / "model"), "--output", str(tmp_path / "small"), *size]
        assert main(["compress", *asked, "--text", str(text)]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and f"{text}: has no words" in line


# Loading.


def test_folders_that_cannot_be_loaded(tmp_path: Path) -> None:
    model, small = tmp_path / "model", tmp_path / "small"
    write("llama", model)
    with pytest.raises(ValueError, match="is a plain model"):
        hf.load(model)
    assert compress(model, "projective", small, "--rank", 4) == 0
    loaded = hf.load(small)
    with pytest.raises(ValueError, match="cannot be resized"):
        loaded.resize_token_embeddings(WORDS + 1)
    config = small / "config.json"
    config.write_bytes(
        changed(quantization_config={"quant_method": "shared_embeddings", "version": 2})(config.read_bytes())
    )
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
    add_tokenizer(model, names, unk_token="[UNK]", sep_token="[SEP]")
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
