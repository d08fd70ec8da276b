"""docs/claims.md: verdicts by hand, and that the file is up to date."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.claims import SOURCE, TARGET, claims_table, comparisons, printed_figures, verdict
from recipes.report.lines import Line, Spread, chosen, measure
from shared_embeddings.utils.reading import read_yaml

NOISE = {"bleu": 0.3, "perplexity": 0.5}


def line(row: str, **measured: float) -> Line:
    return Line("task", row, {}, measured={key: Spread(value, None, 1) for key, value in measured.items()})


LINES = {
    f"task/{one.row}": one
    for one in (
        line("strong", bleu=30.0),
        line("weak", bleu=29.0),
        line("weaker", bleu=28.8),
        line("low", perplexity=100.0),
        line("high", perplexity=101.0),
        line("absent"),
    )
}


@pytest.mark.parametrize(
    ("here", "within", "expected"),
    [
        (["strong > weak"], None, "holds"),
        (["weak > strong"], None, "does not hold"),
        (["weak > weaker"], None, "does not hold"),  # within the noise
        (["low > high"], None, "holds"),
        (["high > low"], None, "does not hold"),
        (["strong > weak", "weak > weaker"], None, "in part: 1 of 2"),
        (["weak ~ strong"], "4 %", "holds"),  # 3.3 % less
        (["weak ~ strong"], "3 %", "does not hold"),
        (["high ~ low"], "1 %", "holds"),
        (["high ~ low"], "0.9 %", "does not hold"),
        (["strong > absent"], None, "not run"),
        (["strong > absent", "strong > weak"], None, "holds"),
    ],
)
def test_verdicts(here: list[str], within: str | None, expected: str) -> None:
    claim: dict[str, Any] = {"here": {"task": here}, "within": within}
    texts, found = verdict(claim, LINES, NOISE)
    assert (len(texts), found) == (len(here), expected)


def test_the_reason_is_given() -> None:
    assert verdict({"reason": "no GPU"}, LINES, NOISE) == ([], "not tested: no GPU")


def test_the_figures_of_the_papers_agree_with_their_claims() -> None:
    cells = printed_figures()
    for claim in read_yaml(SOURCE)["claims"]:
        for first, is_close, second in comparisons(claim.get("paper", {})):
            key = chosen(cells[first])
            if key is None:
                continue
            better, other = float(cells[first][key]), float(cells[second][key])
            found = measure(key)
            assert found is not None
            loss = (other - better) * (1 if found.higher_is_better else -1)
            assert loss < 0 or is_close and loss <= other * float(claim["within"].rstrip("% ")) / 100, claim


def test_the_document_is_up_to_date() -> None:
    assert claims_table() in TARGET.read_text(encoding="utf-8"), "run `make readme`"
