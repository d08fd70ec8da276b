"""Byte-pair encoding (Sennrich et al., 2016) with subword-nmt, and the vocabulary that comes of it."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from recipes.common.corpus import read_lines, with_progress, write_lines
from shared_embeddings.files import write_text

SEPARATOR = "@@"
MIN_PAIR_FREQUENCY = 2


def learn(texts: Iterable[Path], codes: Path, operations: int) -> None:
    """Learn `operations` merges on all `texts` together and write them to `codes`."""
    counts: Counter[str] = Counter()
    for path in texts:
        for line in read_lines(path):
            counts.update(line.split(" "))
    del counts[""]
    words = io.StringIO("".join(f"{word} {count}\n" for word, count in sorted(counts.items())))
    learned = io.StringIO()
    learn_bpe(words, learned, operations, min_frequency=MIN_PAIR_FREQUENCY, is_dict=True)
    write_text(codes, learned.getvalue())


def apply(codes: Path, sources: Iterable[Path], folder: Path) -> None:
    """Split the tokens of each source into the subwords of `codes`, under the same name in `folder`."""
    with codes.open(encoding="utf-8") as file:
        bpe = BPE(file, separator=SEPARATOR)
    for source in sources:
        lines = with_progress(read_lines(source), source.name)
        write_lines(folder / source.name, (bpe.segment(line) for line in lines))


def join(subwords: str) -> str:
    """Undo `apply` on one line, also where a translation ends within a word."""
    return re.sub(f"{SEPARATOR}( |$)", "", subwords)


def write_vocabulary(texts: Iterable[Path], vocabulary: Path) -> None:
    """Write the joint vocabulary as OpenNMT-py reads it: token, tab, count, most frequent first."""
    counts: Counter[str] = Counter()
    for path in texts:
        for line in read_lines(path):
            counts.update(line.split())
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    write_lines(vocabulary, (f"{token}\t{count}" for token, count in ordered))
