"""Hooks of mkdocs for `make docs`: pages outside of ``docs/``, and parts generated from code and results.

A line ``<!-- generated: NAME -->`` in a page is replaced by the Markdown that `GENERATED` makes. Links lead
to the same file of the repository as on disk; links to files that are not on the site keep their text only.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import posixpath
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pandas as pd
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# Files of the repository that are pages of the site, at the same path, and the figures next to them.
PAGES = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md"),
    *("recipes/README.md", "recipes/*/README.md", "benchmarks/README.md", "docker/README.md"),
    *("recipes/*/*.png", "benchmarks/*.png"),
)
_LINK = re.compile(r"(?P<before>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
_CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name the version of the package in the header and in the titles of pages."""
    config.site_name += f" {metadata.version('shared-embeddings')}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages outside of ``docs/``, notebooks, and the report of all results."""
    from recipes.common.recipe import runs_folder
    from recipes.report import write_report

    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        page = f"notebooks/{notebook.stem}.md"
        files.append(File.generated(config, page, content=notebook_markdown(notebook)))
    with TemporaryDirectory() as folder:
        write_report(Path(folder), runs_folder())
        for path in sorted(Path(folder).iterdir()):
            files.append(File.generated(config, f"report/{path.name}", content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert generated parts, and convert links to pages of the site."""
    markdown = _MARK.sub(lambda mark: GENERATED[mark[1]](), markdown)
    on_site = {repository_path(file.src_uri): file.src_uri for file in files}
    parts = _CODE.split(markdown)
    parts[::2] = [
        _LINK.sub(lambda link: site_link(link, page.file.src_uri, on_site), part) for part in parts[::2]
    ]
    parts[1::2] = [re.sub(r"\A```$", "```bash", part, flags=re.MULTILINE) for part in parts[1::2]]
    return "".join(parts)


def repository_path(page: str) -> str:
    """Return the path in the repository of a page of the site."""
    return page if (ROOT / page).exists() else f"docs/{page}"


def site_link(link: re.Match[str], page: str, on_site: dict[str, str]) -> str:
    """Convert a Markdown link of a page for the site, given the files of the site by their paths."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(repository_path(page)), link["target"]))
    if target in on_site:
        relative = posixpath.relpath(on_site[target], posixpath.dirname(page) or ".")
        return f"{link['before']}[{link['text']}]({relative}{link['anchor'] or ''})"
    return link["text"] if (ROOT / target).exists() else link[0]


def notebook_markdown(path: Path) -> str:
    """Convert a notebook to Markdown: text, code and output."""
    parts = [f"<!-- {path.name} -->"]
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if output.get("name") == "stdout":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def methods() -> str:
    """Return a table of all methods, and a section for each with docstring and options."""
    from recipes.common.table import markdown
    from shared_embeddings import registry
    from shared_embeddings.cli.catalog import methods_table, options_of

    parts = [methods_table()]
    for name in registry.methods():
        docstring = inspect.cleandoc(registry.get_method_config(name).embedding_class.__doc__ or "")
        options = pd.DataFrame(options_of(name), columns=["option", "value", "default", "meaning"])
        options["option"] = "`" + options["option"] + "`"
        parts += [f"## {name}", docstring.replace("\nArgs:", "\n\nArgs:"), markdown(options.fillna(""))]
    return "\n\n".join(parts)


def commands() -> str:
    """Return ``--help`` of all commands, except OpenNMT-py's."""

    def help_of(command: metadata.EntryPoint, *arguments: str) -> str:
        printed, words = io.StringIO(), [command.name, *arguments, "--help"]
        with mock.patch.object(sys, "argv", words), redirect_stdout(printed), suppress(SystemExit):
            command.load()()
        return f"### {' '.join(words[:-1])}\n\n```text\n{printed.getvalue().rstrip()}\n```"

    parts = []
    with mock.patch.dict(os.environ, COLUMNS="100"):
        for command in sorted(metadata.entry_points(group="console_scripts"), reverse=True):
            if command.module.split(".")[0] in ("lm", "shared_embeddings"):
                listed = help_of(command)
                names = re.findall(r"^    ([a-z]+) ", listed, re.MULTILINE)
                parts += [listed, *(help_of(command, name) for name in names)]
    return "\n\n".join(parts)


def papers() -> str:
    """Return the numbers of rows in each paper, of those in recipes, of sizes, and of those that agree."""
    from recipes.papers import papers_table, read_papers

    return papers_table(read_papers())


def sizes() -> str:
    """Return the comparison of every size in the papers with ours."""
    from recipes.papers import read_papers, sizes_tables

    return sizes_tables(read_papers())


GENERATED: dict[str, Callable[[], str]] = {
    "methods": methods,
    "commands": commands,
    "papers": papers,
    "sizes": sizes,
}
