"""The report: what it reads from results files and shows of them, and whether a browser can display it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from recipes.common.recipe import RECIPES, Recipe, recipe_names
from recipes.common.tools import run_main
from recipes.papers import Figure
from recipes.report import contents as command
from recipes.report import page as page_of_blocks
from recipes.report.lines import Line, chosen, collect, commands, flatten, lines_of, of_runs, spreads
from recipes.report.page import Block, Details, Heading, Paragraph, Table, as_markdown, as_page
from tests.recipes.browser import Page, browser_page, find_browser

VOID = {"meta", "wbr", "link", "img", "br", "hr", "input"}
ROWS = """
kind: language_model
groups: {common: {}}
rows:
  standard: {embedding: {method: standard}}
tables:
- paper: DeFINE
  table: Table 1a
  title: t
  rows:
  - row: R3 <&>
    name: table1_a
    figures: {perplexity: 41.17, training_ms: 298, total: 33.02}
    embedding: {method: define, map_dim: 8}
  - row: R4
    name: table1_b
    figures: {perplexity: 38.01}
    embedding: {method: define}
    distill: {teacher: standard, alpha: 0.1}
- paper: ALONE
  table: Table 3
  title: t
  rows: [{row: Real, name: table3, figures: {perplexity: 30}, embedding: {method: alone}}]
"""


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    """A folder with one recipe of four rows and one with only a script."""
    folder = tmp_path / "repository" / "recipes"
    for recipe in ("small_lm", "other"):
        (folder / recipe).mkdir(parents=True)
        (folder / recipe / "README.md").write_text(f"# The {recipe} & friends\n")
    (folder / "small_lm" / "rows.yaml").write_text(ROWS)
    (folder / "small_lm" / "train.sh").touch()
    (folder / "other" / "run.sh").touch()
    (folder / "common").mkdir()
    return folder


@pytest.fixture(autouse=True)
def ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two printed sizes instead of 305 that take seconds."""
    shared = {"paper": "UnClE", "table": "Table 4", "row": "x", "counted": "total", "indices": False}
    values = {"printed": "1", "unit": "M", "paper_value": 1e6, "our_value": 1e6, "difference": 0.0}
    rest: dict[str, Any] = {"quoted": False, "notes": (), "model": None}
    found = [Figure(**shared, **values, agreement=each, **rest) for each in ("agrees", "differs")]
    monkeypatch.setattr(command, "figures", lambda papers: found)


@pytest.fixture(autouse=True)
def without_vega(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without the library of the charts, which takes seconds to bundle, unless a browser shows them."""
    if "page" not in request.fixturenames:
        monkeypatch.setattr(page_of_blocks, "vega", lambda: "")
        monkeypatch.setattr(page_of_blocks, "as_svg", lambda spec: "<svg></svg>")


def record(row: str = "standard", seed: int = 1, perplexity: float = 50.0, **changes: Any) -> dict[str, Any]:
    """A result of a language model."""
    return {
        "row": row,
        "config": {"embedding": {"method": "define"}, "seed": seed},
        "counts": {"embedding": 2_000_000, "output": 500_000, "rest": 6_000_000, "total": 8_000_000}
        | {"stored_bits": 32 * 8_000_000}
        | {"dense_embedding": 8_000_000},
        "metrics": {"perplexity": perplexity, "training_seconds": 90.0, "training_ms": 30.0 + seed},
        "data_checksum": "c" * 64,
        "date": f"2026-01-0{seed}T00:00:00+00:00",
        "git": {"commit": "f" * 40, "dirty": True},
        **changes,
    }


def write(folder: Path, content: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "results.jsonl").open("a") as file:
        file.write(f"{content if isinstance(content, str) else json.dumps(content)}\n")


def flat(blocks: Sequence[Block]) -> Iterator[Block]:
    """The blocks, and those in details."""
    for block in blocks:
        yield block
        if isinstance(block, Details):
            yield from flat(block.blocks)


def cells(blocks: list[Block], anchor: str) -> list[dict[str, str]]:
    """The first table after a heading, as mappings from column to cell; the first of equal columns counts."""
    found = list(flat(blocks))
    begin = next(i for i, b in enumerate(found) if isinstance(b, Heading) and b.anchor == anchor)
    table = next(block for block in found[begin:] if isinstance(block, Table))
    return [dict(zip(table.columns[::-1], row[::-1], strict=True)) for row in table.rows]


class Checker(HTMLParser):
    """Whether tags are closed in their order, and what the page refers to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.named: dict[str, list[str]] = {"id": [], "link": [], "resource": [], "data-chart": []}
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: str(value) for name, value in attrs}
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name in ("id", "data-chart"):
            self.named[name] += [found[name]] if name in found else []
        if "data-chart" in found:
            assert found["aria-label"]
        resources = [found[name] for name in ("src", "href", "srcset") if name in found]
        self.named["link" if tag == "a" else "resource"] += resources

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


def test_page_is_self_contained(recipes: Path, tmp_path: Path) -> None:
    write(recipes / "small_lm", record())
    write(tmp_path / "runs" / "small_lm", record("table1_a", perplexity=45.25))
    blocks = command.build(recipes, tmp_path / "runs")
    page = as_page(blocks)
    checker = Checker(page)
    found, ids = checker.named, checker.named["id"]
    assert len(ids) == len(set(ids))
    assert {link.removeprefix("#") for link in found["link"]} <= set(ids)
    assert {"define-table-1a", "alone-table-3", "small-lm", "printed-sizes"} <= set(ids)
    assert found["data-chart"] == ["small_lm-quality-0", "small_lm-parameters"]
    specs = json.loads(page.split('id="charts">')[1].split("</script>")[0])
    assert specs.keys() == set(found["data-chart"])
    assert {one["row"] for one in specs["small_lm-quality-0"]["data"]["values"]} == {"standard", "table1_a"}
    assert found["resource"] and all(resource.startswith("data:") for resource in found["resource"])
    assert checker.seen.count("h1") == 1 and {"main", "nav"} <= {*checker.seen}
    assert "@import" not in page
    assert 'name="viewport"' in page and "prefers-color-scheme" in page
    assert "R3 &lt;&amp;&gt;" in page


def test_paper_figures_next_to_ours(recipes: Path, tmp_path: Path) -> None:
    values = {1: 45.0, 2: 46.0, 3: 44.0}
    for seed, value in values.items():
        write(tmp_path / "runs" / "small_lm" / f"a{seed}", record("table1_a", seed, value))
    blocks = command.build(recipes, tmp_path / "runs")
    [first, second] = cells(blocks, "define-table-1a")
    assert first["row of the paper"] == "R3 <&>"
    assert first["our config"] == "small_lm/table1_a"
    assert first["test perplexity: paper"] == "41.17"
    assert first["difference"] == f"{statistics.mean(values.values()) - 41.17:+.2f}" == "+3.83"
    assert first["total parameters (M): paper"] == "33.02"
    assert first["training (ms per batch): paper"] == "298"
    assert second["training (ms per batch): paper"] == "–"
    markdown = as_markdown(blocks)
    assert "45.00 ± 1.00 (3 seeds)" in markdown and "32 ± 1 (3 seeds)" in markdown
    assert second["test perplexity: paper"] == "38.01"
    assert set(second.values()) >= {"not run", "–"}
    assert [row["ours"] for row in cells(blocks, "alone-table-3")] == ["not run"]
    tables = [block for block in flat(blocks) if isinstance(block, Table)]
    assert next(t.idle for t in tables if ["R4", "small_lm/table1_b"] == list(t.rows[-1][:2])) == [1]
    assert cells(blocks, "glance")[1]["rows run"] == "1 of 4"
    [row] = cells(blocks, "small-lm")
    sizes = ("embedding (M)", "times smaller", "all parameters (M)", "embedding (MB)", "training (min)")
    assert [row[name] for name in sizes] == ["2.000", "4.0", "8.000", "8.000", "1.5"]
    assert cells(blocks, "printed-sizes") == [
        {"printed sizes of": "UnClE, Table 4", "agrees": "1", "differs": "1"}
    ]
    assert "ffffffffff with changes" in markdown


def test_empty_repository_is_reported(recipes: Path) -> None:
    blocks = command.build(recipes, None)
    assert any(isinstance(b, Paragraph) and "There are no results yet" in b.text for b in blocks)
    assert Checker(as_page(blocks)).named["data-chart"] == []
    assert "left-out" not in as_page(blocks)


@pytest.mark.slow_except("[1, 2]-line 1: invalid result, row is missing")
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"row": "x"', "line 1: invalid result"),
        ("[1, 2]", "line 1: invalid result, row is missing"),
        ('{"row": "x"}', "line 1: invalid result, config is missing"),
        (record(row=3), "line 1: invalid result, row is missing"),
        (record(metrics=[1.0]), "line 1: invalid result, metrics is missing"),
        (record(metrics={}), "metrics is empty"),
        (record(metrics={"perplexity": math.nan}), "metrics has a number that is not finite"),
        (record(config={"embedding": "define"}), 'config: embedding is "define"'),
    ],
)
def test_unusable_files_are_named(recipes: Path, tmp_path: Path, content: Any, reason: str) -> None:
    write(tmp_path / "runs" / "small_lm" / "bad", content)
    write(tmp_path / "runs" / "small_lm" / "good", record())
    blocks = command.build(recipes, tmp_path / "runs")
    [left_out] = [block.texts for block in blocks if hasattr(block, "texts")]
    [text] = left_out
    assert text.startswith("runs/small_lm/bad/results.jsonl") and reason in text
    assert str(tmp_path) not in as_markdown(blocks)
    assert cells(blocks, "small-lm")[0]["row"] == "standard"


def test_only_equal_runs_are_averaged(recipes: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write(runs / "small_lm" / "1", record(seed=1, perplexity=10.0))
    write(runs / "small_lm" / "2", record(seed=2, perplexity=20.0))
    write(runs / "small_lm" / "old", record(seed=2, perplexity=99.0, date="2025-01-01"))
    write(runs / "small_lm" / "data", record(seed=3, perplexity=99.0, data_checksum="d", date="2025-01-01"))
    # A copy of the first is neither another seed nor skipped.
    write(recipes / "small_lm", record(seed=1, perplexity=10.0))
    found, left_out = collect([*of_runs(runs)], ["small_lm"])
    assert left_out == []
    lines, replaced = lines_of(Recipe(recipes / "small_lm"), found)
    [line] = [line for line in lines if line.runs]
    assert [run.seed for run in line.runs] == [1, 2]
    assert line.measured["perplexity"].mean == 15.0
    assert line.measured["perplexity"].deviation == pytest.approx(math.sqrt(50))
    assert {(one.name, one.reason.split(" ")[0]) for one in replaced} == {
        ("runs/small_lm/old/results.jsonl, standard", "runs/small_lm/2/results.jsonl"),
        ("runs/small_lm/data/results.jsonl, standard", "has"),
    }


def test_same_input_gives_the_same_bytes(
    recipes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "RECIPES", recipes)
    runs = tmp_path / "runs"
    write(runs / "small_lm" / "1", record())
    contents = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        assert run_main("report", command.main, ["--runs", str(runs), "--output", str(folder)]) == 0
        contents.append({path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")})
    assert contents[0] == contents[1]
    assert {str(path) for path in contents[0]} == {
        "report.md",
        "report.html",
        "figures/small_lm-quality-0.svg",
        "figures/small_lm-parameters.svg",
    }
    capsys.readouterr()
    (tmp_path / "file").touch()
    for arguments, message in (
        (["--runs", str(tmp_path / "nowhere")], "no such"),
        (["--runs", str(runs), "--output", str(tmp_path / "file" / "x")], "cannot be written"),
    ):
        assert run_main("report", command.main, arguments) == 2
        printed = capsys.readouterr().err
        assert message in printed.splitlines()[-1]


def test_measures_of_headlines_and_of_word_similarity() -> None:
    rouge = {"recall": {"rouge1": {"mean": 31.5, "low": 30}, "signature": "s"}, "f1": {}}
    similarity = {"LARGE": {"rho": 0.4, "known": 300}, "SMALL": {"rho": None}}
    flat = flatten({"length_75": rouge, "similarity": similarity, "sentences": 3, "relative_error": 0.2})
    assert flat == {"rouge1_75": 31.5, "rho LARGE": 0.4, "relative_error": 0.2}
    assert chosen(["relative_error", "rho LARGE"]) == "rho LARGE"
    assert chosen(["valid_perplexity", "perplexity"]) == "perplexity"
    assert chosen(["embedding"]) is None
    assert spreads([flat, {"rho LARGE": 0.6}])["rho LARGE"].mean == 0.5
    assert spreads([flat])["rho LARGE"].deviation is None


def test_measures_of_shrunk_models() -> None:
    texts = {"news": {"perplexity": 30.0, "kept": 0.8}, "other": {"kept": None}}
    assert flatten({"texts": texts, "relative_error": 0.2}) == {"kept news": 0.8, "relative_error": 0.2}
    assert chosen(["relative_error", "kept news"]) == "kept news"
    assert chosen(["relative_error", "top10"]) == "top10"


def test_commands_of_a_row_that_starts_from_another(recipes: Path, tmp_path: Path) -> None:
    config = {
        "distill": {"teacher": "standard"},
        "train_options": ["-seed", "2"],
        "eval_options": ["-x", "a b"],
    }
    write(tmp_path / "runs" / "small_lm", record("table1_b", 2, config=config))
    found, _ = collect(of_runs(tmp_path / "runs"), ["small_lm"])
    lines, _ = lines_of(Recipe(recipes / "small_lm"), found)
    [line] = [line for line in lines if line.runs]
    assert commands(recipes / "small_lm", line).splitlines() == [
        "recipes/small_lm/preprocess.sh",
        "recipes/small_lm/train.sh standard",
        "recipes/small_lm/train.sh table1_b -seed 2",
        "recipes/small_lm/eval.sh table1_b -x 'a b'",
    ]
    assert commands(recipes / "other", Line("other", "x", {})) == "recipes/other/run.sh"


@pytest.mark.slow
def test_every_recipe_of_the_repository_is_in_the_report() -> None:
    blocks = command.build(RECIPES, None)
    assert {row["task"] for row in cells(blocks, "glance")} == set(recipe_names())
    assert Checker(as_page(blocks)).named["data-chart"]


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium found; install one, or name it in BROWSER_FOR_TESTS")
    with browser_page(program, tmp_path / "profile") as opened:
        yield opened


def see(page: Page, selector: str) -> None:
    """Scroll to an element."""
    options = "{behavior: 'instant', block: 'center'}"
    page.value(f"document.querySelector('{selector}').scrollIntoView({options})")


@pytest.mark.slow
def test_a_browser_shows_the_page_at_every_width(page: Page, recipes: Path, tmp_path: Path) -> None:
    write(tmp_path / "runs" / "small_lm" / "1", record("table1_a"))
    blocks = command.build(recipes, tmp_path / "runs")
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.html").write_text(as_page(blocks))
    for width, dark in ((390, False), (1280, True), (2400, False)):
        page.open(tmp_path / "report" / "report.html", width=width, dark=dark)
        assert page.value("document.title") == "Compressed word embeddings: results"
        assert page.value("innerWidth") == width
        assert page.value("document.querySelector('nav details').open") is False
        page.value("document.querySelectorAll('details').forEach(each => { each.open = true })")
        for name in ("small_lm-quality-0", "small_lm-parameters"):
            see(page, f"[data-chart={name}]")
            page.wait_for(f"document.querySelector('[data-chart={name}] svg')")
        assert page.value("document.documentElement.scrollWidth") == width
        right = "[...document.querySelectorAll('svg')].map(each => each.getBoundingClientRect().right)"
        assert len(page.value(right)) == 2 and max(page.value(right)) <= width
        see(page, ".mark-symbol path")
        box = "document.querySelector('.mark-symbol path').getBoundingClientRect()"
        x, y = page.value(f"(box => [box.x + box.width / 2, box.y + box.height / 2])({box})")
        page.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        page.wait_for("document.querySelector('#vg-tooltip-element')?.textContent.includes('table1_a')")
        ground = page.value("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(22, 24, 28)" if dark else "rgb(253, 253, 252)")
        errors = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        assert [event for event in page.events if event["method"] in errors] == []
        requests = [
            event["params"] for event in page.events if event["method"] == "Network.requestWillBeSent"
        ]
        assert all(one["request"]["url"].startswith(("file:", "data:")) for one in requests)


@pytest.mark.slow
def test_tables_are_sorted_filtered_and_folded(page: Page, tmp_path: Path) -> None:
    rows = [["b", "10.5", "x"], ["a", "9.25", "y"], ["c", "not run", "y"], *[["d", "11", "z"]] * 7]
    (tmp_path / "page.html").write_text(as_page([Table(["row", "score", "kind"], rows, idle=[2])]))
    page.open(tmp_path / "page.html", width=1280, dark=False)
    shown = "[...document.querySelectorAll('tbody tr')].filter(each => each.offsetParent)"
    names = f"{shown}.map(each => each.cells[0].textContent)"
    assert page.value(names)[:3] == ["b", "a", "d"]
    page.value("document.querySelector('.fold').click()")
    assert page.value("document.querySelector('.fold').textContent") == "hide 1 rows not run"
    score = "document.querySelectorAll('thead button')[1].click()"
    page.value(score)
    assert page.value(names)[:2] == ["a", "b"] and page.value(names)[-1] == "c"
    page.value(score)
    assert page.value(names)[0] == "d" and page.value(names)[-2:] == ["a", "c"]
    page.value("document.querySelector('input').value = 'Y not'")
    page.value("document.querySelector('input').dispatchEvent(new Event('input'))")
    assert page.value(names) == ["c"]
