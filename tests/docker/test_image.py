"""The Dockerfile, scripts/install.sh, and, if IMAGE_STEPS=1, every step of the image."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docker.check_build import disagreement

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"


@dataclass
class Stage:
    """One stage of the build, with pairs such as ("RUN", "apt-get update") in order."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        """The arguments of every instruction of one kind."""
        return [text for word, text in self.instructions if word == keyword]


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with continued lines joined, without comments."""
    lines = (DOCKER / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", text)
    pairs = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(keyword, rest) for keyword, rest in pairs]


def stages() -> dict[str, Stage]:
    """The stages by name, in order."""
    found: dict[str, Stage] = {}
    for keyword, text in instructions():
        if keyword == "FROM":
            base, word, name = text.split()
            assert word == "AS"
            found[name] = Stage(base, name)
        elif found:
            list(found.values())[-1].instructions.append((keyword, text))
    return found


def ancestry(name: str) -> list[Stage]:
    """A stage and its base stages, the first one first."""
    all_stages = stages()
    line = [all_stages[name]]
    while line[0].base in all_stages:
        line.insert(0, all_stages[line[0].base])
    return line


def without_mounts(command: str) -> str:
    """A RUN instruction as a shell command, without the options of RUN itself."""
    return re.sub(r"^(--\S+\s+)+", "", command)


def write_program(path: Path, body: str) -> None:
    """Write a stand-in for a command as a shell script."""
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


STEPS = ["installer", "packages", "torch", "opennmt", "project"]
FINAL = ["train", "server"]
BUILD_TOOLS = r"\b(gcc|g\+\+|make|cmake|build-essential|python3-dev|python3-venv|git|curl|wget|devel)\b"


def test_steps_match_the_setup_in_order() -> None:
    taken: list[str] = []
    for command in stages()["build"].all("RUN"):
        for call in re.findall(r"scripts/install\.sh /opt/venv/bin/python((?: [a-z]+)+)", command):
            taken += call.split()
    assert taken == STEPS
    # An ARG is in the environment of the steps after it, where scripts/install.sh reads it.
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert text.index("ARG TORCH_BUILD=") < text.index("install.sh /opt/venv/bin/python torch opennmt")
    install = (ROOT / "scripts" / "install.sh").read_text(encoding="utf-8")
    assert f"steps=({' '.join(STEPS)})" in install
    setup = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    assert 'scripts/install.sh "$venv/bin/python"\n' in setup


@pytest.mark.parametrize("name", FINAL)
def test_user_entry_point_and_volumes(name: str) -> None:
    """The user is numeric and unprivileged, and only the build stage has the tools."""

    def all_of(keyword: str) -> list[str]:
        return [text for stage in ancestry(name) for text in stage.all(keyword)]

    user, made = all_of("USER")[-1].split(":"), " ".join(all_of("RUN"))
    assert all(number.isdecimal() and int(number) >= 10000 for number in user)
    assert f"useradd --uid {user[0]} " in made
    assert not re.search(BUILD_TOOLS, re.sub(r"--mount=\S+", "", made))
    (entry,), (environment,), (volumes,) = all_of("ENTRYPOINT"), all_of("ENV"), all_of("VOLUME")
    path = ROOT / Path(json.loads(entry)[-1]).relative_to("/opt/shared-embeddings")
    assert path.is_file() and os.access(path, os.X_OK)
    assert {"DATA_DIR=/data", "RUNS=/runs"} <= set(environment.split())
    assert json.loads(volumes) == ["/data", "/runs"]
    (label,) = stages()["base"].all("LABEL")
    (version,) = re.findall(r'org.opencontainers.image.version="([^"]*)"', label)
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_copied_files_are_not_ignored() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in allowed)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert packages | {"requirements", "scripts", "docker", "pyproject.toml", "README.md"} <= allowed
    for text in stages()["build"].all("COPY"):
        source = text.split()[0]
        assert source == "." or source.split("/")[0] in allowed


@pytest.mark.parametrize(
    ("built_for", "base", "words"),
    [
        ("13.0", "13.0.2", None),
        ("12.8", "12.6.3", None),
        (None, None, None),
        ("13.0", "12.8.1", "torch is built for CUDA 13.0, the base image has CUDA 12.8.1"),
        (None, "13.0.2", "torch is built for no CUDA, the base image has CUDA 13.0.2"),
        ("13.0", None, "torch is built for CUDA 13.0, the base image has no CUDA"),
    ],
)
def test_torch_has_the_cuda_of_the_base_image(
    built_for: str | None, base: str | None, words: str | None
) -> None:
    problem = disagreement(built_for, base)
    assert problem is None if words is None else problem and problem.startswith(words)
    assert problem is None or "TORCH_BUILD" in problem


SCRIPT = ROOT / "scripts" / "install.sh"
HASHED = "install --quiet --no-deps --require-hashes"
CALLS = {
    "installer": f"{HASHED} --requirement requirements/installer.txt",
    "packages": f"{HASHED} --no-build-isolation --requirement requirements/pins.txt",
    "torch": "install --requirement requirements/torch.txt",
    "opennmt": f"{HASHED} --requirement requirements/opennmt.txt",
    "project": "install --quiet --no-deps --no-build-isolation --editable .",
}


def install(
    folder: Path, *steps: str, failing: str = "pip show torch", build: str = ""
) -> tuple[list[str], int, str]:
    """The arguments of pip, the exit code, and stderr; `failing` is the call that fails."""
    python = folder / "python"
    python.write_text(
        "#!/bin/bash\n"
        f'[ "$PWD" = "{ROOT}" ] || exit 9\n'
        f'echo "$@" >>"{folder}/calls"\n'
        f'[[ "$*" != *"{failing.removeprefix("pip ")}"* ]]\n'
    )
    python.chmod(0o755)
    command = ["bash", str(SCRIPT), str(python), *steps]
    environment = {**os.environ, "TORCH_BUILD": build}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    lines = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    prefix = "-m pip --disable-pip-version-check "
    assert all(line.startswith(prefix) for line in lines)
    calls = [line.removeprefix(prefix) for line in lines]
    return [call for call in calls if call.startswith("install")], result.returncode, result.stderr


def test_steps_of_the_installation(tmp_path: Path) -> None:
    def fresh(name: str, *steps: str, **options: str) -> tuple[list[str], int, str]:
        (tmp_path / name).mkdir()
        return install(tmp_path / name, *steps, **options)

    assert fresh("all") == (list(CALLS.values()), 0, "")
    assert fresh("two", "torch", "project") == ([CALLS["torch"], CALLS["project"]], 0, "")
    # An installed torch is checked silently; another build is from its own index.
    silent = CALLS["torch"].replace("install", "install --quiet", 1)
    assert fresh("installed", "torch", failing="nothing") == ([silent], 0, "")
    pin = (ROOT / "requirements" / "torch.txt").read_text().splitlines()[-1]
    built = f"install --extra-index-url https://download.pytorch.org/whl/cu128 {pin}+cu128"
    assert fresh("build", "torch", build="cu128") == ([built], 0, "")
    calls, status, _ = fresh("failing", failing="requirements/opennmt.txt")
    assert status == 1 and calls[3:] == [CALLS["opennmt"]]
    calls, status, error = fresh("unknown", "pytorch")
    assert (calls, status) == ([], 2)
    assert error == "set-up: no step 'pytorch'; expected installer, packages, torch, opennmt or project\n"


needs_image_steps = pytest.mark.skipif(
    not os.environ.get("IMAGE_STEPS"), reason="installs everything, minutes; IMAGE_STEPS=1 runs it"
)
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", "data", "run", "runs", ".*")


def copy(source: str, project: Path) -> None:
    """What COPY does with this repository: the files that .dockerignore lets in."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    names = [line[1:] for line in lines if line.startswith("!")] if source == "." else [source.rstrip("/")]
    for name in names:
        target = project / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=IGNORED, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / name, target)


def run(command: str, project: Path, environment: dict[str, str]) -> None:
    """Run one step of the build in the stage's project; system packages are already installed."""
    parts = [
        part for part in command.split(" && ") if not part.startswith(("apt-get", "rm -rf /var/lib/apt"))
    ]
    subprocess.run(["bash", "-c", " && ".join(parts)], cwd=project, env=environment, check=True)


def torch_cuda(python: Path) -> str:
    """The version of CUDA that the installed torch is built for; empty without."""
    if not python.exists() or not list(python.parent.parent.glob("lib/python*/site-packages/torch")):
        return ""
    program = "import torch; print(torch.version.cuda or '')"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The project and the environment of the build stage, in a separate folder."""
    top = tmp_path_factory.mktemp("image")
    project, venv = top / "shared-embeddings", top / "venv"
    project.mkdir()
    environment = {
        name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    environment["PATH"] = f"{Path(sys.base_prefix) / 'bin'}:/usr/bin:/bin"
    for keyword, text in stages()["build"].instructions:
        if keyword == "COPY":
            copy(text.split()[0], project)
        if keyword == "RUN":
            # The base image sets the CUDA version; here it is that of the installed torch.
            cuda = torch_cuda(venv / "bin" / "python")
            line = without_mounts(text).replace("/opt/shared-embeddings", str(project))
            extra = {"CUDA_VERSION": cuda} if cuda else {}
            run(line.replace("/opt/venv", str(venv)), project, {**environment, **extra})
    return project, venv


@needs_image_steps
@pytest.mark.slow
def test_versions_are_the_pins(built: tuple[Path, Path]) -> None:
    (packages,) = built[1].glob("lib/python*/site-packages")
    installed = {
        canonicalize_name(found.metadata["Name"]): found.version.split("+")[0]
        for found in metadata.distributions(path=[str(packages)])
    }
    pins = {
        canonicalize_name(pin.name): next(iter(pin.specifier)).version
        for path in (ROOT / "requirements").glob("*.txt")
        for pin in map(Requirement, re.findall(r"^[^#\s].*==.*?(?= \\\\$|$)", path.read_text(), re.MULTILINE))
        if pin.marker is None or pin.marker.evaluate()
    }
    assert {name: installed.get(name) for name in pins} == pins
    beside = {name for name in set(installed) - set(pins) if not name.startswith(("nvidia-", "cuda-"))}
    assert beside <= {"shared-embeddings", "triton"}


@needs_image_steps
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["onmt_translate", "--help"], "-model"),
        (["lm_train", "--help"], "embedding"),
        (["shared-embeddings", "methods"], "funnel"),
        (["recipes/ptb_awd_lstm/train.sh", "--help"], "small_funnel"),
        (["tensorboard", "--version"], "2."),
    ],
)
def test_entry_point_runs_the_installed_package(
    built: tuple[Path, Path], tmp_path: Path, arguments: list[str], words: str
) -> None:
    project, venv = built
    environment = {"PATH": f"{venv / 'bin'}:/usr/bin:/bin", "VIRTUAL_ENV": str(venv), "HOME": str(tmp_path)}
    command = [str(project / "docker" / "entrypoint.sh"), *arguments]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert words in result.stdout
    assert "from nmt.cli import train" in (venv / "bin" / "onmt_train").read_text(encoding="utf-8")
