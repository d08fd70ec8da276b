"""Folders with a model of Hugging Face in which bytes have changed, or settings are of another type."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from shared_embeddings.checkpoints.checksums import recorded_checksum  # noqa: E402
from shared_embeddings.cli.main import main  # noqa: E402
from shared_embeddings.hosts import hf  # noqa: E402
from shared_embeddings.utils.errors import UserError  # noqa: E402
from tests.helpers import flip, names_file, offsets  # noqa: E402
from tests.shared_embeddings.hf.models import compress  # noqa: E402
from tests.shared_embeddings.hf.trimming import save, trim  # noqa: E402


@pytest.mark.parametrize("store", ["fp32", "int8"])
def test_a_flipped_byte_of_a_compressed_folder(tmp_path: Path, store: str) -> None:
    small = tmp_path / "small"
    model = save(tmp_path / "model", "gpt2")
    assert compress(model, "projective", small, "--rank", 4, "--store", store) == 0
    file = small / "model.safetensors"
    found = offsets(file)
    assert len(found) > 10
    for offset in found:
        flip(file, offset)
        with pytest.raises(UserError, match=f"{file}: does not match its checksum") as error:
            hf.load(small)
        assert "\n" not in str(error.value)
        flip(file, offset)
    hf.load(small)


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
SETTINGS = {
    "gpt2": ("architectures", "model_type", "vocab_size", "n_embd", "n_layer", "eos_token_id", "dtype"),
    "small": ("quantization_config", "n_embd", "tie_word_embeddings"),
}
ENTRY = ("version", "tables")
TABLE = ("method", "num_embeddings", "embedding_dim", "options", "inputs", "outputs")
IDS = ("bad_words_ids", "suppress_tokens", "forced_decoder_ids", "sequence_bias", "bos_token_id")


def odd_folders(model: Path, small: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Folders with an error in a JSON file, by its description."""
    plain, entry = (
        json.loads((model / "config.json").read_text()),
        json.loads((small / "config.json").read_text()),
    )
    own = entry["quantization_config"]
    name = next(iter(own["tables"]))
    for kind, value in ODD.items():
        changes: list[tuple[str, Path, str, Any]] = [
            ("config", model, "config.json", value),
            ("generation", model, "generation_config.json", value),
            *((f"model {key}", model, "config.json", {**plain, key: value}) for key in SETTINGS["gpt2"]),
            *((f"small {key}", small, "config.json", {**entry, key: value}) for key in SETTINGS["small"]),
            *((f"ids {key}", model, "generation_config.json", {key: value}) for key in IDS),
        ]
        for key in ENTRY:
            changes.append(
                (f"entry {key}", small, "config.json", {**entry, "quantization_config": {**own, key: value}})
            )
        for key in TABLE:
            table = {**own["tables"][name], key: value}
            tables = {**own, "tables": {name: table}}
            changes.append((f"table {key}", small, "config.json", {**entry, "quantization_config": tables}))
        for what, source, file, content in changes:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(source, folder)
            (folder / file).write_text(json.dumps(content))
            yield f"{what}: {kind}", folder


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


@pytest.mark.parametrize("ids", [[5], 5, "odd", [["a"]], {"a": 1}, [[-1.5]]], ids=str)
def test_invalid_lists_of_ids(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], ids: object
) -> None:
    model = save(tmp_path / "model", "marian")
    file = model / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "bad_words_ids": ids}))
    assert trim("--model", model, "--text", text, "--output", tmp_path / "small") == 2
    error = capsys.readouterr().err
    assert names_file(error, "shared-embeddings", model) and "bad_words_ids" in error, error
