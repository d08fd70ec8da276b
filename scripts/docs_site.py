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
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

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
NOTEBOOKS = "notebooks"
_LINK = re.compile(r"(?P<before>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
_CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
# Rows of a page, and of tables: longer tables are folded, of longer pages all but short ones.
_LONG_PAGE, _LONG, _SHORT = 200, 20, 3
_MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages outside of ``docs/`` and those of notebooks."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    for notebook in sorted((ROOT / "docs" / NOTEBOOKS).glob("*.ipynb")):
        page = f"{NOTEBOOKS}/{notebook.stem}.md"
        files.append(File.generated(config, page, content=notebook_markdown(notebook)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert generated parts, convert links to pages of the site, and fold long tables."""
    markdown = _MARK.sub(lambda mark: GENERATED[mark[1]](), markdown)
    on_site = {repository_path(file.src_uri): file.src_uri for file in files}
    parts = _CODE.split(markdown)
    parts[::2] = [
        _LINK.sub(lambda link: site_link(link, page.file.src_uri, on_site), part) for part in parts[::2]
    ]
    rows = sum(table[0].count("\n") for part in parts[::2] for table in _TABLE.finditer(part))
    most = _SHORT if rows > _LONG_PAGE else _LONG
    parts[::2] = [_TABLE.sub(lambda table: folded(table[0], most), part) for part in parts[::2]]
    return "".join(parts)


def folded(table: str, most: int) -> str:
    """A table, which is shown on a click if it has more than `most` rows."""
    rows = table.count("\n") - 2
    return (
        table
        if rows <= most
        else f'<details markdown="1"><summary>{rows} rows</summary>\n\n{table}\n</details>\n'
    )


def repository_path(page: str) -> str:
    """Return the path in the repository of a page of the site."""
    return page if (ROOT / page).exists() else f"docs/{page}"


def site_link(link: re.Match[str], page: str, on_site: dict[str, str]) -> str:
    """Convert a link of a page for the site.

    Args:
        link: a match of a Markdown link to a file.
        page: the page of the site that has it.
        on_site: the files of the site by their paths in the repository.
    """
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
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if output.get("name") == "stdout":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def methods() -> str:
    """Return a table of all methods, and a section for each with docstring and options."""
    from shared_embeddings import registry
    from shared_embeddings.cli.main import methods_table, options_of

    parts = [methods_table()]
    for name in registry.methods():
        method = registry.options(name).embedding_class
        lines = ["| option | value | default | meaning |", "| --- | --- | --- | --- |"]
        for option, *columns in options_of(name):
            accepted, default, description = (column or "" for column in columns)
            lines.append(f"| `{option}` | {accepted} | {default} | {description} |")
        parts += [
            f"## {name}",
            inspect.cleandoc(method.__doc__ or "").replace("\nArgs:", "\n\nArgs:"),
            "\n".join(lines),
        ]
    return "\n\n".join(parts)


def commands() -> str:
    """Return ``--help`` of all commands."""
    from lm.data import prepare
    from lm.evaluate import command as evaluate
    from lm.evaluate import generate
    from lm.train import command as train
    from shared_embeddings.cli.main import main

    os.environ["COLUMNS"] = "100"
    listed = help_of(main)
    names = re.findall(r"^    ([a-z]+) ", listed, re.MULTILINE)
    parts = [("shared-embeddings", listed)]
    parts += [(f"shared-embeddings {name}", help_of(main, name)) for name in names]
    modules = {"lm_prepare": prepare, "lm_train": train, "lm_evaluate": evaluate, "lm_generate": generate}
    parts += [(name, help_of(module.main)) for name, module in modules.items()]
    return "\n\n".join(f"### {name}\n\n```text\n{text.rstrip()}\n```" for name, text in parts)


def help_of(main: Callable[[list[str]], Any], *arguments: str) -> str:
    """Return the output of a command with ``--help``."""
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        main([*arguments, "--help"])
    return printed.getvalue()


def papers() -> str:
    """Return the numbers of rows and sizes in each paper, of trained rows, and of sizes that agree."""
    from recipes.papers import figures, read_papers

    measured = _measured_rows()
    lines = [
        "| paper | rows | trained by a recipe | measured here | sizes in print | agree | differ | quoted |",
        "| --- |" + " --: |" * 7,
    ]
    for paper in read_papers():
        cells = [cell for table in paper.tables for cell in table.cells]
        trained = [cell.trained_by for cell in cells if cell.trained_by]
        sizes = Counter(figure.agreement.split(" ")[0] for figure in figures([paper]))
        counts = [len(cells), len(trained), sum(row in measured for row in trained)]
        counts += [sum(sizes.values()), sizes["agrees"], sizes["differs"], sizes["quoted"]]
        lines.append(" | ".join([f"| {paper.title}", *map(str, counts)]) + " |")
    return "\n".join(lines)


def _measured_rows() -> set[str]:
    """Return ``RECIPE/ROW`` of all rows with committed results."""
    from recipes.common.results import FILE, read_results

    return {
        f"{path.parent.name}/{record['row']}"
        for path in (ROOT / "recipes").glob(f"*/{FILE}")
        for record in read_results(path)
    }


def ledger() -> str:
    """Return the comparison of every size in the papers with ours."""
    from recipes.papers import describe_ledger, read_papers

    return describe_ledger(read_papers())


GENERATED: dict[str, Callable[[], str]] = {
    "methods": methods,
    "commands": commands,
    "papers": papers,
    "ledger": ledger,
}
