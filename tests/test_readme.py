"""README.md, CONTRIBUTING.md and docs/ match the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shared_embeddings.cli.catalog import methods_table

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_methods_are_those_of_the_registry() -> None:
    """``shared-embeddings methods --format markdown`` prints what belongs between the markers."""
    listed = README.split("<!-- BEGIN methods -->\n")[1].split("\n<!-- END methods -->")[0]
    assert listed == methods_table()


def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = next(
        code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "se.build" in code
    )
    code = example.replace("32_000", "3_000")
    exec(compile(code, "README.md", "exec"), {})
    assert "parameters instead of" in capsys.readouterr().out


def test_it_stays_short() -> None:
    assert len(README.split()) <= 1500


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_somewhere(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(
        re.findall(r"`((?:shared_embeddings|nmt|lm|recipes|tests|docs|docker|benchmarks)/[\w./-]*)`", text)
    )
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
