"""Imports without cycles in one direction, and documents that match the code."""

from __future__ import annotations

import ast
import pkgutil
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from shared_embeddings.cli.catalog import methods_table

ROOT = Path(__file__).parents[1]
PACKAGES = ("shared_embeddings", "lm", "nmt", "recipes")

# Top-level packages, each may import those after it (lm and nmt not each other).
MAY_IMPORT = {
    "recipes": {"recipes", "nmt", "lm", "shared_embeddings"},
    "nmt": {"nmt", "shared_embeddings"},
    "lm": {"lm", "shared_embeddings"},
    "shared_embeddings": {"shared_embeddings"},
}

# Folders of shared_embeddings stand on each other in at most this many layers.
MOST_LAYERS = 7


def module_name(path: Path) -> str:
    """The dotted name of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """The modules of this repository that a file imports, anywhere in it."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                imported.add(whole if whole in modules else node.module)
    return (imported & modules) - {module_name(path)}


def graph() -> dict[str, set[str]]:
    """Every module of the packages with the modules that it imports."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    modules = {module_name(path) for path in files}
    return {module_name(path): imports_of(path, modules) for path in files}


def folder_of(module: str) -> str:
    """The folder of a module of shared_embeddings; its own modules are one unit, "core", without "api"."""
    parts = module.split(".")
    return parts[1] if parts[1] == "api" or (ROOT / parts[0] / parts[1]).is_dir() else "core"


def test_no_cycles() -> None:
    TopologicalSorter(graph()).prepare()  # an error names the modules of a cycle


def test_packages_depend_one_way() -> None:
    wrong = [
        f"{module} imports {target}"
        for module, targets in graph().items()
        for target in targets
        if target.split(".")[0] not in MAY_IMPORT[module.split(".")[0]]
    ]
    assert wrong == []


def test_folders_of_the_library_are_layers() -> None:
    below: dict[str, set[str]] = {}
    for module, targets in graph().items():
        if module.startswith("shared_embeddings."):
            folders = {folder_of(target) for target in targets if target.startswith("shared_embeddings.")}
            below.setdefault(folder_of(module), set()).update(folders - {folder_of(module)})
    layers: dict[str, int] = {}
    for folder in TopologicalSorter(below).static_order():
        layers[folder] = 1 + max((layers[name] for name in below[folder]), default=0)
    assert max(layers.values()) <= MOST_LAYERS, layers


DOCUMENTS = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]
README, METHODS = ((ROOT / path).read_text(encoding="utf-8") for path in ("README.md", "docs/methods.md"))


def test_methods_are_those_of_the_registry() -> None:
    assert methods_table() in METHODS, "run `make readme`"


def test_the_reference_lists_what_exists() -> None:
    names = re.findall(r"^::: (\S+)", (ROOT / "docs/reference/library.md").read_text(), re.MULTILINE)
    assert len(names) > 5
    for name in names:
        pkgutil.resolve_name(name)


def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = next(
        code for code in re.findall(r"```python\n(.*?)```", METHODS, re.DOTALL) if "se.build" in code
    )
    code = example.replace("32_000", "3_000")
    exec(compile(code, "docs/methods.md", "exec"), {})
    assert "parameters instead of" in capsys.readouterr().out


def test_documents_are_short() -> None:
    assert len([word for word in README.split() if word.strip("|-")]) <= 1000  # without the bars of tables


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_are_valid(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    paths = set(re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text))
    assert [path for path in sorted(paths) if not ((ROOT / document).parent / path).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    """`mkdocs` itself reports pages of the navigation that are missing."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    listed = set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE))
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    pages |= {f"notebooks/{path.stem}.md" for path in docs.glob("notebooks/*.ipynb")}
    pages |= {path.relative_to(ROOT).as_posix() for path in ROOT.glob("recipes/*/README.md")}
    assert pages <= listed


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(
        re.findall(r"`((?:shared_embeddings|nmt|lm|recipes|tests|docs|docker|benchmarks)/[\w./-]*)`", text)
    )
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
