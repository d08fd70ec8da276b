"""What an installation without extras does: light imports, and one line for a module that is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import shared_embeddings as se
from shared_embeddings.utils import extras, stubs
from tests.test_setup import COMMANDS, PYPROJECT

HEAVY = [
    "torch._dynamo",
    "torch._inductor",
    "transformers",
    "onmt",
    "sklearn",
    "gensim",
    "matplotlib",
    "spacy",
]
# Hides all modules of the extras, then runs a console script.
HIDING = """
import sys
from importlib import import_module
from importlib.machinery import PathFinder

class Hiding:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.split(".")[0] in {hidden!r} else PathFinder.find_spec(name, path, target)

sys.meta_path = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
sys.argv[0] = {name!r}
module, function = {command!r}.split(":")
sys.exit(getattr(import_module(module), function)())
"""


def run_hiding(hidden: list[str], command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command without some modules."""
    code = HIDING.format(hidden=hidden, name=command, command=COMMANDS[command])
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_the_import_is_light() -> None:
    code = f"import sys, shared_embeddings; print([name for name in {HEAVY} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.slow
def test_without_extras_a_command_runs_or_names_what_to_install(tmp_path: Path) -> None:
    hidden = [*sum(extras.EXTRAS.values(), ()), "onmt", "recipes"]
    light = {"shared-embeddings", "lm_train", "lm_eval", "lm_generate", "lm_prepare"}
    for command in sorted(COMMANDS):
        found = run_hiding(hidden, command, "--help")
        if command in light:
            assert found.returncode == 0 and "usage" in found.stdout, (command, found.stderr)
            continue
        assert found.returncode == 2 and found.stderr.count("\n") == 1, (command, found.stderr)
        assert re.match(rf"{command}: .* not installed: pip install ", found.stderr), found.stderr
    (tmp_path / "text").write_text("a b\n" * 9)
    (tmp_path / "words").write_text("a\nb\n")
    asked = ["--text", tmp_path / "text", "--vocab", tmp_path / "words", "--num-classes", 1]
    found = run_hiding(hidden, "shared-embeddings", "classes", *asked, "--output", tmp_path / "out.npz")
    assert found.returncode == 2 and found.stderr.endswith("pip install 'shared-embeddings[classes]'\n")


def test_every_module_of_an_extra_is_a_package_of_it() -> None:
    given = PYPROJECT["project"]["optional-dependencies"]
    packages = {"ahocorasick": "pyahocorasick", "sklearn": "scikit-learn", "fasttext": "fasttext-wheel"}
    for extra, modules in extras.EXTRAS.items():
        names = {re.split(r"[^\w-]", line)[0] for line in given[extra]} | {"tokenizers"}
        for module in modules:
            assert packages.get(module, module.replace("_", "-")) in names, (extra, module)


def test_every_command_prints_its_version(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import import_module

    for command, where in COMMANDS.items():
        module, function = where.split(":")
        monkeypatch.setattr(sys, "argv", [command, "--version"])
        assert not getattr(import_module(module), function)()
        assert capsys.readouterr().out == f"{command} {se.__version__}\n"
    assert PYPROJECT["project"]["version"] == se.__version__


def test_names_are_tidy() -> None:
    names = dir(se)
    assert set(se.__all__) <= set(names) and "FunnelOptions" in names
    assert not any(name.startswith("_") and name != "__version__" for name in names)
    assert se.FunnelOptions(rank=3) == se.options("funnel")(rank=3)
    with pytest.raises(AttributeError, match="has no attribute 'Funnel'"):
        se.Funnel  # noqa: B018


def test_stubs_are_up_to_date() -> None:
    assert stubs.FILE.read_text() == stubs.stub(), "run `make stubs`"
