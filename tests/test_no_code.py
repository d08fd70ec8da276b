"""No file that a command reads, and no option, runs code: evaluated texts, modules, YAML tags, pickles."""

from __future__ import annotations

import importlib
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from lm import cli as lm_cli
from nmt.checkpoints import read_checkpoint
from nmt.transforms import parse_tokenizer
from shared_embeddings.cli.main import main
from tests.helpers import Trap
from tests.lm import runs
from tests.nmt.conftest import Host, run
from tests.shared_embeddings.hf import models as hf

Commands = Iterator[tuple[object, ...]]
# Options whose text is read as YAML or Python, or names a module.
SPELLED = "onmttok_kwargs|spacy_language_model|embedding|embedding_distillation|data".split("|")
MODEL_FILE = "odd.pt"


def options(trap: Trap, host: Host, model: Path) -> Commands:
    """Every option of OpenNMT-py's commands that takes text, and a YAML tag."""
    start: dict[str, dict[str, Any]] = {"train": {}, "build_vocab": {"src_vocab": "fresh", "n_sample": 5}}
    start["translate"] = {"model": [str(model)], "src": "text", "output": "out"}
    for command, settings in start.items():
        for action in importlib.import_module(f"onmt.bin.{command}")._get_parser()._actions:
            takes_text = action.type in (str, None) and action.nargs != 0 and not action.choices
            is_spelled = action.dest.endswith(tuple(SPELLED))
            for text in (trap.texts if is_spelled else trap.texts[:4:3]) if takes_text else ():
                transforms = ["terminology" if "spacy" in action.dest else "onmt_tokenize"]
                run = {"transforms": transforms, "train_steps": 1, "save_model": "saved"}
                config = host.config("changed", **{**run, **settings, action.dest: text})
                if command == "translate":
                    config.write_text(
                        yaml.safe_dump({**settings, "transforms": transforms, action.dest: text})
                    )
                yield f"onmt_{command}", "-config", config
        config.write_text(f"{yaml.safe_dump(settings)}\nsrc_suffix: {trap.yaml}\n")
        yield f"onmt_{command}", "-config", config


def options_in_checkpoints(trap: Trap, host: Host, model: Path) -> Commands:
    saved = read_checkpoint(model)
    of_tokenizers = [f"{side}_{name}" for side in ("src", "tgt") for name in SPELLED[:2]]
    for name in ("src_prefix", "save_config", *of_tokenizers):
        for text in trap.texts:
            transforms = ["terminology" if "spacy" in name else "onmt_tokenize"]
            vars(saved["opt"]).update({"transforms": transforms, name: text})
            torch.save({key: saved[key] for key in saved if "checksum" not in key}, MODEL_FILE)
            yield "onmt_translate", "-model", MODEL_FILE, "-src", "text", "-output", "out"


def pickles(trap: Trap, host: Host, model: Path) -> Commands:
    """Instead of a checkpoint or in one, in every command that reads one."""
    of_lm = {"format": "shared-embeddings-lm", "model": trap.bomb}
    funnel = {"method": "funnel", "rank": 4}
    classes = ("--num-classes", 2, "--output", "classes.npz")
    server = {"id": 1, "model": MODEL_FILE, "load": True, "opt": {}}
    data = runs.small_corpus(Path.cwd())
    resumed = runs.settings(data, Path("run"), steps=1, init_from=MODEL_FILE)
    Path("lm.yaml").write_text(yaml.safe_dump(resumed))
    for content in (trap.bomb, {**read_checkpoint(model), "optim": trap.bomb}, of_lm):
        for pickled in (None, pickle.dumps(content)):
            torch.save(content, MODEL_FILE) if pickled is None else Path(MODEL_FILE).write_bytes(pickled)
            Path("server.json").write_text(json.dumps({"models_root": ".", "models": [server]}))
            before = {"pre_word_vecs_enc": MODEL_FILE, "pre_word_vecs_dec": MODEL_FILE}
            for more in (
                before,
                {"train_from": MODEL_FILE},
                {"embedding": funnel, "embedding_distillation": {"teacher": MODEL_FILE}},
            ):
                yield "onmt_train", "-config", host.config("changed", save_model="saved", **more)
            yield "onmt_translate", "-model", MODEL_FILE, "-src", "text", "-output", "out"
            yield "onmt_average_models", "-models", MODEL_FILE, "-output", "mean.pt"
            yield "onmt_release_model", "-model", MODEL_FILE, "-output", "released", "-format", "ctranslate2"
            yield "onmt_server", "--model_config", "server.json", "--port", 0
            for command in ("compress --method funnel --rank 2", "trim --keep text"):
                yield "shared-embeddings", *command.split(), "--model", MODEL_FILE, "--output", "small.pt"
            yield "shared-embeddings", "classes", "--vectors-of", MODEL_FILE, *classes
            yield "lm_evaluate", "-model", MODEL_FILE, "-data", data
            yield "lm_generate", "-model", MODEL_FILE, "-length", 2
            yield "lm_train", "-config", "lm.yaml"


def vocabularies_and_arrays(trap: Trap, host: Host, model: Path) -> Commands:
    """Also metadata of safetensors, and pickles by such names."""
    lines = "".join(f"{text}\t5\n" for text in trap.texts)
    Path("codes").write_text(f"#version: 0.2\n{lines}")
    objects = np.array([trap.bomb], dtype=object)
    np.savez("classes.npz", centers=objects, classes=objects, words=objects)
    uncle = {"method": "uncle", "unique_dim": 2, "classes": "classes.npz"}
    subwords = {"transforms": ["bpe"], "src_subword_model": "codes", "src_subword_vocab": "codes"}
    for more in (
        {"src_vocab": "codes"},
        subwords,
        {**subwords, "transforms": ["sentencepiece"]},
        {"embedding": uncle},
    ):
        yield "onmt_train", "-config", host.config("changed", save_model="saved", train_steps=1, **more)
    host.train("apart", train_steps=1, save_format="safetensors")
    apart = host.folder / "apart_step_1.safetensors"
    tensors = load_file(apart)
    for text in (*trap.texts, None):
        save_file(tensors, apart, {"format": text, "checksum": text}) if text else apart.write_bytes(
            pickle.dumps(trap.bomb)
        )
        yield "onmt_translate", "-model", apart.with_suffix(".pt"), "-src", "text", "-output", "out"


def language_models(trap: Trap, host: Host, model: Path) -> Commands:
    """Every key of ``lm_train`` as text and as a YAML tag; every file of its data."""
    data = runs.small_corpus(Path.cwd())
    settings = runs.settings(data, Path("run"), steps=1)
    for key in settings:
        for text in (repr(trap.python), trap.module, trap.yaml):
            rest = yaml.safe_dump({name: value for name, value in settings.items() if name != key})
            Path("lm.yaml").write_text(f"{rest}{key}: {text}\n")
            yield "lm_train", "-config", "lm.yaml"
    Path("lm.yaml").write_text(yaml.safe_dump(settings))
    np.save("objects.npy", np.array([trap.bomb], dtype=object))
    for file in data.iterdir():
        for odd in (Path("objects.npy").read_bytes(), pickle.dumps(trap.bomb), trap.yaml.encode()):
            file.write_bytes(odd)
            yield "lm_train", "-config", "lm.yaml"


def servers(trap: Trap, host: Host, model: Path) -> Commands:
    for text in trap.texts:
        for settings in (
            *({key: text} for key in ("preprocess", "postprocess", "custom_opt", "ct2_model", "model_root")),
            *(
                {"opt": {"transforms": ["onmt_tokenize"], name: text}}
                for name in ("src_onmttok_kwargs", "log_file")
            ),
            {"tokenizer": {"type": "pyonmttok", "mode": text, "params": {text: text}}},
        ):
            # A duplicate number stops a server that would start.
            models = [
                {"id": 1, "model": str(model), "load": True, "opt": {}, **settings},
                {"id": 1, "model": str(model)},
            ]
            Path("server.json").write_text(json.dumps({"models_root": "/", "models": models}))
            yield "onmt_server", "--model_config", "server.json", "--port", 0


def transformers(trap: Trap, host: Host, model: Path) -> Commands:
    auto_map = {"AutoConfig": "planted.f", "AutoModelForCausalLM": "planted.f"}
    tokenizer = {"auto_map": {"AutoTokenizer": ["planted.f", "planted.f"]}}
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}}
    for number, (file, changed) in enumerate([
        ("config.json", {"auto_map": auto_map}),
        ("config.json", {"auto_map": auto_map, "architectures": ["f"], "model_type": "planted"}),
        ("tokenizer_config.json", tokenizer),
        ("generation_config.json", {"custom_generate": trap.module, "auto_map": auto_map}),
        ("model.safetensors.index.json", index),
    ]):  # fmt: skip
        folder = Path(f"folder{number}")
        hf.write("qwen2", folder)
        (folder / "planted.py").write_text(Path("planted.py").read_text())
        torch.save(trap.bomb, folder / "pytorch_model.bin")
        hf.change_json(folder / file, **changed)
        if "index" in file:
            (folder / "model.safetensors").unlink()
        for command in ("compress --method projective --rank 2", "trim --keep text"):
            yield "shared-embeddings", *command.split(), "--model", folder, "--output", "small"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    return Host(tmp_path_factory.mktemp("host"))


KINDS = (
    options,
    options_in_checkpoints,
    pickles,
    vocabularies_and_arrays,
    language_models,
    servers,
    transformers,
)


@pytest.mark.slow_except("vocabularies_and_arrays", "language_models", "transformers")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_nothing_runs_code(
    kind: Callable[[Trap, Host, Path], Commands], host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")  # a user who answers every prompt with yes
    trap, model = Trap(tmp_path), host.train("model", train_steps=1)
    Path("text").write_text("w1 w2\n")
    for name, *words in kind(trap, host, model):
        command: list[str] = [str(word) for word in words]
        with suppress(SystemExit, Exception), pytest.MonkeyPatch.context() as patch:
            if name == "shared-embeddings":
                main(command)
            elif str(name).startswith("lm_"):
                patch.setattr("sys.argv", [name, *command])
                getattr(lm_cli, str(name).removeprefix("lm_"))()
            else:
                run(str(name), *command)
        assert not trap.mark.exists(), (name, command)


def test_traps_detect_code_execution(tmp_path: Path) -> None:
    trap = Trap(tmp_path)
    for spring in (
        lambda: eval(trap.python),
        lambda: yaml.unsafe_load(f"a: {trap.yaml}"),
        lambda: pickle.loads(pickle.dumps(trap.bomb)),
    ):
        spring()
        assert trap.mark.exists()
        trap.mark.rmdir() if trap.mark.is_dir() else trap.mark.unlink()


def test_literals_of_tokenizers_in_any_spelling() -> None:
    wanted = {"mode": "space", "joiner_annotate": True, "segment_alphabet": ["Han"]}
    for text in (wanted, repr(wanted), json.dumps(wanted), yaml.safe_dump(wanted)):
        assert parse_tokenizer("src_onmttok_kwargs", text) == wanted
    assert parse_tokenizer("src_onmttok_kwargs", "{'mode': open('x')}") == {"mode": "open('x')"}
    for wrong in ("[1]", "open('x')"):
        with pytest.raises(ValueError, match="src_onmttok_kwargs"):
            parse_tokenizer("src_onmttok_kwargs", wrong)
