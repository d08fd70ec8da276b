"""Open word vectors as models to compress and trim, see `shared_embeddings.compress.host`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from shared_embeddings.checkpoints import check_sizes, load_tensors, save_safetensors
from shared_embeddings.compress import host
from shared_embeddings.compress.host import (
    EmbeddingTable,
    HostVocabulary,
    TrimmableTrainedModel,
    teacher_table,
)
from shared_embeddings.compress.measure import (
    NEIGHBORS,
    SHARPNESS,
    Batch,
    Quality,
    Samples,
    Validation,
)
from shared_embeddings.embedding import SharedEmbedding, WordEmbedding
from shared_embeddings.quant.codec import check_decoder, program
from shared_embeddings.quant.packed_tensor import install
from shared_embeddings.quant.storage import Packing, hold, packing_of
from shared_embeddings.registry import build, check_stored
from shared_embeddings.utils.errors import UserError, first_line
from shared_embeddings.utils.files import replacing, write_text
from shared_embeddings.word_vectors import load_vectors
from shared_embeddings.words.vectors import looks_like_vectors, read_vectors

NAME = "words"
# The module that reads files with numpy.
_LOADER = Path(load_vectors.__file__)
# The tensor with the words in UTF-8, separated by line ends.
_WORDS = "words"
# Bytes at the beginning of a safetensors file that contain its format.
_SEARCHED_BYTES = 2**16
# The number of words whose neighbors are searched at a time.
_ROWS = 64


class WordVectorsAdapter(host.HostAdapter):
    """Opens word vectors.

    Attributes:
        skip_undecodable: an option of `read_vectors`.
    """

    skip_undecodable = False

    def sniff(self, path: Path) -> bool:
        return path.is_file() and (_is_compressed(path) or looks_like_vectors(path))

    def read(self, path: Path, runs: bool = True) -> VectorsModel:
        return VectorsModel(path, self.skip_undecodable)

    read_trimmable = read


class VectorsModel(TrimmableTrainedModel):
    """Word vectors read from a file."""

    def __init__(self, path: Path, skip_undecodable: bool = False) -> None:
        self.path = path
        self.notes: list[str] = []  # what a file of another program has, but not the model
        self.module: Any  # a SharedEmbedding
        self.packing: Packing | None = None
        if _is_compressed(path):
            stored = read_compressed(path)
            self.words, self.module, self.packing, self.notes = stored[:4]
        else:
            self.words, vectors, notes = read_vectors(path, skip_undecodable=skip_undecodable)
            self.notes = list(notes)
            with torch.device("meta"):
                count, dim = vectors.shape
                self.module = build("standard", num_embeddings=count, embedding_dim=dim).eval()
            self.module.load_state_dict({"weight": torch.from_numpy(vectors)}, assign=True)
        self.original = self.words

    def embeddings(self) -> list[WordEmbedding]:
        return [WordEmbedding(NAME, self.words, None, self.module)]

    def tables(self) -> list[EmbeddingTable]:
        counts = self.module.counts()
        return [
            EmbeddingTable(
                name=NAME,
                uses=("input",),
                words=self.words,
                table=teacher_table(self.module, is_scored=False),
                padding_idx=None,
                is_scored=False,
                sentence_marks=(),
                parameters=counts["total"],
                stored_bits=counts["stored_bits"],
            )
        ]

    def options_for(self, table: str, method: str, options: Mapping[str, object]) -> dict[str, object]:
        check_decoder(method, options)
        return dict(options)

    def quality(self, validation: Validation) -> Quality:
        raise UserError(
            "word vectors have no perplexity or BLEU; give no validation text, and compare them with "
            "'shared-embeddings similarity'"
        )

    def samples(self, texts: Sequence[Path] | None, seed: int, tokens: int) -> Samples:
        """Return the nearest neighbors of words, which no text determines."""
        if (rows := self.module.num_embeddings) < 2:
            raise UserError("a single word has no neighbors")
        count = min(tokens, rows)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))

        def find_neighbors(words: Tensor) -> Batch:
            table = F.normalize(self.module.table().float())
            scores = SHARPNESS * table[words] @ table.t()
            scores[torch.arange(len(words)), words] = -torch.inf
            return Batch(scores)

        parts = order[:count].sort().values.split(_ROWS)
        return Samples(f"the nearest of {count:,} words", parts, find_neighbors, of=NEIGHBORS)

    def place(self, fitted: Mapping[str, SharedEmbedding]) -> list[str]:
        self.module = fitted[NAME]
        return self.notes

    def files(self, path: Path) -> list[Path]:
        """Return the file; UserError if the module beside an output would replace another file."""
        loader = path.with_name(_LOADER.name)
        if path != self.path and loader.exists() and loader.read_bytes() != program(_LOADER).encode():
            raise UserError(
                f"output {path}: {loader} exists with other content; remove it, or use another folder"
            )
        return [path]

    def write(self, output: Path, tensors: Mapping[str, Tensor], card: str = "") -> None:
        write_text(output.with_name(_LOADER.name), program(_LOADER))
        with replacing(output) as temporary:
            write_compressed(temporary, self.words, self.module, tensors, self.notes)

    def vocabularies(self) -> list[HostVocabulary]:
        return [HostVocabulary(NAME, self.original, frozenset(), None)]

    def encode(self, vocabulary: str, lines: Sequence[str], trimmed: bool = False) -> list[list[int]]:
        """Return the ids of the words of each line that are in the vocabulary."""
        ids = {word: place for place, word in enumerate(self.words if trimmed else self.original)}
        return [[ids[word] for word in line.split() if word in ids] for line in lines]

    def trim(self, token_ids: Mapping[str, Tensor]) -> list[str]:
        self.module = self.module.select_rows(token_ids[NAME])
        self.words = [self.original[word] for word in token_ids[NAME].tolist()]
        return self.notes

    def restored(
        self, vocabulary: str, lines: Sequence[str], ids: Sequence[Sequence[int]], trimmed: bool = False
    ) -> int:
        return sum(len(line.split()) == len(tokens) for line, tokens in zip(lines, ids))


def _is_compressed(path: Path) -> bool:
    with path.open("rb") as file:
        return f'"{load_vectors.FORMAT}"'.encode() in file.read(_SEARCHED_BYTES)


def write_compressed(
    path: Path,
    words: Sequence[str],
    embedding: SharedEmbedding,
    tensors: Mapping[str, Tensor],
    notes: Sequence[str] = (),
) -> None:
    """Write the file that `load_vectors` reads; the `tensors` are those of the embedding, and `EXTRAS`."""
    metadata = {
        "format": load_vectors.FORMAT,
        "version": load_vectors.VERSION,
        "sizes": json.dumps([embedding.num_embeddings, embedding.embedding_dim]),
        "embedding": json.dumps({"method": embedding.method, **embedding.stored_options()}),
    }
    if notes:
        metadata["notes"] = json.dumps(notes)
    content = {name: tensor.contiguous() for name, tensor in tensors.items()}
    content[_WORDS] = torch.from_numpy(np.frombuffer("\n".join(words).encode(), np.uint8).copy())
    save_safetensors(content, path, metadata)


class StoredVectors(NamedTuple):
    """The content of a file that `write_compressed` wrote."""

    words: list[str]
    embedding: SharedEmbedding
    packing: Packing | None
    notes: list[str]
    extras: dict[str, Tensor]  # those of `EXTRAS` that it has


def read_compressed(path: Path) -> StoredVectors:
    """Read what `write_compressed` wrote; UserError for a damaged file, or one of another version."""
    tensors = load_tensors(path, f"vectors {path}")
    try:
        with safe_open(path, "pt") as file:
            settings = file.metadata() or {}
        if settings["version"] != load_vectors.VERSION:
            raise ValueError(
                f"it is of version {settings['version']}, but this program supports {load_vectors.VERSION}"
            )
        words = bytes(tensors.pop(_WORDS).numpy()).decode("utf-8").split("\n")
        extras = {name: tensors.pop(name) for name in load_vectors.EXTRAS if name in tensors}
        options = json.loads(settings["embedding"])
        count, dim = json.loads(settings["sizes"])
        check_sizes("its header", {"words": count, "dimensions": dim, **options}, tensors)
        packing, state = packing_of(tensors), hold(tensors)
        options |= {"num_embeddings": count, "embedding_dim": dim}
        check_stored(state, **options)
        embedding = build(**options)
        embedding.load_state_dict(install(embedding, state), strict=False)
    except Exception as error:  # each method raises its own errors
        raise UserError(
            f"vectors {path}: cannot be read ({first_line(error)}); it is damaged, or of another "
            "version of this program; copy it again, or use that version"
        ) from error
    return StoredVectors(words, embedding.eval(), packing, json.loads(settings.get("notes", "[]")), extras)
