"""A parser for docker/Dockerfile: its stages and their instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

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
