"""Damaged, odd and hostile folders fail with one line in every command, and failures change no files."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared_embeddings import hf
from shared_embeddings.checkpoints import recorded_checksum
from shared_embeddings.hf.adapter import FolderAdapter
from tests.helpers import main, names_file
from tests.shared_embeddings.hf.models import (
    DIM,
    KINDS,
    WORDS,
    add_tokenizer,
    change_json,
    compress,
    error_line,
    save,
    sentences,
    write,
)

COMMANDS: dict[str, list[str]] = {
    "trim": ["trim"],
    "compress": ["compress", "--method", "projective", "--rank", "4"],
    "compress --no-check": ["compress", "--method", "projective", "--rank", "4", "--no-check"],
}
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
MOST_SECONDS = 30


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with code that must not run, and a text that its tokenizer covers."""
    folder = tmp_path_factory.mktemp("original")
    (folder / "text").write_text("\n".join(sentences(20, 1)) + "\n")
    save(folder / "model", "llama")
    (folder / "model" / "own.py").write_text("raise SystemExit('code of the folder was run')")
    return folder


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A copy of the model."""
    return Path(shutil.copytree(original / "model", tmp_path / "model"))


def run(command: str, model: Path, original: Path, output: Path) -> int:
    """The exit status of a command."""
    text = ["--text", str(original / "text")] if command == "trim" else []
    return main([*COMMANDS[command], "--model", str(model), "--output", str(output), *text])


Check = Callable[..., None]


@pytest.fixture
def check_refused(original: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Checks that commands soon fail with one line that gives the reason, and write nothing."""

    def check(reason: str, *commands: str, model: Path = model) -> None:
        output = tmp_path / "refused"
        for command in commands or COMMANDS:
            capsys.readouterr()
            start = time.monotonic()
            assert run(command, model, original, output) == 2, command
            error = capsys.readouterr().err
            assert names_file(error, "shared-embeddings", model) and reason in error, error
            assert not output.exists() and time.monotonic() - start < MOST_SECONDS

    return check


Change = Callable[[Path], object]  # of a folder


def settings(file: str, **changed: Any) -> Change:
    return lambda folder: change_json(folder / file, **changed)


def config(**changed: Any) -> Change:
    return settings("config.json", **changed)


def replaced(file: str, change: Callable[[bytes], bytes]) -> Change:
    """Another content of a file, which may be new."""

    def apply(folder: Path) -> None:
        path = folder / file
        path.write_bytes(change(path.read_bytes() if path.exists() else b""))

    return apply


def tensors(change: Callable[[str, Tensor], Tensor | None]) -> Change:
    """Change tensors by name, or remove them."""

    def apply(folder: Path) -> None:
        state = load_file(folder / WEIGHTS)
        changed = {name: new for name, tensor in state.items() if (new := change(name, tensor)) is not None}
        save_file(changed, folder / WEIGHTS, {"format": "pt"})

    return apply


def instead(file: str, content: bytes) -> Change:
    """Another file instead of the weights."""

    def apply(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / file).write_bytes(content)

    return apply


def index_of(where: str) -> Change:
    """An index that names the weights in another folder."""

    def apply(folder: Path) -> None:
        names = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).rename(folder.parent / "away.safetensors")
        if where.startswith("link/"):
            (folder / "link").symlink_to(folder.parent)
        file = where.format(folder.parent)
        change_json(folder / INDEX, metadata={}, weight_map=dict.fromkeys(names, file))

    return apply


def index_without(entry: str) -> Change:
    """An index that lacks one of its entries."""

    def apply(folder: Path) -> None:
        index_of("other.safetensors")(folder)
        (folder.parent / "away.safetensors").rename(folder / "other.safetensors")
        content = json.loads((folder / INDEX).read_text())
        del content[entry]
        (folder / INDEX).write_text(json.dumps(content))

    return apply


SHAPE = b'{"w":{"dtype":"F32","shape":[1099511627776,16],"data_offsets":[0,70368744177664]}}'
# What is wrong -> how to change a folder, and what the line says.
DAMAGES: dict[str, tuple[Change, str]] = {
    "quantized": (config(quantization_config={"quant_method": "gptq"}), "is quantized"),
    "another class": (config(architectures=["Own"]), "code in the folder is not run"),
    "truncated": (replaced(WEIGHTS, lambda old: old[:-40]), "truncated"),
    "an unknown type": (replaced(WEIGHTS, lambda old: old.replace(b'"F32"', b'"F99"', 1)), "cannot be read"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "has no model.safetensors"),
    "pickled": (instead("pytorch_model.bin", b"x"), "has no model.safetensors"),
    "an index with a path": (index_of("{}/away.safetensors"), "is not a safetensors file in the folder"),
    "an index without metadata": (index_without("metadata"), "has no 'metadata'"),
    "an index without names": (index_without("weight_map"), "has no 'weight_map'"),
    "a huge tensor": (replaced(WEIGHTS, lambda _: bytes([len(SHAPE), *[0] * 7]) + SHAPE), "cannot be read"),
    "other weights": (config(transformers_weights="other.safetensors.index.json"), "transformers_weights"),
    "an adapter": (
        settings("adapter_config.json", peft_type="LORA", base_model_name_or_path="../other"),
        "adapter",
    ),
    "an empty tokenizer": (replaced("tokenizer.json", lambda _: b"{}"), ""),
    "a negative size": (config(vocab_size=-1), ""),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_folders(model: Path, check_refused: Check, name: str) -> None:
    change, reason = DAMAGES[name]
    change(model)
    check_refused(reason)


MISMATCHES: dict[str, tuple[Change, str]] = {
    "missing tensors": (
        tensors(lambda name, tensor: None if "mlp" in name else tensor),
        "(missing: model.layers.0.mlp.down_proj.weight)",
    ),
    "another width": (config(hidden_size=24), "ismatch"),
    "more layers": (config(num_hidden_layers=9), "(missing: model.layers.1."),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_weights_that_do_not_match_the_configuration(model: Path, check_refused: Check, name: str) -> None:
    change, reason = MISMATCHES[name]
    change(model)
    check_refused(reason, "compress", "compress --no-check")


OTHER_MODELS = {
    "LlavaForConditionalGeneration": (
        {
            "text_config": {**KINDS["qwen2"][1], "model_type": "qwen2"},
            "vision_config": {
                "model_type": "clip_vision_model",
                "image_size": 4,
                "patch_size": 2,
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
            },
        },
        "takes more than text (vision_config)",
    ),
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
        "does not define where its embedding table is",
    ),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_models_that_are_not_supported(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """With other inputs, scores from the weight of an output layer, or hidden word embeddings."""
    settings, reason = OTHER_MODELS[name]
    chosen = getattr(transformers, name)
    chosen(chosen.config_class(**settings)).save_pretrained(tmp_path / "model")
    assert reason in error_line(capsys, compress, tmp_path / "model", "standard", tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_trimming_models_of_pictures(
    tmp_path: Path, original: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As clear as compressing them, where tensors have the names of older versions, as Gemma 3 has."""
    settings, reason = OTHER_MODELS["LlavaForConditionalGeneration"]
    library: Any = transformers
    kind = library.LlavaForConditionalGeneration
    model = tmp_path / "model"
    kind(kind.config_class(**settings)).save_pretrained(model)
    state = load_file(model / WEIGHTS)
    old = {
        name.replace("model.language_model.", "language_model.model."): tensor
        for name, tensor in state.items()
    }
    save_file(old, model / WEIGHTS, {"format": "pt"})
    add_tokenizer(model)
    assert run("trim", model, original, tmp_path / "small") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


def test_names_of_models_on_the_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked = []

    def snapshot_download(name: str, **_: object) -> str:
        asked.append(name)
        if name != "some/model":
            raise OSError("offline\nand more")
        return str(tmp_path / "model")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    write("gpt2", tmp_path / "model")
    command = [
        "compress",
        "--method",
        "quantized",
        "--bits",
        "4",
        "--no-check",
        "--output",
        "small",
        "--model",
    ]
    assert main([*command, "some/model"]) == 0 and (tmp_path / "small").is_dir()
    assert main([*command, "other/model", "--force"]) == 2
    printed = capsys.readouterr().err.splitlines()[-1]
    assert "other/model: no such file, and it cannot be downloaded" in printed and "(offline)" in printed
    # A folder that exists is meant as one.
    assert main([*command, "model/nothing", "--force"]) == 2
    assert "no such file: model/nothing" in capsys.readouterr().err
    assert asked == ["some/model", "other/model"]


@pytest.mark.parametrize("command", COMMANDS)
def test_names_of_code_are_dropped(
    original: Path, model: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    change_json(
        model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["other/repository--own.Own", None]}
    )
    assert run(command, model, original, model.parent / "small") == 0
    assert "the code that tokenizer_config.json name (auto_map)" in capsys.readouterr().out
    small = json.loads((model.parent / "small" / "tokenizer_config.json").read_text())
    assert "auto_map" not in small and small["eos_token"] == "</s>"


@pytest.mark.parametrize("command", ["compress", "compress --no-check"])
def test_the_class_that_was_used(
    original: Path, model: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Method ``group_reduce`` is not decoded by a file of ours, which config.json would name."""
    change_json(model / "config.json", model_type="unknown", auto_map={"AutoModelForCausalLM": "own.Own"})
    output = model.parent / "small"
    method = "--method group_reduce --num_groups 2 --min_rank 2".split()
    checks = ["--no-check"] if "--no-check" in command else []
    assert main(["compress", *method, *checks, "--model", str(model), "--output", str(output)]) == 0
    printed = capsys.readouterr()
    assert "model type 'unknown': the model was read as LlamaForCausalLM (llama)" in printed.out
    assert "the code that config.json name (auto_map) was neither run nor copied" in printed.out
    assert "[transformers]" not in printed.err
    written = json.loads((output / "config.json").read_text())
    assert written["model_type"] == "llama" and "auto_map" not in written
    assert not (output / "own.py").exists()


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


def content(folder: Path) -> dict[str, bytes]:
    """The files of a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_existing_outputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, small, other, link = (tmp_path / name for name in ("model", "small", "other", "link"))
    write("bert", model)
    before = content(model)
    assert compress(model, "standard", small) == 0
    link.symlink_to(small)
    assert compress(model, "projective", link, "--rank", 4, "--force") == 0
    assert not link.is_symlink() and hf.load(link).shared_embeddings["words"].method == "projective"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "model", "small"]
    other.mkdir()
    (other / "letter").write_text("dear")
    inside, new = other / "letter" / "small", tmp_path / "new"
    # A fit may take long, so unwritable outputs fail before it.
    monkeypatch.setattr("shared_embeddings.compress.fit_tables.fit", lambda *_, **__: pytest.fail("fitted"))
    for reason, *arguments in (
        ("is already compressed", small, "standard", tmp_path / "again"),
        ("is not a model", model, "standard", other, "--force"),
        ("cannot be written", model, "standard", inside),
        ("cannot be written", model, "standard", new, "--report", inside),
        ("would replace an input", model, "standard", new) + ("--report", model / "config.json", "--force"),
    ):
        assert reason in error_line(capsys, compress, *arguments)
    assert content(other) == {"letter": b"dear"} and content(model) == before


def test_a_text_of_blank_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "model", "gpt2")
    text = tmp_path / "blank"
    text.write_text("\n\n   \n\n")
    for size in (["--size", "4x"], ["--method", "standard"]):
        asked = ["--model", str(tmp_path / "model"), "--output", str(tmp_path / "small"), *size]
        assert main(["compress", *asked, "--text", str(text)]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and f"{text}: has no tokens" in line


def test_a_text_of_one_word_predicts_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("gpt2", tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    text = tmp_path / "text"
    text.write_text("w5\n")
    asked = ["--bits", 4, "--calibration", "none", "--text", text]
    compress(tmp_path / "model", "quantized", tmp_path / "small", *asked)
    out, err = capsys.readouterr()
    assert f"{text.name}: is too short to predict" in out + err and "kept 0%" not in out


def test_folders_that_cannot_be_loaded(tmp_path: Path) -> None:
    model, small = tmp_path / "model", tmp_path / "small"
    write("llama", model)
    with pytest.raises(ValueError, match="is a plain model"):
        hf.load(model)
    assert compress(model, "projective", small, "--rank", 4) == 0
    loaded = hf.load(small)
    with pytest.raises(ValueError, match="cannot be resized"):
        loaded.resize_token_embeddings(WORDS + 1)


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
    layers = {"words": whole.get_input_embeddings()}
    if kind == "llama":
        layers = {"input_words": whole.get_input_embeddings(), "output_words": whole.get_output_embeddings()}
    for folder in (model, same):
        embeddings = FolderAdapter().read(folder).embeddings()
        assert [embedding.name for embedding in embeddings] == list(layers)
        for embedding in embeddings:
            assert len(embedding.words) == WORDS
            torch.testing.assert_close(embedding.table(), layers[embedding.name].weight, atol=1e-4, rtol=0)


def test_transformers_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("bert", tmp_path / "model")

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[hf\]'"):
        FolderAdapter().read(tmp_path / "model")


def test_words_and_counts_come_from_the_tokenizer(tmp_path: Path) -> None:
    model, text = tmp_path / "model", tmp_path / "text"
    write("bert", model)
    names = ["[UNK]", "[SEP]", "the", "cat", "dog", *map(str, range(WORDS // 2))]
    add_tokenizer(model, names, unk_token="[UNK]", sep_token="[SEP]")
    text.write_text("the cat the dog\n\nthe bird\n")
    read = FolderAdapter().read(model)
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
