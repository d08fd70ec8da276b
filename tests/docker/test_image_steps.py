"""Every step of the image as commands in an empty environment: minutes, so IMAGE_STEPS=1 asks for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docker.image import ROOT, stages, without_mounts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("IMAGE_STEPS"), reason="installs everything, minutes; IMAGE_STEPS=1 runs it"
    ),
]
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
    """Run one step of the build where the stage has its project; packages of the system are there already."""
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
    """The project and the environment that the build stage makes, below a folder of their own."""
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
            # The base image says for which CUDA it is; here that is the one of whichever torch pip has found.
            cuda = torch_cuda(venv / "bin" / "python")
            line = without_mounts(text).replace("/opt/shared-embeddings", str(project))
            extra = {"CUDA_VERSION": cuda} if cuda else {}
            run(line.replace("/opt/venv", str(venv)), project, {**environment, **extra})
    return project, venv


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
def test_entry_point_runs_what_was_installed(
    built: tuple[Path, Path], tmp_path: Path, arguments: list[str], words: str
) -> None:
    project, venv = built
    environment = {"PATH": f"{venv / 'bin'}:/usr/bin:/bin", "VIRTUAL_ENV": str(venv), "HOME": str(tmp_path)}
    result = subprocess.run(
        [str(project / "docker" / "entrypoint.sh"), *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert words in result.stdout


def test_commands_are_this_projects(built: tuple[Path, Path]) -> None:
    assert "from nmt.cli import train" in (built[1] / "bin" / "onmt_train").read_text(encoding="utf-8")
