"""Scores of the quickstart, and what it prints at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sacrebleu.metrics import BLEU

from recipes.common.table import markdown_table
from recipes.translation.train import corpus_scores

# sacreBLEU's default tokenization would treat a sentence in these languages as one word.
UNSPACED_LANGUAGES = ("ja", "th", "zh", "yue", "lo", "km", "my")


def scores(hypotheses: Sequence[str], references: Sequence[str], language: str) -> dict[str, Any]:
    """Compute BLEU and chrF; BLEU is over characters for languages without spaces between words.

    Raises:
        UserError: the sides differ in length or are empty.
    """
    result = corpus_scores(hypotheses, references)
    if language.replace("-", "_").split("_")[0] in UNSPACED_LANGUAGES:
        metric = BLEU(tokenize="char")
        result["bleu"] = metric.corpus_score(list(hypotheses), [list(references)]).score
        result["bleu_signature"] = str(metric.get_signature())
    return result


COLUMNS = ("row", "embedding", "smaller", "total", "bleu", "difference", "speed")


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the table of results as aligned Markdown, with a trailing newline."""
    return aligned(markdown_table(records, COLUMNS))


def aligned(markdown: str) -> str:
    """Align the columns of a Markdown table; numbers are right-aligned."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in markdown.splitlines()]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            "-" * width
            if number == 1
            else cell.rjust(width)
            if number > 1 and cell[:1] in "+-0123456789"
            else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def side_by_side(
    sources: Sequence[str], references: Sequence[str], translations: Mapping[str, Sequence[str]], count: int
) -> str:
    """Show example sentences: source, reference and translations; ``=`` marks those equal to the reference.

    Args:
        sources: source sentences.
        references: reference translations.
        translations: translations by name of the model.
        count: number of examples; up to half of them are translated correctly by every model.
    """
    differing = [
        number
        for number, reference in enumerate(references)
        if any(lines[number] != reference for lines in translations.values())
    ]
    others = [number for number in range(len(references)) if number not in set(differing)]
    right = others[: count // 2]
    chosen = sorted([*right, *differing[: count - len(right)]])
    width = max(len(name) for name in [*translations, "reference"])
    blocks = []
    for number in chosen:
        lines = [f"{'source':<{width}}  {sources[number]}", f"{'reference':<{width}}  {references[number]}"]
        for name, texts in translations.items():
            mark = "=" if texts[number] == references[number] else " "
            lines.append(f"{name:<{width}} {mark}{texts[number]}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
