"""``docs/claims.md``: what the papers claim, the paper's figures, ours, and whether it holds here.

``claims.yaml`` has the claims. A comparison "A > B" holds if A is better than B by more than two trainings of
one row differ; "A ~ B" holds if A is at most `within` worse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

import pandas as pd

from recipes.common.recipe import RECIPES
from recipes.common.results import Record, by_importance, find_measure
from recipes.common.table import NONE, markdown
from recipes.papers import read_papers
from recipes.report import read_all
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.reading import read_yaml

SOURCE, TARGET = RECIPES / "claims.yaml", RECIPES.parent / "docs" / "claims.md"


def comparisons(by_recipe: Mapping[str, list[str]]) -> Iterator[tuple[str, bool, str]]:
    """Yield the comparisons "A > B" and "A ~ B" of recipes: row A, whether it is close, row B."""
    for recipe, texts in by_recipe.items():
        for text in texts:
            first, sign, second = text.split()
            if sign not in ("~", ">"):
                raise UserError(f"{SOURCE}: '{text}' has '{sign}'; expected '>' or '~'")
            yield f"{recipe}/{first}", sign == "~", f"{recipe}/{second}"


def verdict(
    claim: Mapping[str, Any], records: Mapping[str, Record], noise: Mapping[str, float]
) -> tuple[list[str], str]:
    """Return our figures of a claim as lines of text, and whether it holds, given the records by row."""
    if "reason" in claim:
        return [], f"not tested: {claim['reason']}"
    texts, holds = [], []
    for first, is_close, second in comparisons(claim["here"]):
        scores = {f"`{name.partition('/')[2]}`": records[name]["scores"] for name in (first, second)}
        keys = by_importance(key for measured in scores.values() for key in measured)
        key: str = claim.get("key") or next(iter(keys), "")
        missing = [row for row, measured in scores.items() if key not in measured]
        recipe, measure = first.partition("/")[0], find_measure(key)
        if measure is None or missing:
            texts.append(f"{recipe}: {' and '.join(missing)} not run")
            continue
        ours, others = (fmean(measured[key]) for measured in scores.values())
        gain = (ours - others) * (1 if measure.higher_is_better else -1)
        allowed = float(claim["within"].removesuffix("%")) / 100 * others if is_close else 0.0
        holds.append(gain >= -allowed if is_close else gain > noise.get(key, 0.0))
        shown = ", ".join(f"{row} {measure.describe(measured[key])}" for row, measured in scores.items())
        texts.append(f"{recipe}: {shown}")
    if not holds:
        return texts, "not run"
    if all(holds):
        return texts, "holds"
    return texts, f"in part: {sum(holds)} of {len(holds)}" if any(holds) else "does not hold"


def claims_table() -> str:
    """Return all claims as Markdown, a table for each paper."""
    content, parts = read_yaml(SOURCE), []
    records = {f"{name}/{one['row']}": one for name, rows in read_all().items() for one in rows}
    own = (cell for paper in read_papers() for _, cell in paper.cells if cell.is_own)
    # The figures that the papers' rows are judged by.
    printed = {cell.trained_by: [cell.figures[key] for key in by_importance(cell.figures)] for cell in own}
    claims = pd.DataFrame(content["claims"])
    for paper, claimed in claims.groupby("by", sort=False):
        lines = []
        for claim in (row.dropna().to_dict() for _, row in claimed.iterrows()):
            figure = "; ".join(
                f"{printed[first][0]} {'and' if is_close else 'against'} {printed[second][0]}"
                for first, is_close, second in comparisons(claim.get("paper", {}))
            )
            texts, holds = verdict(claim, records, content["noise"])
            source = f"{figure or 'a plot'} ({claim['source']})"
            lines.append([claim["claim"], source, "<br>".join(texts) or NONE, holds])
        frame = pd.DataFrame(lines, columns=["claim", "in the paper", "here", "verdict"])
        parts.append(f"## {paper}\n\n{markdown(frame).rstrip()}")
    return "\n\n".join(parts)
