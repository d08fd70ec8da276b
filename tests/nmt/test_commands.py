"""The commands with unusual text, invalid options, damaged files, several processes, and the server."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nmt.checkpoints import read_checkpoint
from shared_embeddings.utils.files import replacing
from tests.nmt.conftest import FUNNEL, ErrorLine, Host, Trained, command, run

# Unusual text


MESSY = [
    "w1  w2",
    "",
    "w3\u00a0w4",
    "\u2003w5\u3000w6\t",
    "   ",
    "w7 w8\r",
    "w9 unknown-word",
    " ".join(["w1"] * 6000),
]


@pytest.mark.slow
def test_messy_text_is_translated_line_by_line(trained: Trained) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    (host.folder / "messy").write_bytes("\n".join(MESSY).encode())  # no line end at the end
    lines = host.translate(checkpoint, "-min_length", "1", source="messy")
    assert len(lines) == len(MESSY)
    assert lines[1] == lines[4] == ""
    assert all(lines[number] for number in (0, 2, 3, 5, 6))
    host.write("clean", ["w1 w2", "w3 w4", "w5 w6", "w7 w8"])
    clean = host.translate(checkpoint, "-min_length", "1", source="clean")
    assert clean == [lines[0], lines[2], lines[3], lines[5]]


def test_messy_text_n_best_with_scores(trained: Trained) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    host.write("messy", ["w1  w2", "", "w3"])
    lines = host.translate(checkpoint, "-n_best", "2", "-with_score", source="messy")
    assert len(lines) == 6
    assert lines[2:4] == ["\t0.0", "\t0.0"]


def test_empty_file_gives_an_empty_file(trained: Trained) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    host.write("empty", [])
    assert host.translate(checkpoint, source="empty") == []


def test_messy_text_trains(host: Host) -> None:
    """Double and no-break spaces, empty lines, very long lines and Windows line ends, from vocabulary to
    model.
    """
    source, target = MESSY * 4, MESSY * 4
    target[9] = "w1"
    for split in ("train", "valid"):
        (host.folder / f"{split}.src").write_bytes("".join(f"{line}\r\n" for line in source).encode())
        (host.folder / f"{split}.tgt").write_bytes("".join(f"{line}\r\n" for line in target).encode())
    (host.folder / "vocab").unlink()
    config = host.config("model", embedding=FUNNEL, batch_size=4, train_steps=2, save_checkpoint_steps=2)
    run(
        "onmt_build_vocab",
        "-config",
        str(config),
        "-n_sample",
        "-1",
        "-save_data",
        str(host.folder / "samples"),
    )
    entries = (host.folder / "vocab").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"\S+\t\d+", entry) for entry in entries)
    run("onmt_train", "-config", str(config))
    assert (host.folder / "model_step_2.pt").is_file()


# Errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"embedding": {"method": "funel", "rank": 4}}, ["funel", "funnel"]),
        ({"embedding": {"method": "funnel", "rnk": 4}}, ["rnk", "rank"]),
        ({"embedding": {"method": "funnel", "rank": 17}}, ["rank", "17", "16"]),
        ({"embedding": {"method": "define", "depth": 0, "map_dim": 8, "expand_dim": 32}}, ["depth", "0"]),
        ({"embedding": "funnel"}, ["embedding", "method"]),
        ({"embedding": "{[1]: 2}"}, ["embedding", "YAML"]),
        ({"embeding": FUNNEL}, ["embeding", "Did you mean"]),
        ({"share_embeddings": False, "src_embedding": FUNNEL, "tgt_embedding": FUNNEL}, ["no effect"]),
        ({"src_embedding": {"method": "standard"}}, ["share_embeddings"]),
        ({"freeze_word_vecs_enc": True}, ["freeze_word_vecs_enc"]),
        ({"parallel_mode": "tensor_parallel"}, ["tensor_parallel"]),
        ({"optim": "sparseadam"}, ["sparseadam", "adam"]),
        ({"lora_embedding": True}, ["lora_embedding"]),
        (
            {"embedding": {"method": "define", "map_dim": 8, "expand_dim": 32, "depth": 2, "max_groups": 2}},
            ["8", "16", "output_projection"],
        ),
        (
            {
                "share_decoder_embeddings": False,
                "embedding": {
                    "method": "define",
                    "map_dim": 8,
                    "expand_dim": 32,
                    "depth": 2,
                    "max_groups": 2,
                    "output": "table",
                },
            },
            ["output", "no effect"],
        ),
        ({"src_vocab": "/nowhere/vocab"}, ["/nowhere/vocab", "onmt_build_vocab"]),
        ({"gpu_ranks": [0], "world_size": 1}, ["gpu_ranks", "CUDA"]),
        ({"train_from": "/nowhere/model.pt"}, ["/nowhere/model.pt"]),
        ({"data": {"corpus": {"path_src": "/nowhere/a", "path_tgt": "/nowhere/b"}}}, ["/nowhere/a"]),
    ],
    ids=lambda value: "-".join(map(str, value))[:40] if isinstance(value, (dict, list)) else str(value),
)
def test_training_fails(options: dict[str, Any], words: list[str], host: Host, error_line: ErrorLine) -> None:
    if "gpu_ranks" in options and torch.cuda.is_available():
        pytest.skip("a GPU is there")
    run_folder = host.folder / "new" / "run"
    config = host.config("model", **{"embedding": FUNNEL, "save_model": str(run_folder / "model"), **options})
    line = error_line("onmt_train", "-config", str(config))
    assert all(word in line for word in words), line
    assert not run_folder.parent.exists()


def test_update_vocab_fails(trained: Trained, error_line: ErrorLine) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    config = host.config(
        "updated", embedding=FUNNEL, update_vocab=True, reset_optim="all", train_from=str(checkpoint)
    )
    assert "update_vocab" in error_line("onmt_train", "-config", str(config))


def test_sides_of_unequal_length(host: Host, error_line: ErrorLine) -> None:
    host.write("train.tgt", ["v1"] * 89)
    line = error_line("onmt_train", "-config", str(host.config("model", embedding=FUNNEL)))
    assert "90" in line and "89" in line


def test_resuming_with_another_embedding(trained: Trained, error_line: ErrorLine) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    config = host.config("other", embedding={"method": "standard"})
    line = error_line("onmt_train", "-config", str(config), "-train_from", str(checkpoint))
    assert "embedding" in line and "checkpoint" in line


def test_vocabulary_lines(host: Host, error_line: ErrorLine) -> None:
    host.write("vocab", ["w1\t5", "\t3"])
    line = error_line("onmt_train", "-config", str(host.config("model", embedding=FUNNEL)))
    assert "line 2" in line


def test_missing_config(error_line: ErrorLine) -> None:
    assert "/nowhere.yaml" in error_line("onmt_train", "-config", "/nowhere.yaml")


def broken(kind: str, checkpoint: Path, folder: Path) -> Path:
    """A damaged checkpoint, or another file."""
    path = folder / f"{kind}.pt"
    content = checkpoint.read_bytes()
    if kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("not a model")
    elif kind == "cut number":
        path.write_bytes(pickle.dumps({"step": 1.5}, protocol=2)[:-8])
    elif kind == "foreign":
        torch.save({"state_dict": {}}, path)
    elif kind == "code":
        torch.save({"opt": os.system}, path)
    return path


@pytest.mark.parametrize("kind", ["truncated", "empty", "text", "cut number", "foreign", "code", "missing"])
@pytest.mark.parametrize(
    "name", ["onmt_translate", "onmt_train", "onmt_release_model", "onmt_average_models"]
)
def test_broken_checkpoints(
    kind: str, name: str, trained: Trained, tmp_path: Path, error_line: ErrorLine
) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    path = str(broken(kind, checkpoint, tmp_path))
    output = tmp_path / "kept"
    output.write_text("kept")
    arguments = {
        "onmt_translate": ["-model", path, "-src", str(host.folder / "test.src"), "-output", str(output)],
        "onmt_train": ["-config", str(host.config("again", embedding=FUNNEL)), "-train_from", path],
        "onmt_release_model": ["-model", path, "-output", str(output), "-force"],
        "onmt_average_models": ["-models", str(checkpoint), path, "-output", str(output), "-force"],
    }[name]
    assert path in error_line(name, *arguments)
    assert output.read_text() == "kept"


def test_checkpoint_that_does_not_fit_its_vocabulary(
    trained: Trained, tmp_path: Path, error_line: ErrorLine
) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    saved = read_checkpoint(checkpoint)
    saved["vocab"]["src"] = saved["vocab"]["tgt"] = saved["vocab"]["src"][:-8]
    path = tmp_path / "shrunk.pt"
    torch.save(saved, path)
    source = str(host.folder / "test.src")
    line = error_line("onmt_translate", "-model", str(path), "-src", source, "-output", str(tmp_path / "out"))
    assert "vocabulary" in line and "(88, 4)" in line and "(80, 4)" in line


def test_averaging_different_models(trained: Trained, tmp_path: Path, error_line: ErrorLine) -> None:
    _, one = trained(embedding=FUNNEL)
    _, other = trained(embedding={"method": "standard"})
    error_line("onmt_average_models", "-models", str(one), str(other), "-output", str(tmp_path / "mean.pt"))
    assert not (tmp_path / "mean.pt").exists()


def test_vocabulary_is_not_overwritten(host: Host, error_line: ErrorLine) -> None:
    before = (host.folder / "vocab").read_text()
    line = error_line(
        "onmt_build_vocab", "-config", str(host.config("model")), "-save_data", str(host.folder / "s")
    )
    assert "-overwrite" in line
    assert (host.folder / "vocab").read_text() == before


# Killed commands


@pytest.mark.slow
def test_kill_and_resume(host: Host) -> None:
    """Training that is killed while it saves at every step resumes from the last checkpoint."""
    config = host.config("model", embedding=FUNNEL, save_checkpoint_steps=1, train_steps=100_000)
    with subprocess.Popen(command("train", "-config", str(config)), stderr=subprocess.DEVNULL) as process:
        deadline = time.time() + 60
        while len(list(host.folder.glob("model_step_*.pt"))) < 12 and time.time() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    steps = sorted(int(path.stem.rsplit("_", 1)[1]) for path in host.folder.glob("model_step_*.pt"))
    assert len(steps) >= 12
    for step in steps[-2:]:
        assert read_checkpoint(host.folder / f"model_step_{step}.pt")["optim"]["training_step"] == step + 1
    last = host.folder / f"model_step_{steps[-1]}.pt"
    final = host.config("model", embedding=FUNNEL, save_checkpoint_steps=1, train_steps=steps[-1] + 2)
    run("onmt_train", "-config", str(final), "-train_from", str(last))
    assert (host.folder / f"model_step_{steps[-1] + 2}.pt").is_file()


def test_leftovers_of_a_killed_save_are_removed(host: Host) -> None:
    """Those of this run's checkpoints, at its next start; those of other runs are kept."""
    for name in ("model", "other"):
        path = host.folder / f"{name}_step_3.pt"
        process = os.fork()
        if process == 0:
            with replacing(path) as temporary:
                temporary.touch()
                os._exit(9)
        os.waitpid(process, 0)
        assert len(list(host.folder.glob(f".{name}_step_3.pt.*"))) == 1
    host.train("model", embedding=FUNNEL)
    assert not list(host.folder.glob(".model*"))
    assert len(list(host.folder.glob(".other*"))) == 1


def test_interrupting_translation_keeps_the_old_file(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onmt.bin.translate

    def interrupted(opt: Any) -> None:
        Path(opt.output).write_text("half")
        raise KeyboardInterrupt

    host, checkpoint = trained(embedding=FUNNEL)
    monkeypatch.setattr(onmt.bin.translate, "translate", interrupted)
    output = tmp_path / "out"
    output.write_text("before")
    with pytest.raises(SystemExit) as stop:
        source = str(host.folder / "test.src")
        run("onmt_translate", "-model", str(checkpoint), "-src", source, "-output", str(output))
    assert stop.value.code == 130
    assert output.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# Packages without wheels for some Python versions


def test_vocabulary_without_pyonmttok() -> None:
    """The replacement builds the same vocabularies as the package."""
    pyonmttok = pytest.importorskip("pyonmttok")
    from nmt.data import vocabulary

    tokens = ["b", "a", "c", "d"]
    for options in ({}, {"maximum_size": 3}, {"special_tokens": ["<unk>", "<blank>"], "maximum_size": 3}):
        ours = vocabulary.build_vocab_from_tokens(tokens, **options)
        theirs = pyonmttok.build_vocab_from_tokens(tokens, **options)
        for vocab in (ours, theirs):
            vocab.add_token("new")
        assert ours.ids_to_tokens == theirs.ids_to_tokens
        assert ours(["a", "?", "new"]) == theirs(["a", "?", "new"])
        assert ours.default_id == theirs.default_id
        assert ours.lookup_index(0) == theirs.lookup_index(0)
        assert ("a" in ours, "?" in ours, len(ours)) == ("a" in theirs, "?" in theirs, len(theirs))


@pytest.mark.slow
def test_no_module_of_opennmt_keeps_a_patched_function() -> None:
    """Whatever was imported before: every copy of a function that another module imported is patched, too."""
    script = (
        "import contextlib, importlib, pkgutil, sys\n"
        "import nmt, onmt\n"
        "for module in pkgutil.walk_packages(onmt.__path__, 'onmt.'):\n"
        "    if '.tests' not in module.name:\n"
        "        with contextlib.suppress(Exception):\n"
        "            importlib.import_module(module.name)\n"
        "modules = [module for name, module in list(sys.modules.items()) if name.startswith('onmt')]\n"
        "copies = [dict(vars(module)) for module in modules]\n"
        "from nmt.hooks import apply_patches\n"
        "apply_patches()\n"
        "changed = {id(value) for module, old in zip(modules, copies) for key, value in old.items()\n"
        "           if vars(module)[key] is not value}\n"
        "assert len(changed) > 20\n"
        "print([(module.__name__, key) for module in modules for key, value in vars(module).items()\n"
        "       if id(value) in changed])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr


@pytest.mark.slow
def test_missing_packages_are_replaced(tmp_path: Path) -> None:
    """Without pyonmttok and fasttext, the commands run, and features that need them report it."""
    script = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "hidden = ('pyonmttok', 'fasttext')\n"
        "importlib.util.find_spec = lambda name, *rest: None if name in hidden else find(name, *rest)\n"
        "from nmt.hooks import apply_patches\n"
        "apply_patches()\n"
        "import pyonmttok, onmt.transforms.clean as clean\n"
        "assert 'spacy.language' not in sys.modules\n"
        "print(pyonmttok.build_vocab_from_tokens(['a'])(['a']))\n"
        "for call in (pyonmttok.Tokenizer, clean.fasttext.load_model):\n"
        "    try:\n"
        "        call('x')\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "[0]", done.stderr
    assert "pyonmttok" in lines[1] and "fasttext" in lines[2]
