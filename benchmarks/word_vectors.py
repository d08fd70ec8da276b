"""Word vectors in few bits: skip-gram vectors of a text, rounded and along principal directions.

    python -m benchmarks.word_vectors TEXT

prints the table of docs/word_vectors.md. Training takes about a minute.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.accounting import stored_bits
from shared_embeddings.compress.fit import fit
from shared_embeddings.words.classes import train_word_vectors

CODECS = {"uniform": "rounded, a scale for 32", "trellis": "trellis", "spectral": "spectral"}


def neighbors(table: Tensor, number: int = 2000) -> Tensor:
    """The nearest other word ``(n,)`` by cosine of n words that are spread over a table ``(V, D)``."""
    unit = F.normalize(table)
    ids = torch.arange(0, len(table), max(1, len(table) // number))
    scores = unit[ids] @ unit.t()
    scores[torch.arange(len(ids)), ids] = -1.0
    return scores.argmax(dim=1)


@torch.no_grad()
def main(text: Path, dim: int) -> None:
    """Print the table."""
    words = [word for word, _ in Counter(text.read_text(encoding="utf-8").split()).most_common()]
    table = torch.from_numpy(train_word_vectors([text], words, dim))
    print("| codec | bits of codes | bits in all | smaller | relative error | same nearest word |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for bits in (1.0, 1.5, 2.0, 4.0, 8.0):
        for codec, name in CODECS.items():
            embedding = fit("quantized", table, bits=bits, codec=codec, progress=False)[0].eval()
            rounded, size = embedding.table(), stored_bits(embedding, "fp16")
            error = float((rounded - table).norm() / table.norm())
            same = float((neighbors(rounded) == neighbors(table)).float().mean())
            sizes = f"{size / table.numel():.2f} | {32 * table.numel() / size:.1f}x"
            print(f"| {name} | {bits:g} | {sizes} | {error:.3f} | {same:.0%} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.word_vectors", description=__doc__)
    parser.add_argument("text", type=Path, help="a text of words separated by spaces, for skip-gram vectors")
    parser.add_argument("--dim", type=int, default=400, help="dimensions of the vectors (default: 400)")
    main(**vars(parser.parse_args()))
