"""Records say where they come from, and are written whole or not at all."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from shared_embeddings.utils.results import (
    ROOT,
    describe_device,
    git_state,
    provenance,
    versions,
    write_record,
)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_git_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) == (None, None)
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == (None, None)
    (tmp_path / "file").write_text("x")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "m")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_state(tmp_path) == (commit, False)
    (tmp_path / "file").write_text("y")
    assert git_state(tmp_path) == (commit, True)
    # A folder inside somebody's tree is not that tree.
    (tmp_path / "inner").mkdir()
    assert git_state(tmp_path / "inner") == (None, None)


def test_provenance() -> None:
    found = provenance(["torch"])
    assert set(found) == {"date", "git", "versions", "device"}
    assert set(found["versions"]) == {"python", "torch"}
    assert versions(["no-such-package"])["no-such-package"] is None
    assert describe_device("cpu").endswith("threads")


def test_paths_are_told_from_the_root_on(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_record(path, {"a": [str(ROOT / "runs" / "x"), {"b": "/elsewhere"}], "n": 1})
    assert json.loads(path.read_text()) == {"a": [str(Path("runs") / "x"), {"b": "/elsewhere"}], "n": 1}


@pytest.mark.parametrize("bad", [float("nan"), object()])
def test_what_json_cannot_say(bad: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_record(tmp_path / "results.json", {"a": bad})
    assert list(tmp_path.iterdir()) == []
