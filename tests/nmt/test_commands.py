"""The commands with unusual text, and with the patches of OpenNMT-py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nmt import fixes
from nmt.checkpoints import read_checkpoint
from tests.nmt.conftest import FUNNEL, Host, Trained, run

# Unusual text


MESSY = ["w1  w2", "", "w3\u00a0w4", "\u2003w5\u3000w6\t", "   ", "w7 w8\r", "w9 unknown-word"]
MESSY.append(" ".join(["w1"] * 6000))


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
    assert len(lines) == 6 and lines[2:4] == ["\t0.0", "\t0.0"]
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
    run("onmt_build_vocab", "-config", config, "-n_sample", "-1", "-save_data", host.folder / "samples")
    entries = (host.folder / "vocab").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"\S+\t\d+", entry) for entry in entries)
    run("onmt_train -config", config)
    assert (host.folder / "model_step_2.pt").is_file()


def test_feature_separator_is_text_without_features(host: Host) -> None:
    text = ["w1￨w2 w3"] * 90
    for name in ("train.src", "train.tgt", "test.src"):
        host.write(name, text)
    (host.folder / "vocab").unlink()
    config = host.config("model", embedding=FUNNEL, train_steps=2, save_checkpoint_steps=2)
    samples = str(host.folder / "samples")
    run("onmt_build_vocab -config", config, "-n_sample", "-1", "-save_data", samples)
    assert (host.folder / "vocab").read_text(encoding="utf-8").split() == ["w1￨w2", "180", "w3", "180"]
    run("onmt_train -config", config)
    assert len(host.translate(host.folder / "model_step_2.pt")) == 90


def test_byte_order_marks_are_not_text(trained: Trained) -> None:
    host, checkpoint = trained(embedding=FUNNEL)
    plain, marked = "w1 w2\n", "\ufeffw1 w2\n"
    for name, text in (("plain", plain), ("marked", marked)):
        (host.folder / name).write_text(text, encoding="utf-8")
    options = ("-min_length", "1")
    assert host.translate(checkpoint, *options, source="plain") == host.translate(
        checkpoint, *options, source="marked"
    )
    vocabulary = host.folder / "vocab"
    (host.folder / "marked_vocab").write_text("\ufeff" + vocabulary.read_text(), encoding="utf-8")
    fresh = host.train("fresh", embedding=FUNNEL, src_vocab=str(host.folder / "marked_vocab"))
    assert read_checkpoint(fresh)["vocab"]["src"] == read_checkpoint(checkpoint)["vocab"]["src"]


# Killed commands


# Packages without wheels for some Python versions


def test_vocabulary_without_pyonmttok() -> None:
    """The replacement builds the same vocabularies as the package."""
    pyonmttok = pytest.importorskip("pyonmttok")
    from nmt import vocabulary

    tokens = ["b", "a", "c", "d"]
    specials = ["<unk>", "<blank>"]
    for options in ({"special_tokens": specials}, {"special_tokens": specials, "maximum_size": 3}):
        ours = vocabulary.build_vocab_from_tokens(tokens, **options)
        theirs = pyonmttok.build_vocab_from_tokens(tokens, **options)
        for vocab in (ours, theirs):
            vocab.add_token("new")
        assert ours.ids_to_tokens == theirs.ids_to_tokens
        assert ours(["a", "?", "new"]) == theirs(["a", "?", "new"])
        assert ours.default_id == theirs.default_id
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
        "assert len(changed) > 10\n"
        "print([(module.__name__, key) for module in modules for key, value in vars(module).items()\n"
        "       if id(value) in changed])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_patches_are_applied_while_modules_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, as that of another row of a recipe."""

    class Place:
        def number(self) -> int:
            return 1

    with monkeypatch.context() as patch:

        class Importing(str):
            def startswith(self, *_: object) -> bool:
                patch.setitem(sys.modules, f"imported_meanwhile_{len(sys.modules)}", sys)
                return False

        patch.setitem(sys.modules, Importing("importing"), sys)
        fixes.wrap("number", Place)(lambda original, self: original(self) + 1)
        fixes.apply_registered()
    assert Place().number() == 2
    fixes.apply_registered()
    assert Place().number() == 2


@pytest.mark.slow
def test_missing_packages_are_replaced(tmp_path: Path) -> None:
    """Without pyonmttok, fasttext and spaCy, the commands run, and features that need them report it."""
    script = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "hidden = ('pyonmttok', 'fasttext', 'spacy')\n"
        "importlib.util.find_spec = lambda name, *rest: None if name in hidden else find(name, *rest)\n"
        "from nmt.hooks import apply_patches\n"
        "apply_patches()\n"
        "import pyonmttok, onmt.transforms.clean as clean, onmt.transforms.terminology as terms\n"
        "assert 'spacy.language' not in sys.modules\n"
        "print(pyonmttok.build_vocab_from_tokens(['a'])(['a']))\n"
        "for call in ('pyonmttok.Tokenizer', 'clean.fasttext.load_model', 'terms.spacy.load'):\n"
        "    try:\n"
        "        eval(call)('x')\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "[0]", done.stderr
    packages = [re.search(r"the package (\w+) is not installed", line)[1] for line in lines[1:]]
    assert packages == ["pyonmttok", "fasttext", "spacy"]
    assert all("pip install '.[transforms]'" in line for line in lines[1:])
