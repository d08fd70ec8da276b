"""The tables of the papers: their figures beside ours."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from recipes.papers.ledger import Figure
from recipes.report.document import Table
from recipes.report.lines import Line
from recipes.report.measures import NOT_RUN, in_order, measure, millions, of_paper

NONE = "–"
# Sizes in millions that papers print, which ours are compared with.
_SIZES = {"total": "total parameters", "embedding": "embedding parameters"}
_SOURCE = re.compile(r"(?P<paper>[^,]+), (?P<table>(?:Table|Figure) [^:]+): (?P<row>.+)")


def by_table(lines: Iterable[Line]) -> dict[tuple[str, str], list[Line]]:
    """The lines that stand for rows of a paper, by (paper, table), in natural order."""
    tables: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        found = _SOURCE.fullmatch(str(line.paper.get("source", "")))
        if found:
            tables.setdefault((found["paper"], found["table"]), []).append(line)
    return dict(sorted(tables.items(), key=lambda item: (item[0][0], _number(item[0][1]))))


def _number(table: str) -> tuple[int, str]:
    """Sorting key of a table such as "Table 12a"."""
    found = re.search(r"\d+", table)
    return (int(found[0]) if found else 0, table)


def comparison(lines: Sequence[Line]) -> Table:
    """One table of a paper: sizes and measures, theirs and ours.

    Args:
        lines: the rows that stand for the paper's.
    """
    keys = in_order(dict.fromkeys(key for line in lines for key in line.paper))
    sizes = [key for key in _SIZES if any(key in line.paper for line in lines)]
    if not any(line.runs for line in lines):
        return _printed_only(lines, sizes, keys)
    columns = ["row of the paper", "our config"]
    for key in sizes:
        columns += [f"{_SIZES[key]}: paper", "ours"]
    for key in keys:
        known = measure(key)
        assert known is not None
        columns += [f"{known.title}: paper", "ours", "difference"]
    columns.append("hardware of the paper")
    rows = []
    for line in lines:
        paper = line.paper
        cells = [_row_of_paper(line), f"{line.recipe}/{line.row}"]
        for key in sizes:
            cells += [_printed_size(line, key), _our_size(line, key)]
        for key in keys:
            cells += _measures(line, key)
        rows.append([*cells, str(paper.get("hardware", NONE))])
    return Table(columns, rows)


def _printed_only(lines: Sequence[Line], sizes: Sequence[str], keys: Sequence[str]) -> Table:
    """A table of a paper without any row that was run; a single column shows that."""
    titles = [_SIZES[key] for key in sizes] + [known.title for key in keys if (known := measure(key))]
    columns = ["row of the paper", *(f"{title}: paper" for title in titles), "ours", "our config"]
    rows = []
    for line in lines:
        paper = line.paper
        cells = [_printed_size(line, key) for key in sizes]
        cells += [_measures(line, key)[0] for key in keys]
        hardware = str(paper.get("hardware", NONE))
        rows.append([_row_of_paper(line), *cells, NOT_RUN, f"{line.recipe}/{line.row}", hardware])
    return Table([*columns, "hardware of the paper"], rows)


def _row_of_paper(line: Line) -> str:
    """What the paper calls a line of `by_table`."""
    return str(line.paper["source"]).split(": ", 1)[1]


def _printed_size(line: Line, name: str) -> str:
    """A size that the paper prints; those in a table of mixed units have theirs."""
    printed = line.paper.get(name, NONE)
    return f"{printed} M" if isinstance(printed, (int, float)) else str(printed)


def _our_size(line: Line, name: str) -> str:
    """A count of a line."""
    count = line.counts.get(name)
    return millions(count) if isinstance(count, (int, float)) else NOT_RUN


def _measures(line: Line, key: str) -> list[str]:
    """The paper's figure, ours, and by how much they differ."""
    known, printed = measure(key), line.paper.get(key)
    assert known is not None
    spread = of_paper(key, line.measured)
    theirs = NONE if printed is None else f"{printed:.{known.decimals}f}"
    ours = NOT_RUN if spread is None else spread.describe(known.decimals)
    if spread is None or printed is None:
        return [theirs, ours, NONE]
    return [theirs, ours, f"{spread.mean - printed:+.{known.decimals}f}"]


def sizes_table(figures: Iterable[Figure]) -> Table:
    """How many of the sizes that each table prints agree with those of the models as they are built here."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for figure in figures:
        counts.setdefault((figure.paper, figure.table), Counter())[figure.agreement] += 1
    kinds = sorted({kind for found in counts.values() for kind in found})
    ordered = sorted(counts.items(), key=lambda item: (item[0][0], _number(item[0][1])))
    rows = [[f"{paper}, {table}", *(str(found[kind]) for kind in kinds)] for (paper, table), found in ordered]
    return Table(["printed sizes of", *kinds], rows)
