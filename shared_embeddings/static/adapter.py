"""Open static models to compress and trim, see `shared_embeddings.compress.host`.

Axes: ``n`` rows, ``D`` dimensions, ``N`` texts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_embeddings.compress import host
from shared_embeddings.compress.host import EmbeddingTable, HostVocabulary
from shared_embeddings.compress.measure import (
    NEIGHBORS,
    SHARPNESS,
    Batch,
    Quality,
    Samples,
    Validation,
    names_of,
    sampled_lines,
)
from shared_embeddings.embedding import WordEmbedding
from shared_embeddings.registry import build
from shared_embeddings.static import table as static
from shared_embeddings.static.plain import plain_tensors, select_tokens, write_plain
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import replacing, write_json
from shared_embeddings.utils.reading import read_lines
from shared_embeddings.word_vectors.adapter import NAME, VectorsModel

# Lines that are neighbors of each other, and those that are tokenized together.
_NEIGHBORS, _LINES = 512, 2**12
# A token counts up to so many times as much, by the square of its factor.
_MOST_COUNTED = 1000
# How a compressed model is loaded, and one that was only trimmed.
LOADING = """## How to load it

`DIR` is this folder, or its name on the Hub. With the Python package `shared-embeddings`, its vectors stay
compressed in memory:

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("DIR", trust_remote_code=True)  # the code is that of the package
```

With numpy only, and the vectors of single tokens:

```python
from load_vectors import load  # of this folder

vectors = load("DIR/model.safetensors")
```

A copy for model2vec, and for sentence-transformers without the package:

```bash
shared-embeddings export --model DIR --format model2vec --output PLAIN
```"""
PLAIN_LOADING = """## How to load it

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("DIR")  # or model2vec.StaticModel.from_pretrained("DIR")
```"""
# Files of the original that are copied.
_COPIED = ("config_sentence_transformers.json", "LICENSE*", "ids.tsv")


class StaticAdapter(host.HostAdapter):
    """Opens folders of model2vec and of StaticEmbedding of sentence-transformers, and WordLlama's file."""

    def sniff(self, path: Path) -> bool:
        return static.is_static(path)

    def read(self, path: Path, runs: bool = True) -> StaticModel:
        return StaticModel(path)

    read_trimmable = read


class StaticModel(VectorsModel):
    """A table of token vectors, whose tokens are its words."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self.table = static.read(path)
        self.words, self.packing = self.table.tokens, self.table.packing
        # Of the model before trimming; the ids of what WordPiece finds at the beginnings of unknown words.
        self.original, self.tokenizer = self.words, self.table.tokenizer
        self.beginnings: set[int] = set()
        self.reads_raw_text = type(self.tokenizer.model).__name__ != "WordLevel"

    @property
    def module(self) -> Any:
        """The embedding of the rows."""
        return self.table.embedding

    @module.setter
    def module(self, embedding: Any) -> None:
        self.table.embedding, self.table.stored = embedding, None

    def embeddings(self) -> list[WordEmbedding]:
        if self.table.rows is None:
            return super().embeddings()
        vectors = self.table.vectors(*static.flat([[token] for token in range(len(self.words))])).detach()
        every: Any = build("standard", num_embeddings=len(vectors), embedding_dim=vectors.size(1))
        every.load_state_dict({"weight": vectors})
        return [WordEmbedding(NAME, self.words, None, every.eval())]

    def tables(self) -> list[EmbeddingTable]:
        if (stored := self.table.stored) is None:
            raise UserError(f"model {self.path}: is already compressed; compress the original model instead")
        (table,) = super().tables()
        bits = 8 * sum(tensor.nbytes for tensor in stored.values() if tensor.dim() > 1)
        return [dataclasses.replace(table, words=self._row_words(), stored_bits=bits)]

    def _row_words(self) -> list[str]:
        """Return a name of each row, that of the first token that has it."""
        if self.table.rows is None:
            return self.words
        rows, names = (
            self.table.rows.tolist(),
            [f"<unused row {row}>" for row in range(self.module.num_embeddings)],
        )
        for row, word in reversed([*zip(rows, self.words)]):
            names[row] = word
        return names

    def count_text(self, texts: Sequence[Path]) -> dict[str, int]:
        """Return how often the text has each row, of which an error counts by the squares of its factors."""
        counts: Counter[int] = Counter()
        for path in texts:
            lines = [line for line in read_lines(path) if line.strip()]
            for start in range(0, len(lines), _LINES):
                for ids in self.table.tokenize(lines[start : start + _LINES]):
                    counts.update(ids)
        rows, factors = self.table.rows, self.table.factors
        if rows is None:
            return {self.words[token]: count for token, count in counts.items()}
        weights = torch.ones(len(rows)) if factors is None else (factors / factors.abs().max()).square()
        tokens = torch.tensor([*counts])
        of_rows = torch.zeros(self.module.num_embeddings, dtype=torch.float64)
        of_rows.index_add_(
            0, rows[tokens].long(), torch.tensor([*counts.values()]) * weights[tokens].double()
        )
        names = self._row_words()
        used = of_rows.nonzero().flatten().tolist()
        return {names[row]: math.ceil(_MOST_COUNTED * float(of_rows[row])) for row in used}

    def quality(self, validation: Validation) -> Quality:
        raise UserError("models that are only a table have no perplexity or BLEU; give no validation text")

    def samples(self, texts: Sequence[Path] | None, seed: int, tokens: int) -> Samples:
        """Return the nearest neighbors among lines of texts; without texts, those among tokens."""
        if texts is None:
            return super().samples(None, seed, tokens)
        read = [ids for ids in self.table.tokenize(sampled_lines(texts, seed, tokens)) if ids]
        if len(read) < 2:
            raise UserError("one line has no neighbors; pass a longer text")

        def find_neighbors(lines: Sequence[list[int]]) -> Batch:
            """Return how similar each line is to the others ``(n, n)``, to itself minus infinitely."""
            vectors = F.normalize(self.table.vectors(*static.flat(lines)), dim=-1)
            return Batch((SHARPNESS * vectors @ vectors.t()).fill_diagonal_(-torch.inf))

        parts = [read[first : first + _NEIGHBORS] for first in range(0, len(read) - 1, _NEIGHBORS)]
        total = sum(map(len, read))
        return Samples(
            f"the nearest of {len(read):,} lines of {names_of(texts)}",
            parts,
            find_neighbors,
            of=NEIGHBORS,
            read=-(-total // len(read)),
            tokens=total,
            lookups={NAME: {self.module: 1.0}},
        )

    def tensors(self) -> dict[str, Tensor]:
        return self.table.stored or self.table.tensors()

    def files(self, path: Path) -> list[Path]:
        if path != self.path and path.exists():
            if not path.is_dir() or (not (path / static.CONFIG).is_file() and any(path.iterdir())):
                raise UserError(
                    f"output {path}: exists but is not a model, so it is not replaced; name another"
                )
        return [path]

    def write(self, output: Path, tensors: Mapping[str, Tensor], card: str = "") -> None:
        """Write a folder that sentence-transformers loads, and whose vectors numpy reads."""
        from shared_embeddings.hf.card import write_card  # the package imports transformers

        is_plain = self.table.stored is not None
        with replacing(output) as target:
            target.mkdir()
            if is_plain:
                write_plain(self.table, tensors, target, self.path)
            else:
                self.table.write(target, tensors)
                write_json(target / static.MODULES, static.modules(self.path, self.table.config))
            self._copy_files(target)
            write_card(
                self.path,
                target,
                "Vocabulary trimmed" if is_plain else "Token vectors compressed",
                card,
                loading=PLAIN_LOADING if is_plain else LOADING,
                is_compressed=not is_plain,
            )

    def write_model2vec(self, output: Path, dtype: str) -> str:
        """Write a folder that model2vec and sentence-transformers load without this library."""
        with replacing(output) as target:
            target.mkdir()
            tensors = plain_tensors(self.table, dtype)
            write_plain(self.table, tensors, target, self.path)
            self._copy_files(target)
        size = sum(tensor.nbytes for tensor in tensors.values())
        return f"wrote {output}: {len(self.words):,} tokens in {dtype}, {size:,} bytes of weights"

    def _copy_files(self, target: Path) -> None:
        """Copy licenses, settings of sentence-transformers and its modules after the table."""
        if not self.path.is_dir():
            return
        for file in (file for pattern in _COPIED for file in self.path.glob(pattern) if file.is_file()):
            shutil.copyfile(file, target / file.name)
        for module in static.modules(self.path, self.table.config)[1:]:
            if (folder := self.path / Path(module["path"]).name).is_dir() and module["path"]:
                shutil.copytree(folder, target / folder.name, ignore=shutil.ignore_patterns("*.py"))

    # Trimming.

    @functools.cached_property
    def file(self) -> Any:
        """The `TokenizerFile` of the tokenizer."""
        from shared_embeddings.hf.tokenizer import TokenizerFile

        return TokenizerFile(json.loads(self.table.tokenizer.to_str()))

    def vocabularies(self) -> list[HostVocabulary]:
        return [HostVocabulary(NAME, self.original, frozenset(self.file.specials()), self.table.unknown)]

    def encode(self, vocabulary: str, lines: Sequence[str], trimmed: bool = False) -> list[list[int]]:
        tokenizer = self.table.tokenizer if trimmed else self.tokenizer
        return [line.ids for line in tokenizer.encode_batch_fast(list(lines), add_special_tokens=False)]

    def used(self, vocabulary: str, lines: Sequence[str]) -> list[Counter[int]]:
        read = self.encode(vocabulary, lines)
        for line, ids in zip(lines, read, strict=True):
            if self.table.unknown in ids:
                self.beginnings |= self.file.beginnings_in(line, self.tokenizer)
        return [Counter(token for line in read for token in line)]

    def closed(self, vocabulary: str, ids: set[int]) -> set[int]:
        return self.file.closed(ids | self.beginnings)

    def characters(self, vocabulary: str) -> set[int]:
        return self.file.characters()

    def trim(self, token_ids: Mapping[str, Tensor]) -> list[str]:
        ids, table = token_ids[NAME], self.table
        trimmed, embedding, rows = self.file.trimmed(ids.tolist()), table.embedding, table.rows
        if rows is not None:
            used, rows = rows[ids].unique(return_inverse=True)
            rows = rows.int()
        self.table = static.StaticTable(
            embedding.select_rows(ids if rows is None else used.long()),
            type(table.tokenizer).from_str(json.dumps(trimmed)),
            table.config,
            rows,
            None if table.factors is None else table.factors[ids],
            table.packing,
            None if table.stored is None else select_tokens(table.stored, ids),
        )
        self.words = self.table.tokens
        return self.notes

    def restored(
        self, vocabulary: str, lines: Sequence[str], ids: Sequence[Sequence[int]], trimmed: bool = False
    ) -> int:
        return self.file.restored(self.table.tokenizer if trimmed else self.tokenizer, lines, ids)
