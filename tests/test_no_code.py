"""No file that a command reads, and no option, runs code.

What upstream and the libraries below it would run, found by a search for eval, exec, pickle, yaml.load,
import_module, subprocess, os.system, torch.load, numpy.load and trust_remote_code, and how each is closed:

- ``eval`` of src_onmttok_kwargs and tgt_onmttok_kwargs (`onmt.transforms.tokenize`): literals alone, by a
  seam (`nmt.transforms`), in options, configurations and checkpoints.
- ``torch.load`` of checkpoints, pretrained vectors and by CTranslate2: ``weights_only=True``, and the one
  class that is let in is Namespace (`nmt.checkpoints`); CTranslate2 reads a file that was written here.
- ``torch.load`` of dumped transforms (`onmt.transforms.transform.load_transforms`): is never called.
- ``spacy.load``, which imports the package of any name: installed models of spaCy alone, by a seam
  (`nmt.fixes.text`).
- ``import_module`` of preprocess and postprocess (`onmt.translate.translation_server`): ``--allow_functions``
  (`nmt.server`).
- ``save_config`` and ``log_file`` from a client of the server: no options (`nmt.server`).
- ``yaml.load``: safe loaders, plain values alone (`shared_embeddings.utils.reading`).
- ``numpy.load``: ``allow_pickle=False``.
- auto_map, pickled weights and tokenizers of folders of transformers: ``trust_remote_code=False``, and
  safetensors alone (`shared_embeddings.hf.folder`).
- ``pickle.loads`` (`onmt.utils.distributed`): takes what the other processes of a run send, no file.
- ``subprocess`` (`onmt.modules.sru`, `shared_embeddings.utils.results`): fixed arguments.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from lm import cli as lm_cli
from nmt.checkpoints import read_checkpoint
from nmt.hooks import apply_patches
from shared_embeddings.cli.main import main
from tests.helpers import Trap
from tests.lm import runs
from tests.nmt.conftest import Host, run

apply_patches()

import onmt.bin.build_vocab  # noqa: E402
import onmt.bin.train  # noqa: E402
import onmt.bin.translate  # noqa: E402
import onmt.model_builder  # noqa: E402
import onmt.opts  # noqa: E402
from onmt.utils.parse import ArgumentParser  # noqa: E402


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trap]:
    """A trap, which must not have been triggered at the end."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "planted", raising=False)
    found = Trap(tmp_path)
    yield found
    assert not found.mark.exists()


def test_traps_detect_code_execution(trap: Trap) -> None:
    for spring in (
        lambda: eval(trap.python),
        lambda: yaml.unsafe_load(f"a: {trap.yaml}"),
        lambda: subprocess.run(f'echo "{trap.python}"', shell=True, check=True, capture_output=True),
        lambda: __import__(trap.module.split(".")[0]),
        lambda: pickle.loads(pickle.dumps(trap.bomb)),
    ):
        spring()
        assert trap.mark.exists()
        trap.mark.rmdir() if trap.mark.is_dir() else trap.mark.unlink()
    del sys.modules["planted"]


class Reached(Exception):
    """A command has reached a point after which options are not used."""


@contextlib.contextmanager
def tried() -> Iterator[None]:
    """Let a command fail, as it should."""
    with contextlib.suppress(SystemExit, Exception):
        yield


def _texts(parser: Any) -> list[str]:
    """The options of a parser that take text of any kind."""
    return [
        action.dest
        for action in parser._actions
        if action.type in (str, None) and action.nargs != 0 and not action.choices and action.option_strings
    ]


PARSERS = {"train": onmt.bin.train, "build_vocab": onmt.bin.build_vocab, "translate": onmt.bin.translate}
# Options whose text is read as YAML or Python, or names a module.
KWARGS = ("src_onmttok_kwargs", "tgt_onmttok_kwargs")
SPACY = ("src_spacy_language_model", "tgt_spacy_language_model")
EMBEDDINGS = ("embedding", "src_embedding", "output_embedding", "embedding_distillation")
SPELLED = (*KWARGS, *SPACY, *EMBEDDINGS, "data")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """A small corpus."""
    return Host(tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module")
def model(host: Host) -> Path:
    """A small model."""
    return host.train("model", train_steps=1)


def _configured(host: Host, command: str, option: str, value: Any, model: Path) -> Path:
    """A configuration of a command with one option changed."""
    transforms = ["terminology" if option in SPACY else "onmt_tokenize"]
    settings: dict[str, Any] = {"transforms": transforms, option: value}
    if command == "translate":
        source = str(host.folder / "test.src")
        path = Path("config.yaml")
        path.write_text(yaml.safe_dump({"model": [str(model)], "src": source, "output": "out", **settings}))
        return path
    if command == "build_vocab":
        settings = {"src_vocab": "fresh", "n_sample": 5, "save_data": "samples", **settings}
    return host.config("changed", **{"save_model": "saved", **settings})


@pytest.mark.slow
@pytest.mark.parametrize("command", PARSERS)
def test_options_in_configurations(
    command: str, host: Host, model: Path, trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every option that takes text, and a YAML tag that is not text."""

    def stop(*arguments: Any, **options: Any) -> None:
        raise Reached

    monkeypatch.setattr("onmt.train_single.build_model", stop)
    monkeypatch.setattr("onmt.translate.translator.Translator._translate", stop)
    monkeypatch.setattr("onmt.bin.build_vocab.build_vocab", stop)
    load, loaded = onmt.model_builder.load_test_model, []

    def load_once(opt: Namespace, *rest: Any) -> Any:
        if not loaded:
            loaded.append(load(opt, *rest))
        return loaded[0]

    monkeypatch.setattr("onmt.model_builder.load_test_model", load_once)
    # Without a payload, the command reaches its end.
    with pytest.raises(Reached):
        run(f"onmt_{command}", "-config", str(_configured(host, command, "src_prefix", "x", model)))
    for option in _texts(PARSERS[command]._get_parser()):
        texts = trap.texts if option in SPELLED else (trap.python, trap.module)
        for text in texts:
            with tried():
                run(f"onmt_{command}", "-config", str(_configured(host, command, option, text, model)))
    config = _configured(host, command, "src_prefix", "x", model)
    config.write_text(f"{config.read_text()}\nsrc_suffix: {trap.yaml}\n")
    with tried():
        run(f"onmt_{command}", "-config", str(config))


@pytest.mark.parametrize("name", ["src_onmttok_kwargs", "tgt_onmttok_kwargs"])
def test_options_of_tokenizers_on_the_command_line(name: str, host: Host, model: Path, trap: Trap) -> None:
    source = str(host.folder / "test.src")
    with pytest.raises(SystemExit) as ended:
        arguments = ("-model", str(model), "-src", source, "-output", "out")
        run("onmt_translate", *arguments, "-transforms", "onmt_tokenize", f"-{name}", trap.python)
    assert ended.value.code == 2


def test_literals_of_tokenizers_in_any_spelling() -> None:
    from nmt.transforms import parse_tokenizer

    wanted = {"mode": "space", "joiner_annotate": True, "segment_alphabet": ["Han"]}
    for text in (wanted, repr(wanted), json.dumps(wanted), yaml.safe_dump(wanted)):
        assert parse_tokenizer("src_onmttok_kwargs", text) == wanted
    assert parse_tokenizer("src_onmttok_kwargs", "{'mode': open('x')}") == {"mode": "open('x')"}
    for wrong in ("[1]", "open('x')"):
        with pytest.raises(ValueError, match="src_onmttok_kwargs"):
            parse_tokenizer("src_onmttok_kwargs", wrong)


def _replaced(folder: Path, checkpoint: dict[str, Any], name: str, **changed: Any) -> Path:
    """A checkpoint with other options."""
    path = folder / name
    rest = {key: value for key, value in checkpoint.items() if "checksum" not in key}
    torch.save({**rest, "opt": Namespace(**{**vars(rest["opt"]), **changed})}, path)
    return path


@pytest.mark.slow
def test_options_in_checkpoints(host: Host, model: Path, trap: Trap, tmp_path: Path) -> None:
    """Options of the model separately, those of training together, those of tokenizers both ways."""
    saved, source = read_checkpoint(model), str(host.folder / "test.src")
    of_model = {*vars(ArgumentParser.defaults(onmt.opts.model_opts)), "transforms", "data"}
    texts = [name for name in _texts(onmt.bin.train._get_parser()) if name in of_model]
    base = {"transforms": ["onmt_tokenize"], "data": None}
    for options in [
        {name: trap.python for name in vars(saved["opt"]) if name not in of_model},
        {name: trap.python for name in vars(saved["opt"]) if name not in (*of_model, *KWARGS)},
        *({name: trap.python} for name in texts),
        *({name: text} for name in (*KWARGS, "embedding") for text in trap.texts),
        *({name: text, "transforms": ["terminology"]} for name in SPACY for text in trap.texts[:1]),
    ]:
        path = _replaced(tmp_path, saved, "odd.pt", **{**base, **options})
        with tried():
            run("onmt_translate", "-model", str(path), "-src", source, "-output", "out")


def test_pickles_instead_of_checkpoints(host: Host, model: Path, trap: Trap, tmp_path: Path) -> None:
    """In every command that reads one, as a whole or as a part of a valid one."""
    saved, bomb = read_checkpoint(model), tmp_path / "bomb.pt"
    source = str(host.folder / "test.src")
    lm_data = runs.small_corpus(tmp_path)
    plain = tmp_path / "plain.pt"
    for content in (
        trap.bomb,
        {**saved, "optim": trap.bomb},
        {"format": "shared-embeddings-lm", "model": trap.bomb},
    ):
        torch.save(content, bomb)
        plain.write_bytes(pickle.dumps(content))
        for path in map(str, (bomb, plain)):
            funnel = {"method": "funnel", "rank": 4}
            config = str(host.config("changed", save_model="saved", embedding=funnel))
            given = {"pre_word_vecs_enc": path, "pre_word_vecs_dec": path}
            vectors = str(host.config("vectors", save_model="saved", **given))
            served = tmp_path / "server.json"
            served.write_text(json.dumps({"models_root": "/", "models": [{"model": path, "load": True}]}))
            for arguments in (
                ("onmt_translate", "-model", path, "-src", source, "-output", "out"),
                ("onmt_train", "-config", config, "-train_from", path),
                ("onmt_train", "-config", config, "-embedding_distillation", json.dumps({"teacher": path})),
                ("onmt_train", "-config", vectors),
                ("onmt_average_models", "-models", path, "-output", "mean.pt"),
                ("onmt_release_model", "-model", path, "-output", "released.pt"),
                ("onmt_release_model", "-model", path, "-output", "ct2", "-format", "ctranslate2"),
                ("onmt_server", "--model_config", str(served), "--port", "0"),
            ):
                with tried():
                    run(*arguments)
            for command in (
                f"compress --model {path} --method funnel --rank 2 --output small.pt",
                f"trim --model {path} --keep {source} --output small.pt",
                f"classes --vectors-of {path} --output classes.npz",
            ):
                with tried():
                    main(command.split())
            with tried():
                runs.run(runs.settings(lm_data, tmp_path / "run", steps=1, init_from=path))
            for name, rest in (("evaluate", ["-data", str(lm_data)]), ("generate", ["-length", "2"])):
                with pytest.MonkeyPatch.context() as patch, tried():
                    patch.setattr("sys.argv", [f"lm_{name}", "-model", path, *rest])
                    getattr(lm_cli, name)()


def test_vocabularies_and_codes(host: Host, trap: Trap, tmp_path: Path) -> None:
    lines = "".join(f"{text}\t5\n" for text in trap.texts)
    (tmp_path / "words").write_text(lines)
    (tmp_path / "codes").write_text(f"#version: 0.2\n{lines}")
    codes = {"transforms": ["bpe"], "src_subword_model": "codes"}
    for options in (
        {"src_vocab": "words"},
        codes,
        {**codes, "transforms": ["sentencepiece"]},
        {**codes, "src_subword_vocab": "words", "src_vocab_threshold": 1},
    ):
        with tried():
            config = host.config("changed", save_model="saved", train_steps=1, **options)
            run("onmt_train", "-config", str(config))


def test_safetensors_and_arrays(host: Host, trap: Trap, tmp_path: Path) -> None:
    """Metadata of safetensors, object arrays in ``.npz`` and ``.npy``, and pickles by such names."""
    saving = {"save_format": "safetensors", "save_model": str(tmp_path / "apart")}
    host.train("apart", train_steps=1, **saving)
    apart = tmp_path / "apart_step_1.pt"
    weights, source = apart.with_suffix(".safetensors"), str(host.folder / "test.src")
    tensors = load_file(weights)
    asked = ("-model", str(apart), "-src", source, "-output", "out")
    for text in trap.texts:
        save_file(tensors, weights, {"format": text, "checksum": text, text: text})
        with tried():
            run("onmt_translate", *asked)
    weights.write_bytes(pickle.dumps(trap.bomb))
    with tried():
        run("onmt_translate", *asked)
    objects = np.empty(1, dtype=object)
    objects[0] = trap.bomb
    np.savez(tmp_path / "classes.npz", centers=objects, classes=objects, words=objects)
    np.save(tmp_path / "train.npy", objects)
    uncle = {"method": "uncle", "unique_dim": 2, "classes": str(tmp_path / "classes.npz")}
    with tried():
        run("onmt_train", "-config", str(host.config("changed", save_model="saved", embedding=uncle)))
    data = runs.small_corpus(tmp_path)
    for file in data.iterdir():
        kept = file.read_bytes()
        for odd in ((tmp_path / "train.npy").read_bytes(), pickle.dumps(trap.bomb), trap.yaml.encode()):
            file.write_bytes(odd)
            with tried():
                runs.run(runs.settings(data, tmp_path / "run", steps=1))
        file.write_bytes(kept)


def test_settings_of_language_models(trap: Trap, tmp_path: Path) -> None:
    """Every key of ``lm_train``, as text and as a tag of YAML."""
    data = runs.small_corpus(tmp_path)
    settings = runs.settings(data, tmp_path / "run", steps=1)
    for key in settings:
        for text in (repr(trap.python), repr(trap.shell), trap.module, trap.yaml):
            rest = yaml.safe_dump({name: value for name, value in settings.items() if name != key})
            (tmp_path / "config.yaml").write_text(f"{rest}{key}: {text}\n")
            with pytest.MonkeyPatch.context() as patch, tried():
                patch.setattr("sys.argv", ["lm_train", "-config", str(tmp_path / "config.yaml")])
                lm_cli.train()


@pytest.mark.slow
def test_configurations_of_the_server(model: Path, trap: Trap, tmp_path: Path) -> None:
    shutil.copy(model, tmp_path / "model.pt")
    for text in trap.texts:
        for settings in (
            *({key: [text]} for key in ("preprocess", "postprocess", "models")),
            *({key: text} for key in ("preprocess", "postprocess", "custom_opt", "ct2_model", "model_root")),
            *({"opt": {name: text}} for name in (*KWARGS, "save_config", "log_file", "transforms")),
            *({"opt": {"transforms": ["onmt_tokenize"], name: text}} for name in KWARGS),
            {"tokenizer": {"type": "pyonmttok", "mode": text, "params": {text: text}}},
            {"tokenizer": {"type": "sentencepiece", "model": text}},
            {"features": {"src_feats_defaults": text}},
        ):
            # A duplicate number stops a server that would start.
            models = [{"id": 1, "model": "model.pt", **settings}, {"id": 1, "model": "model.pt"}]
            (tmp_path / "server.json").write_text(
                json.dumps({"models_root": str(tmp_path), "models": models})
            )
            with tried():
                run("onmt_server", "--model_config", str(tmp_path / "server.json"), "--port", "0")


def test_folders_of_transformers(trap: Trap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from tests.shared_embeddings.hf.models import write

    # A user who answers every prompt with yes.
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")
    for number, change in enumerate(_changes_of_folders(trap)):
        folder = tmp_path / f"folder{number}"
        write("qwen2", folder)
        shutil.copy(tmp_path / "planted.py", folder / "planted.py")
        change(folder)
        for command in ("compress --method projective --rank 2", f"trim --keep {tmp_path / 'planted.py'}"):
            with tried():
                main([*command.split(), "--model", str(folder), "--output", str(tmp_path / "small")])


def _changes_of_folders(trap: Trap) -> list[Callable[[Path], None]]:
    """Changes that make a transformers folder run code."""
    from tests.shared_embeddings.hf.models import change_json

    own = {"AutoConfig": "planted.f", "AutoModel": "planted.f", "AutoModelForCausalLM": "planted.f"}

    def settings(file: str, **changed: Any) -> Callable[[Path], None]:
        return lambda folder: change_json(folder / file, **changed)

    def pickled(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save(trap.bomb, folder / "pytorch_model.bin")

    def indexed(folder: Path) -> None:
        torch.save(trap.bomb, folder / "pytorch_model.bin")
        index = {"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return [
        settings("config.json", auto_map=own),
        settings("config.json", auto_map=own, architectures=["f"], model_type="planted"),
        settings("config.json", architectures=[trap.python, trap.module], auto_map=own),
        settings("tokenizer_config.json", auto_map={"AutoTokenizer": ["planted.f", "planted.f"]}),
        settings("generation_config.json", custom_generate=trap.module, auto_map=own),
        pickled,
        indexed,
    ]
