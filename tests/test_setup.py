"""The set-up, its pins, and installations without extras."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import shared_embeddings as se
from shared_embeddings.utils.errors import EXTRAS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
COMMANDS: dict[str, str] = PYPROJECT["project"]["scripts"]
PIN_FILES = ["installer.txt", "pins.txt", "torch.txt", "opennmt.txt"]
TORCH_BUILDS = '--extra-index-url "https://download.pytorch.org/whl/$TORCH_BUILD"'
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]


def pinned_lines(name: str) -> list[tuple[str, list[str]]]:
    """What a file of requirements pins, each with the words after it: its hashes."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(" --")[0], re.findall(r"--\S+", line)) for line in lines]


def read_pins(name: str) -> list[Requirement]:
    return [Requirement(line) for line, _ in pinned_lines(name)]


def applies(marker: Marker | None, python: str) -> bool:
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.5",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
    }
    return marker is None or marker.evaluate(environment)


def pinned_versions(python: str) -> dict[str, str]:
    """The packages that the setup installs on one Python: canonical name -> version."""
    versions: dict[str, str] = {}
    for name in PIN_FILES:
        for pin in read_pins(name):
            if applies(pin.marker, python):
                key = canonicalize_name(pin.name)
                assert key not in versions, f"{key} is pinned twice on Python {python}"
                versions[key] = next(iter(pin.specifier)).version
    return versions


@pytest.mark.parametrize("name", PIN_FILES)
def test_every_pin_is_exact_and_has_the_hashes_of_its_files(name: str) -> None:
    pins = pinned_lines(name)
    assert pins
    for line, hashes in pins:
        pin = Requirement(line)
        assert [s.operator for s in pin.specifier] == ["=="] and "*" not in str(pin.specifier), pin
        # That of torch is a file with another hash for each build.
        assert not pin.url and bool(hashes) is not line.startswith("torch=="), (
            f"{pin}: pip would take any file"
        )
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", word) for word in hashes), pin


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_satisfy_the_ranges_of_pyproject_and_opennmt(python: str) -> None:
    pytest.importorskip("onmt")
    pins = pinned_versions(python)
    without_wheels = {"pyonmttok", "fasttext-wheel"} if python == "3.13" else set()
    required = [
        need
        for need in map(Requirement, PYPROJECT["project"]["dependencies"])
        if applies(need.marker, python)
    ]
    of_opennmt = [
        need for need in map(Requirement, metadata.requires("OpenNMT-py") or []) if need.marker is None
    ]
    for needed in [*required, *(need for need in of_opennmt if need.name not in {"torch", *without_wheels})]:
        version = pins.get(canonicalize_name(needed.name))
        assert version, f"{needed.name} is not pinned on Python {python}"
        assert needed.specifier.contains(version, prereleases=True), (needed, version)
    assert not without_wheels & set(pins)


def test_setup_names_no_package_index() -> None:
    folders = (ROOT / "requirements", ROOT / "scripts")
    files = [ROOT / "Makefile", ROOT / "pyproject.toml"]
    for path in files + [path for folder in folders for path in folder.glob("*.*")]:
        text = path.read_text(encoding="utf-8").replace(TORCH_BUILDS, "")
        assert not re.search(r"--(extra-)?index-url|--find-links|https?://", text), path


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_commands_run_functions_of_this_project(command: str) -> None:
    entry_point = metadata.distribution("shared-embeddings").entry_points[command]
    assert callable(entry_point.load())
    # OpenNMT-py installs commands of the same names: the file on disk shows which was written last.
    script = Path(sys.executable).parent / command
    module, function = COMMANDS[command].split(":")
    assert f"from {module} import {function}" in script.read_text(encoding="utf-8")


def run_setup(python: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a copy of the setup script, so that it cannot change this checkout."""
    (directory / "scripts").mkdir()
    script = directory / "scripts" / "setup.sh"
    script.write_bytes((ROOT / "scripts" / "setup.sh").read_bytes())
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(python)}
    return subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True)


def fake_python(directory: Path, version: tuple[int, int], failing_import: str = "") -> Path:
    """An interpreter that claims a version, and lacks a module."""
    path = directory / "python"
    path.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = --version ]; then echo "Python {version[0]}.{version[1]}.0"; exit; fi\n'
        f'case "$2" in *"{failing_import or "no such module"}"*) exit 1 ;; esac\n'
        f'exec "{sys.executable}" -c "import sys; sys.version_info = ({version[0]}, {version[1]}, 0); $2"\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("version", "failing_import", "printed"),
    [
        ((3, 9), "", "Python 3.9.0; Python 3.10 to 3.13 is needed"),
        ((3, 14), "", "Python 3.14.0; Python 3.10 to 3.13 is needed"),
        ((3, 12), "ensurepip", "apt install python3.12-venv"),
        (None, "", "make PYTHON="),
    ],
)
def test_setup_names_what_is_missing(
    tmp_path: Path, version: tuple[int, int] | None, failing_import: str, printed: str
) -> None:
    python = tmp_path / "nowhere" if version is None else fake_python(tmp_path, version, failing_import)
    result = run_setup(python, tmp_path)
    assert result.returncode == 2
    assert printed in result.stderr and len(result.stderr.splitlines()) == 1
    assert not (tmp_path / ".venv").exists()


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

    find_distributions = PathFinder.find_distributions

sys.meta_path = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
sys.argv[0] = {name!r}
module, function = {command!r}.split(":")
sys.exit(getattr(import_module(module), function)())
"""


def run_hiding(hidden: list[str], command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command without some modules."""
    code = HIDING.format(hidden=hidden, name=command, command=COMMANDS[command])
    words = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("variable", ["PYTHON", "VIRTUAL_ENV", "PATH"])
def test_scripts_of_recipes_use_the_named_environment(variable: str, tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("python", "onmt_train"):
        (commands / name).write_text('#!/bin/sh\necho "$0"\n')
        (commands / name).chmod(0o755)
    values = {"PYTHON": commands / "python", "VIRTUAL_ENV": tmp_path, "PATH": f"{commands}:/usr/bin:/bin"}
    environment = {"PATH": "/usr/bin:/bin", variable: str(values[variable])}
    script = ROOT / "recipes" / "ptb_awd_lstm" / "preprocess.sh"
    ended = subprocess.run([script], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == str(commands / "python")


@pytest.mark.slow
def test_the_import_is_light() -> None:
    code = f"import sys, shared_embeddings; print([name for name in {HEAVY} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


@pytest.mark.slow
def test_commands_without_extras_run_or_name_the_extra(tmp_path: Path) -> None:
    hidden = [*sum(EXTRAS.values(), ()), "onmt", "recipes"]
    light = {"shared-embeddings", "lm_train", "lm_evaluate", "lm_generate", "lm_prepare"}
    for command in sorted(COMMANDS):
        ended = run_hiding(hidden, command, "--help", "--")  # not the stored help
        if command in light:
            assert ended.returncode == 0 and "usage" in ended.stdout, (command, ended.stderr)
            continue
        assert ended.returncode == 2 and ended.stderr.count("\n") == 1, (command, ended.stderr)
        assert re.match(rf"{command}: .* not installed: pip install ", ended.stderr), ended.stderr
    (tmp_path / "text").write_text("a b\n" * 9)
    (tmp_path / "words").write_text("a\nb\n")
    asked = ["--text", tmp_path / "text", "--vocab", tmp_path / "words", "--num-classes", 1]
    ended = run_hiding(hidden, "shared-embeddings", "classes", *asked, "--output", tmp_path / "out.npz")
    assert ended.returncode == 2 and "pip install '.[classes]'" in ended.stderr


def test_modules_of_extras_are_their_packages() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    packages = {
        "ahocorasick": "pyahocorasick",
        "fasttext": "fasttext-wheel",
        "sklearn": "scikit-learn",
    }
    for extra, modules in EXTRAS.items():
        names = {re.split(r"[^\w-]", line)[0] for line in extras[extra]} | {"huggingface-hub", "tokenizers"}
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


def test_public_names_are_tidy() -> None:
    names = dir(se)
    assert {se.get_method_config(method).__name__ for method in se.methods()} <= set(se.__all__) <= set(names)
    assert not any(name.startswith("_") and name != "__version__" for name in names)
    assert se.FunnelOptions(rank=3) == se.get_method_config("funnel")(rank=3)
    with pytest.raises(AttributeError, match="has no attribute 'Funnel'"):
        se.Funnel  # noqa: B018
