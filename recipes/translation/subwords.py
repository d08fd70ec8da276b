"""Byte-pair encoding (Sennrich et al., 2016) with subword-nmt, and the vocabulary that comes of it."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable
from heapq import nsmallest
from pathlib import Path

from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from recipes.common.corpus import stream_lines, with_progress, write_lines
from recipes.common.errors import UserError
from shared_embeddings.utils.files import write_text

SEPARATOR = "@@"
MIN_PAIR_FREQUENCY = 2
# So that memory does not grow with the text: when more different words than the first number have been
# counted, the rarer half is forgotten; merges are learned from the second number of words, the most frequent.
MOST_COUNTED = 2_000_000
MOST_LEARNED_FROM = 250_000


def learn(texts: Iterable[Path], codes: Path, operations: int) -> None:
    """Learn `operations` merges on all `texts` together and write them to `codes`.

    Raises:
        UserError: there is nothing to merge.
    """
    counts = count_words(texts, MOST_COUNTED)
    if all(len(word) == 1 for word in counts):
        raise UserError("byte pairs cannot be learned: no word has two characters; give more text")
    frequent = nsmallest(MOST_LEARNED_FROM, counts.items(), key=lambda item: (-item[1], item[0]))
    words = io.StringIO("".join(f"{word} {count}\n" for word, count in sorted(frequent)))
    del counts, frequent
    learned = io.StringIO()
    learn_bpe(words, learned, operations, min_frequency=MIN_PAIR_FREQUENCY, is_dict=True)
    write_text(codes, learned.getvalue())


def count_words(texts: Iterable[Path], most: int) -> Counter[str]:
    """Count words between white space in all `texts`.

    Args:
        texts: are read line by line.
        most: how many different words may be counted at a time; above it, the rarest half is forgotten.
    """
    counts: Counter[str] = Counter()
    for path in texts:
        for line in stream_lines(path):
            counts.update(line.split())
            if len(counts) > most:
                counts = Counter(dict(counts.most_common(most // 2)))
    return counts


def apply(codes: Path, sources: Iterable[Path], folder: Path) -> None:
    """Split the tokens of each source into the subwords of `codes`, under the same name in `folder`."""
    with codes.open(encoding="utf-8") as file:
        bpe = BPE(file, separator=SEPARATOR)
    for source in sources:
        lines = with_progress(stream_lines(source), source.name)
        write_lines(folder / source.name, (bpe.segment(line) for line in lines))


def join(subwords: str) -> str:
    """Undo `apply` on one line, also where a translation ends within a word."""
    return re.sub(f"{SEPARATOR}( |$)", "", subwords)


def write_vocabulary(texts: Iterable[Path], vocabulary: Path) -> None:
    """Write the joint vocabulary as OpenNMT-py reads it: token, tab, count, most frequent first."""
    counts = count_words(texts, MOST_COUNTED)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    write_lines(vocabulary, (f"{token}\t{count}" for token, count in ordered))
