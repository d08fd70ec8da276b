"""Generated texts in the layout of the corpora for language models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from lm.data.datasets import SOURCES
from recipes.common.corpus import write_lines
from recipes.common.smoke import LINES, TEST_LINES, generated_words, sentence

_PARAGRAPH = 10


def write_smoke_corpus(dataset: str, folder: Path) -> dict[str, Path]:
    """Write a generated text for each split, with the names and the layout of the texts of `dataset`.

    Args:
        dataset: a name of `lm.data.datasets.SOURCES`.
        folder: gets the texts.
    """
    layout = _LAYOUTS.get(dataset, _articles)
    texts = {}
    for seed, (split, name) in enumerate(SOURCES[dataset].files.items()):
        lines = LINES if split == "train" else 5 * TEST_LINES
        texts[split] = folder / name
        write_lines(texts[split], layout(list(generated_words(lines, seed))))
    return texts


def _plain(lines: list[list[str]]) -> Iterator[str]:
    """Sentences without punctuation, in lower case, with ``N`` for numbers and a space at both ends."""
    for words in lines:
        yield f" {' '.join(['<unk>', *words, 'N'])} "


def _articles(lines: list[list[str]]) -> Iterator[str]:
    """Articles with headings between equals signs, a paragraph on a line, and empty lines in between."""
    for start in range(0, len(lines), _PARAGRAPH):
        title, *paragraph = lines[start : start + _PARAGRAPH]
        text = " ".join(sentence(words).replace(".", " .") for words in paragraph)
        for line in (f"= {' '.join(title[:3]).title()} =", f"{text} 3 @.@ 5 <unk>"):
            yield from (" ", f" {line} ")


_LAYOUTS: dict[str, Callable[[list[list[str]]], Iterator[str]]] = {"ptb": _plain}
