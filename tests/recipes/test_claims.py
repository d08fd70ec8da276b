"""docs/claims.md: verdicts by hand, and that the file is up to date."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.claims import SOURCE, TARGET, claims_table, comparisons, verdict
from recipes.common.results import by_importance, find_measure
from recipes.papers import read_papers
from shared_embeddings.utils.reading import read_yaml

NOISE = {"bleu": 0.3, "perplexity": 0.5}
SCORES = {
    **{"strong": {"bleu": [30.0]}, "weak": {"bleu": [29.0]}, "weaker": {"bleu": [28.8]}},
    **{"low": {"perplexity": [100.0]}, "high": {"perplexity": [101.5, 100.5]}, "absent": {}},
}
RECORDS: dict[str, Any] = {f"task/{row}": {"row": row, "scores": scores} for row, scores in SCORES.items()}


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
    texts, outcome = verdict(claim, RECORDS, NOISE)
    assert (len(texts), outcome) == (len(here), expected)


def test_the_reason_is_given() -> None:
    assert verdict({"reason": "no GPU"}, RECORDS, NOISE) == ([], "not tested: no GPU")


def test_the_figures_of_the_papers_agree_with_their_claims() -> None:
    own = (cell for paper in read_papers() for _, cell in paper.cells if cell.is_own)
    figures = {cell.trained_by: cell.figures for cell in own}
    for claim in read_yaml(SOURCE)["claims"]:
        assert claim.keys() <= {"by", "paper", "claim", "source", "within", "key", "here", "reason"}
        for first, is_close, second in comparisons(claim.get("paper", {})):
            key = by_importance(figures[first])[0]
            better, other = float(figures[first][key]), float(figures[second][key])
            measure = find_measure(key)
            assert measure is not None
            loss = (other - better) * (1 if measure.higher_is_better else -1)
            assert loss < 0 or is_close and loss <= other * float(claim["within"].rstrip("% ")) / 100, claim


def test_the_document_is_up_to_date() -> None:
    assert claims_table() in TARGET.read_text(encoding="utf-8"), "run `make readme`"
