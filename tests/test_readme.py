"""README.md, CONTRIBUTING.md and docs/ match the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shared_embeddings.utils import stubs

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_methods_are_those_of_the_registry() -> None:
    assert stubs.readme() == README, "run `make stubs`"


def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = next(
        code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "se.build" in code
    )
    code = example.replace("32_000", "3_000")
    exec(compile(code, "README.md", "exec"), {})
    assert "parameters instead of" in capsys.readouterr().out


def test_it_stays_short() -> None:
    assert len(README.split()) <= 1500


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
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
    assert pages <= listed


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(
        re.findall(r"`((?:shared_embeddings|nmt|lm|recipes|tests|docs|docker|benchmarks)/[\w./-]*)`", text)
    )
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
