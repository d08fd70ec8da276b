"""Folders of others: what leads out of the folder, names code, or claims sizes that its files do not have."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from shared_embeddings.cli.main import main
from shared_embeddings.hosts import hf
from shared_embeddings.hosts.hf.tokenizer import check_growth
from shared_embeddings.utils.errors import UserError
from tests.shared_embeddings.hf.models import save, sentences, unigram

COMMANDS: dict[str, list[str]] = {
    "trim": ["trim"],
    "compress": ["compress", "--method", "projective", "--rank", "4"],
    "compress --no-check": ["compress", "--method", "projective", "--rank", "4", "--no-check"],
}
Check = Callable[..., None]
SECRET = "-----BEGIN PRIVATE KEY-----\n"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a text that its tokenizer covers."""
    folder = tmp_path_factory.mktemp("original")
    (folder / "text").write_text("\n".join(sentences(20, 1)) + "\n")
    save(folder / "model", "llama")
    return folder


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A copy of the model."""
    return Path(shutil.copytree(original / "model", tmp_path / "model"))


def run(command: str, model: Path, original: Path, output: Path) -> int:
    """The exit status of a command."""
    text = ["--text", str(original / "text")] if command == "trim" else []
    return main([*COMMANDS[command], "--model", str(model), "--output", str(output), *text])


@pytest.fixture
def check_refused(original: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Checks that commands fail with one line that gives the reason, and write nothing."""

    def check(reason: str, *commands: str, model: Path = model) -> None:
        output = original.parent / "refused"
        for command in commands or COMMANDS:
            capsys.readouterr()
            assert run(command, model, original, output) == 2
            error = capsys.readouterr().err
            assert error.count("\n") == 1 and reason in error and str(model) in error, error
            assert not output.exists()

    return check


def change(file: Path, **settings: Any) -> None:
    """Change settings in a JSON file, which may be new."""
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **settings}))


@pytest.mark.parametrize("is_absolute", [False, True])
def test_an_index_names_files_elsewhere(model: Path, is_absolute: bool, check_refused: Check) -> None:
    away = model.parent / "away.safetensors"
    names = load_file(model / "model.safetensors")
    (model / "model.safetensors").rename(away)
    where = str(away) if is_absolute else "../away.safetensors"
    change(model / "model.safetensors.index.json", metadata={}, weight_map=dict.fromkeys(names, where))
    check_refused("is not a safetensors file in the folder")


@pytest.mark.parametrize(
    "name",
    [
        *("LICENSE", "README.md", "chat_template.jinja", "config.json", "model.safetensors"),
        *("1_Pooling/a.json", "additional_chat_templates"),
    ],
)
def test_links_out_of_the_folder(model: Path, name: str, check_refused: Check) -> None:
    secret, link = model.parent / "secret", model / name
    if link.exists():
        link.rename(secret)
    elif name == "additional_chat_templates":
        secret.mkdir()
        (secret / "key.jinja").write_text(SECRET)
    else:
        secret.write_text(SECRET)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(secret)
    check_refused(f"{name} is a link out of the folder", "trim", "compress")


def test_links_of_the_hugging_face_cache(
    original: Path, model: Path, capsys: pytest.CaptureFixture[str], check_refused: Check
) -> None:
    """They lead to the files of the same model, and nowhere else."""
    cache = model.parent / "models--a--b"
    snapshot, blobs = cache / "snapshots" / "0123", cache / "blobs"
    shutil.move(model, blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    for command in COMMANDS:
        output = model.parent / command
        assert run(command, snapshot, original, output) == 0
        assert not any(file.is_symlink() for file in output.iterdir())
    capsys.readouterr()
    (model.parent / "secret").write_text(SECRET)
    (blobs / "LICENSE").symlink_to(model.parent / "secret")
    (snapshot / "LICENSE").symlink_to("../../blobs/LICENSE")
    check_refused("LICENSE is a link out of the folder", "compress --no-check", model=snapshot)


def test_loading_follows_no_links(original: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    assert run("compress --no-check", original / "model", original, small) == 0
    hf.load(small)
    (small / "model.safetensors").rename(tmp_path / "away")
    (small / "model.safetensors").symlink_to(tmp_path / "away")
    with pytest.raises(UserError, match="is a link out of the folder"):
        hf.load(small)


@pytest.mark.parametrize("name", ["transformers_weights", "adapter"])
def test_settings_that_name_other_weights(model: Path, name: str, check_refused: Check) -> None:
    if name == "adapter":
        change(model / "adapter_config.json", peft_type="LORA", base_model_name_or_path="../other")
    else:
        change(model / "config.json", transformers_weights="other.safetensors.index.json")
    check_refused(name, "trim", "compress --no-check")


@pytest.mark.parametrize(
    "claimed",
    [
        {"vocab_size": -1},
        {"vocab_size": 10**15},
        {"hidden_size": 0},
        {"hidden_size": 10**6},
        {"intermediate_size": 48},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 900},
        {"num_hidden_layers": 10**10},
    ],
    ids=str,
)
def test_claims_of_size(model: Path, claimed: dict[str, int], check_refused: Check) -> None:
    change(model / "config.json", **claimed)
    start = time.monotonic()
    check_refused("", "trim", "compress --no-check")
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_tensors(model: Path, command: str, check_refused: Check) -> None:
    file = model / "model.safetensors"
    save_file(
        {name: one for name, one in load_file(file).items() if "mlp" not in name}, file, {"format": "pt"}
    )
    check_refused("missing keys: model.layers.0.mlp.down_proj.weight", command)


@pytest.mark.parametrize("command", COMMANDS)
def test_names_of_code_are_dropped(
    original: Path, model: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    change(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["other/repository--own.Own", None]})
    assert run(command, model, original, model.parent / "small") == 0
    assert "auto_map of tokenizer_config.json is dropped" in capsys.readouterr().out
    small = json.loads((model.parent / "small" / "tokenizer_config.json").read_text())
    assert "auto_map" not in small and small["eos_token"] == "</s>"


@pytest.mark.parametrize("command", ["compress", "compress --no-check"])
def test_the_class_that_was_used(
    original: Path, model: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Method ``group_reduce`` is not decoded by a file of ours, which config.json would name."""
    change(model / "config.json", model_type="unknown", auto_map={"AutoModelForCausalLM": "own.Own"})
    (model / "own.py").write_text("raise SystemExit('code of the folder was run')")
    output = model.parent / "small"
    method = "--method group_reduce --num_groups 2 --min_rank 2".split()
    checks = ["--no-check"] if "--no-check" in command else []
    assert main(["compress", *method, *checks, "--model", str(model), "--output", str(output)]) == 0
    printed = capsys.readouterr()
    assert "model type 'unknown': the model was read as LlamaForCausalLM (llama)" in printed.out
    assert "was not run: the model was read as LlamaForCausalLM" in printed.out
    assert "[transformers]" not in printed.err
    written = json.loads((output / "config.json").read_text())
    assert written["model_type"] == "llama" and "auto_map" not in written
    assert not (output / "own.py").exists()


def replacing(content: str, *, times: int = 1) -> dict[str, Any]:
    """A normalizer that replaces a letter by a text, several times."""
    rule = {"type": "Replace", "pattern": {"String": "a"}, "content": content}
    return {"type": "Sequence", "normalizers": [rule] * times}


INSERTING = {"type": "Replace", "pattern": {"Regex": ""}, "content": "a"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GROWING: dict[str, dict[str, Any]] = {
    "long": {"normalizer": replacing("a" * 1000)},
    "chained": {"normalizer": replacing("aaa", times=4)},
    "inserting": {"normalizer": {"type": "Sequence", "normalizers": [INSERTING] * 40}},
    "bytes": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 9}},
    "decoder": {"decoder": {"type": "Sequence", "decoders": replacing("aaa", times=4)["normalizers"]}},
    "repeating": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
            "pair": [],
            "special_tokens": {},
        }
    },
}


@pytest.mark.parametrize("name", GROWING)
def test_tokenizers_that_lengthen_texts(name: str) -> None:
    with pytest.raises(UserError, match="use another tokenizer"):
        check_growth({**json.loads(unigram().backend_tokenizer.to_str()), **GROWING[name]})


def test_commands_refuse_tokenizers_that_lengthen_texts(model: Path, check_refused: Check) -> None:
    change(model / "tokenizer.json", normalizer=replacing("a" * 1000, times=4))
    check_refused("1,000 characters for one", "trim", "compress")


def test_tokenizers_in_use_are_read() -> None:
    """Rules as in SentencePiece, ALBERT, and vocabularies with words for spaces."""
    rules = [
        {"type": "Replace", "pattern": {"String": old}, "content": new}
        for old, new in {"``": '"', "\n": "<n>", "\t": "<|tab|>", " ": "▁"}.items()
    ]
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    others = [{"type": "NFKD"}, {"type": "Prepend", "prepend": "▁"}, {"type": "ByteLevel"}]
    check_growth({"normalizer": {"type": "Sequence", "normalizers": [spaces, *rules, *others]}})
