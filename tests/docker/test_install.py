"""scripts/install.sh, with a stand-in for Python that notes down how pip is called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.docker.image import ROOT

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
    """What pip is told to install, the exit code, and stderr; `failing` is the call that does not work."""
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


def test_all_steps_in_order(tmp_path: Path) -> None:
    assert install(tmp_path) == (list(CALLS.values()), 0, "")


@pytest.mark.parametrize("step", CALLS)
def test_one_step(tmp_path: Path, step: str) -> None:
    assert install(tmp_path, step) == ([CALLS[step]], 0, "")


def test_torch_that_is_there_is_checked_quietly(tmp_path: Path) -> None:
    calls, status, _ = install(tmp_path, "torch", failing="nothing")
    assert (calls, status) == ([CALLS["torch"].replace("install", "install --quiet", 1)], 0)


def test_build_of_torch_can_be_chosen(tmp_path: Path) -> None:
    pin = (ROOT / "requirements" / "torch.txt").read_text().splitlines()[-1]
    wanted = f"install --extra-index-url https://download.pytorch.org/whl/cu128 {pin}+cu128"
    assert install(tmp_path, "torch", build="cu128") == ([wanted], 0, "")


def test_nothing_follows_a_step_that_failed(tmp_path: Path) -> None:
    calls, status, _ = install(tmp_path, failing="requirements/opennmt.txt")
    assert status == 1
    assert calls[3:] == [CALLS["opennmt"]]


def test_unknown_step(tmp_path: Path) -> None:
    calls, status, error = install(tmp_path, "pytorch")
    assert (calls, status) == ([], 2)
    assert error == "set-up: no step 'pytorch'; there are installer, packages, torch, opennmt and project\n"
