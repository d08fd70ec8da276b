"""Leave out of the image what its commands do not need, at the end of the build, and load the rest.

Packages go that neither the project's extra ``all`` nor OpenNMT-py requires, and folders of tests and
headers. pip compiled no modules (``PIP_COMPILE=0``): those in use are compiled here, by loading them.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOTS = ("shared-embeddings[all]", "OpenNMT-py", "pip")
UNUSED = (
    *("*/**/tests", "torch/test", "torch/bin/*[tT]est*", "torch/bin/protoc*"),
    *("gensim/test", "onnx/backend/test"),
)
HEADERS = ("torch/include", "nvidia/**/include", "**/*.a")


def required(roots: Sequence[str]) -> set[str]:
    """Return the normalized names of installed packages that `roots` need, including themselves."""
    waiting = [Requirement(root) for root in roots]
    visited: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        for extra in {"", *requirement.extras}:
            name = canonicalize_name(requirement.name)
            if (name, extra) in visited:
                continue
            visited.add((name, extra))
            for line in metadata.requires(name) or []:
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    waiting.append(needed)
    return {name for name, _ in visited}


def remove(packages: Path, patterns: Sequence[str]) -> None:
    """Remove the files and folders below `packages` that match."""
    for pattern in patterns:
        for path in list(packages.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def import_all(names: Sequence[str]) -> None:
    """Import every module of these packages."""
    for name in names:
        for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


if __name__ == "__main__":
    packages = Path(sysconfig.get_path("purelib"))
    names = [distribution.metadata["Name"] for distribution in metadata.distributions()]
    unused = sorted(set(map(canonicalize_name, names)) - required(ROOTS))
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *unused], check=True)
    remove(packages, UNUSED if os.environ.get("COMPILER") else UNUSED + HEADERS)
    import_all(["shared_embeddings", "nmt", "lm", "recipes"])
    print(f"slim: without {' '.join(unused)}")
