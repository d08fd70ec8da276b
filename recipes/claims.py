"""``docs/claims.md``: what the papers claim, the paper's figures, ours, and whether it holds here.

``claims.yaml`` has the claims. A comparison "A > B" holds if A is better than B by more than two trainings of
one row differ; "A ~ B" holds if A is at most `within` worse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from recipes.common.recipe import RECIPES
from recipes.papers import MEASURES, read_papers
from recipes.report.lines import Line, chosen, measure, measured_lines
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.reading import read_yaml

SOURCE, TARGET = RECIPES / "claims.yaml", RECIPES.parent / "docs" / "claims.md"
_KEYS = {"by", "paper", "claim", "source", "within", "key", "here", "reason"}


class Comparison(NamedTuple):
    """Two rows ``RECIPE/ROW``: the first is better, or close to the second."""

    first: str
    is_close: bool
    second: str


def comparisons(by_recipe: Mapping[str, list[str]]) -> Iterator[Comparison]:
    """The comparisons "A > B" and "A ~ B" of recipes."""
    for recipe, texts in by_recipe.items():
        for text in texts:
            first, sign, second = text.split()
            if sign not in ("~", ">"):
                raise UserError(f"{SOURCE}: '{text}' has '{sign}'; expected '>' or '~'")
            yield Comparison(f"{recipe}/{first}", sign == "~", f"{recipe}/{second}")


def verdict(
    claim: Mapping[str, Any], lines: Mapping[str, Line], noise: Mapping[str, float]
) -> tuple[list[str], str]:
    """Our figures of a claim as lines of text, and whether it holds."""
    if "reason" in claim:
        return [], f"not tested: {claim['reason']}"
    texts, held = [], []
    for first, is_close, second in comparisons(claim["here"]):
        pair = [lines[name] for name in (first, second)]
        recipe, rows = pair[0].recipe, [f"`{line.row}`" for line in pair]
        key: str = claim.get("key") or chosen(key for line in pair for key in line.measured) or ""
        found = measure(key)
        if found is None or any(key not in line.measured for line in pair):
            missing = [row for row, line in zip(rows, pair) if key not in line.measured]
            texts.append(f"{recipe}: {' and '.join(missing)} not run")
            continue
        ours = [line.measured[key] for line in pair]
        gain = (ours[0].mean - ours[1].mean) * (1 if found.higher_is_better else -1)
        allowed = float(claim["within"].removesuffix("%")) / 100 * ours[1].mean if is_close else 0.0
        held.append(gain >= -allowed if is_close else gain > noise.get(key, 0.0))
        shown = [f"{row} {spread.describe(found.decimals)}" for row, spread in zip(rows, ours)]
        texts.append(f"{recipe}: {', '.join(shown)}")
    if not held:
        return texts, "not run"
    if all(held):
        return texts, "holds"
    return texts, f"in part: {sum(held)} of {len(held)}" if any(held) else "does not hold"


def printed_figures() -> dict[str, Mapping[str, str]]:
    """The figures in the papers of each row ``RECIPE/ROW`` that has its own."""
    cells = [cell for paper in read_papers() for table in paper.tables for cell in table.cells]
    return {cell.trained_by: cell.figures for cell in cells if cell.is_own}


def claims_table() -> str:
    """All claims as Markdown, a table for each paper."""
    content = read_yaml(SOURCE)
    lines = measured_lines(None)
    figures = printed_figures()
    parts: dict[str, list[str]] = {}
    for claim in content["claims"]:
        if unknown := claim.keys() - _KEYS:
            raise UserError(f"{SOURCE}: '{claim['claim']}' has unknown keys {', '.join(sorted(unknown))}")
        printed = [
            f"{_figure(figures[first])} {'and' if is_close else 'against'} {_figure(figures[second])}"
            for first, is_close, second in comparisons(claim.get("paper", {}))
        ]
        measured, found = verdict(claim, lines, content["noise"])
        row = [
            claim["claim"],
            f"{'; '.join(printed) or 'a plot'} ({claim['source']})",
            "<br>".join(measured) or "–",
            found,
        ]
        rows = parts.setdefault(
            claim["by"], ["| claim | in the paper | here | verdict |", "| --- | --- | --- | --- |"]
        )
        rows.append(f"| {' | '.join(row)} |")
    return "\n\n".join(f"## {paper}\n\n" + "\n".join(rows) for paper, rows in parts.items())


def _figure(figures: Mapping[str, str]) -> str:
    """The printed figure that the paper's rows are judged by."""
    return figures[chosen(figures) or next(key for key in figures if key in MEASURES)]
