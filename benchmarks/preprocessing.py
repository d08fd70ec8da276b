"""Peak memory of a recipe's preprocessing, step by step, on generated text of the published size.

Words are drawn from Zipf's law over one vocabulary per language; a word of rank r is r written in syllables,
so frequent words are short. `preprocess.sh` runs in its own process, whose memory is sampled.

    python -m benchmarks.preprocessing --folder DIR --output benchmarks/results.jsonl \\
        --readme benchmarks/README.md
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.measuring import markdown, parser_of, publish
from recipes.common.recipe import find_recipe
from recipes.common.tools import run_main
from recipes.translation.preprocess import read_settings
from shared_embeddings.utils.command_line import positive
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_lines

# Parts of syllables. They differ between the two languages, so the languages share no long words.
ONSETS = {0: "b c d f g h l m n p r s t v w st".split(), 1: "b d f g h k l m n r s t w z sch br".split()}
VOWELS = {0: "a e i o u ea".split(), 1: "a e i o u ä ö ü ei".split()}
CODAS = {0: ["", "n", "r", "s"], 1: ["", "n", "r", "st"]}
BLOCK = 10_000
_STEP = re.compile(r"^(\S+): (running|up to date)$")


class Language:
    """A vocabulary of made-up words in order of frequency, and sentences drawn from it.

    Args:
        side: 0 for the source, 1 for the target.
        vocab_size: number of distinct words.
        words: mean words per sentence; lengths are one plus a Poisson variable.
        seed: of all draws.
    """

    def __init__(self, side: int, vocab_size: int, words: int, seed: int) -> None:
        self.syllables = ["".join(parts) for parts in product(ONSETS[side], VOWELS[side], CODAS[side])]
        np.random.default_rng(side).shuffle(self.syllables)
        self.words = words
        self._random = np.random.default_rng([seed, side])
        self._cumulative = np.cumsum(1.0 / (np.arange(vocab_size) + 2.7))
        self._cumulative /= self._cumulative[-1]

    def word(self, rank: int) -> str:
        """The word of a rank >= 0; a few ranks share a word that splits into syllables in two ways."""
        size = len(self.syllables)
        text = self.syllables[rank % size]
        while rank >= size:
            rank = rank // size - 1
            text = self.syllables[rank % size] + text
        return text

    def sentences(self) -> Iterator[str]:
        while True:
            lengths = 1 + self._random.poisson(self.words - 1, BLOCK)
            ranks = np.searchsorted(self._cumulative, self._random.random(int(lengths.sum())))
            start = 0
            for length in lengths:
                yield " ".join(map(self.word, ranks[start : start + length])) + "."
                start += length


def watch(command: list[str], environment: dict[str, str]) -> dict[str, int]:
    """Run preprocessing; return the peak memory of each part in bytes, in order.

    A learning step is a part by itself, others by what precedes the file name.
    """
    peaks: dict[str, int] = {}
    part = "start"
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None

        def look() -> None:
            while process.poll() is None:
                peaks[part] = max(peaks.get(part, 0), _memory(process.pid))
                time.sleep(0.05)

        looker = threading.Thread(target=look, daemon=True)
        looker.start()
        for line in process.stdout:
            print(line, end="", flush=True)
            if match := _STEP.match(line):
                part = match[1] if match[1].endswith("-learn") else match[1].split("-")[0]
        process.wait()
        looker.join()
    if process.returncode:
        raise UserError(f"preprocess.sh failed with exit code {process.returncode}; see its output above")
    return peaks


def _memory(pid: int) -> int:
    """Return the bytes of a process and its children, shared pages counted once; 0 after its end."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    sizes = re.findall(r"^Pss: +(\d+) kB", rollup, re.MULTILINE)
    return 1024 * sum(map(int, sizes)) + sum(_memory(int(child)) for child in children)


def as_table(record: dict[str, Any]) -> str:
    """Format the memory of the steps, their maximum, and the sizes of the text."""
    peaks = {**record["steps"], "all": record["peak_bytes"]}
    rows = [[step, f"{peak / 2**20:,.0f}"] for step, peak in peaks.items()]
    sizes = (
        f"{record['recipe']}, {', '.join(record['pieces'])}: {record['pairs']:,} pairs of {record['words']} "
        f"words on average, up to {record['vocab_size']:,} distinct words per language; one process."
    )
    return f"{sizes}\n\n{markdown(['step', 'peak memory, MiB'], rows)}"


def main(arguments: Sequence[str]) -> None:
    """Generate text, preprocess it, publish the memory."""
    parser = parser_of("benchmarks.preprocessing", __doc__)
    parser.add_argument("--recipe", default="wmt14_ende")
    parser.add_argument("--pieces", nargs="+", help="kinds of pieces (default: all in rows.yaml)")
    parser.add_argument("--pairs", type=positive, default=4_500_000, help="sentences (default: %(default)s)")
    parser.add_argument("--words", type=positive, default=12, help="mean words of a sentence (default: 12)")
    parser.add_argument("--vocab-size", type=positive, default=3_000_000, help="(default: %(default)s)")
    parser.add_argument("--folder", type=Path, required=True, help="holds all data, several GB")
    options = parser.parse_args(arguments)
    settings = read_settings(find_recipe(options.recipe))
    pieces = options.pieces or list(settings.pieces)
    raw = options.folder.absolute() / "raw"
    folder = raw / options.recipe
    for side, code in enumerate(settings.languages):
        sentences = Language(side, options.vocab_size, options.words, seed=1).sentences()
        for texts in settings.tests:
            write_lines(folder / f"{texts.name}.{code}", islice(sentences, 100))
        lines = islice(sentences, options.pairs)
        write_lines(folder / f"train.{code}", tqdm(lines, f"train.{code}", options.pairs, mininterval=1))
    environment = {**os.environ, "DATA_DIR": str(raw), "RUNS": str(options.folder.absolute() / "runs")}
    command = [sys.executable, "-m", "recipes", options.recipe, "preprocess", *pieces]
    steps = watch(command, environment)
    asked = {key: getattr(options, key) for key in ("recipe", "pairs", "words", "vocab_size")}
    record = {**asked, "pieces": pieces, "steps": steps, "peak_bytes": max(steps.values())}
    publish(record, as_table(record), "preprocessing", options)


if __name__ == "__main__":
    raise SystemExit(run_main("preprocessing", main))
