"""How `shared-embeddings` opens word vectors: see `shared_embeddings.compress.host`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import safetensors
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from shared_embeddings.accounting import distinct_state
from shared_embeddings.checkpoints.checksums import KEY, state_digest, verified
from shared_embeddings.compress.host import EmbeddingTable, Vocabulary, WordTokens, teacher_table
from shared_embeddings.compress.measure import NEIGHBORS, PREDICTIONS, Predictions, Probe, Quality, Validation
from shared_embeddings.embedding import SharedEmbedding, WordEmbedding
from shared_embeddings.hosts import load_vectors
from shared_embeddings.quant.packed_tensor import install
from shared_embeddings.quant.standalone import check_decoder, program
from shared_embeddings.quant.storage import Packing, hold, packed_as, packing_of
from shared_embeddings.registry import build
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import UNREADABLE, first_line, replacing
from shared_embeddings.words.token_counts import count_words
from shared_embeddings.words.vectors import looks_like_vectors, read_vectors

NAME = "words"
# The tensor with the words in UTF-8, separated by line ends.
_WORDS = "words"
# Bytes at the beginning of a safetensors file that contain its format.
_SEARCHED_BYTES = 2**16
# The number of words whose neighbors are searched at a time.
_ROWS = 64


class Adapter:
    """Opens word vectors."""

    def sniff(self, path: Path) -> bool:
        """Whether a file looks like word vectors, compressed or not."""
        return path.is_file() and (_is_small(path) or looks_like_vectors(path))

    def read(self, path: Path) -> VectorsModel:
        """Read word vectors.

        Raises:
            UserError, ValueError: the file is damaged.
        """
        return VectorsModel(path)

    read_tables = read_trimmable = read


class VectorsModel(WordTokens):
    """Word vectors read from a file.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.module: SharedEmbedding
        self.packing: Packing | None = None
        if _is_small(path):
            self.words, self.module, self.packing = _read_small(path)
        else:
            found = read_vectors(path)
            self.words, self.module = found.words, _standard(found.vectors)
        self.original = self.words

    def embeddings(self) -> list[WordEmbedding]:
        """The one embedding."""
        return [WordEmbedding(NAME, self.words, None, self.module)]

    def tables(self) -> list[EmbeddingTable]:
        """The one table."""
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
        """The options unchanged.

        Raises:
            UserError: `load_vectors.py` could not decode the codec.
        """
        check_decoder(method, options)
        return dict(options)

    def count_text(self, texts: Sequence[Path]) -> dict[str, int]:
        """How often each word occurs in texts of words separated by spaces."""
        return count_words(texts)

    def quality(self, validation: Validation) -> Quality:
        """Fails: vectors alone predict nothing."""
        raise UserError(
            "word vectors have no perplexity or BLEU; leave out --validation and compare them with "
            "'shared-embeddings similarity'"
        )

    def probe(self, texts: Sequence[Path] | None, seed: int) -> Probe:
        """Compares the nearest neighbors of some words by cosine similarity."""
        count = min(PREDICTIONS, len(self.words))
        order = torch.randperm(len(self.words), generator=torch.Generator().manual_seed(seed))
        ids = order[:count].sort().values
        return Probe(f"the nearest of {count:,} words", lambda: _neighbors(self.module, ids), of=NEIGHBORS)

    def onnx_body(self) -> NoReturn:
        """Fails: word vectors are not a model."""
        raise UserError(
            f"model {self.path}: word vectors have no layers; use --format onnx-embeddings, or vec"
        )

    def place(self, fitted: Mapping[str, SharedEmbedding]) -> list[str]:
        """Replace the embedding."""
        self.module = fitted[NAME]
        return []

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the embedding."""
        return distinct_state(self.module)

    def sources(self) -> list[Path]:
        """The file that the vectors were read from."""
        return [self.path]

    def files(self, output: Path) -> list[Path]:
        """The file, and the module that reads it with numpy unless it exists."""
        loader = output.with_name(Path(load_vectors.__file__).name)
        is_there = loader.is_file() and loader.read_bytes() == _loader()
        return [output] if is_there else [output, loader]

    def write(self, output: Path, tensors: Mapping[str, Tensor], card: str = "") -> None:
        """Write a safetensors file, and the module that reads it with numpy, all or nothing."""
        words = np.frombuffer("\n".join(self.words).encode("utf-8"), np.uint8)
        settings = {"method": self.module.method, **self.module.stored_options()}
        sizes = [self.module.num_embeddings, self.module.embedding_dim]
        metadata = {
            "format": load_vectors.FORMAT,
            "version": "1",
            "sizes": json.dumps(sizes),
            "embedding": json.dumps(settings),
        }
        content = {name: tensor.contiguous() for name, tensor in tensors.items()}
        content[_WORDS] = torch.from_numpy(words.copy())
        metadata[KEY] = state_digest({**content, **metadata})
        with replacing(output) as temporary:
            save_file(content, temporary, metadata)
        for loader in self.files(output)[1:]:
            with replacing(loader) as temporary:
                temporary.write_bytes(_loader())

    def vocabularies(self) -> list[Vocabulary]:
        """The one vocabulary."""
        return [Vocabulary(NAME, self.original, frozenset(), None)]

    def encode(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        """The ids of the words of each line; words without a vector are skipped."""
        return _encoded(self.original, lines)

    def trim(self, kept: Mapping[str, Tensor]) -> list[str]:
        """Remove all words except those ``(n,)``.

        Raises:
            UserError: the embedding cannot drop words.
        """
        self.module = self.module.select_rows(kept[NAME])
        self.words = [self.original[word] for word in kept[NAME].tolist()]
        return []

    def encode_trimmed(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        """Like `encode`, with the remaining words."""
        return _encoded(self.words, lines)

    def restored(self, vocabulary: str, lines: Sequence[str], ids: Sequence[Sequence[int]]) -> int:
        """How many lines have a vector for every word."""
        return sum(len(line.split()) == len(found) for line, found in zip(lines, ids))

    restored_trimmed = restored

    def weight_bytes(self) -> int:
        """The bytes of all tensors as stored."""
        return sum(tensor.nbytes for tensor in packed_as(self.tensors(), self.packing).values())

    def write_trimmed(self, output: Path, card: str = "") -> None:
        """Write the vectors, all or nothing."""
        self.write(output, packed_as(self.tensors(), self.packing))


def _is_small(path: Path) -> bool:
    """Whether a file looks like one that `VectorsModel.write` wrote."""
    with path.open("rb") as file:
        return f'"{load_vectors.FORMAT}"'.encode() in file.read(_SEARCHED_BYTES)


def _read_small(path: Path) -> tuple[list[str], SharedEmbedding, Packing | None]:
    """The words, the embedding and its packing in a file that `VectorsModel.write` wrote."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            settings = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, safetensors.SafetensorError) as error:
        raise _unreadable(path, error) from error
    verified({**tensors, **settings}, f"vectors {path}")
    try:
        words = bytes(tensors.pop(_WORDS).numpy()).decode("utf-8").split("\n")
        options: dict[str, Any] = json.loads(settings["embedding"])
        count, dim = json.loads(settings["sizes"])
        embedding = build(options.pop("method"), num_embeddings=count, embedding_dim=dim, **options)
        packing = packing_of(tensors)
        state = hold(tensors)
        if len(words) != count or state.keys() != embedding.state_dict().keys():
            raise UserError("its words and tensors do not match")
        embedding.load_state_dict(install(embedding, state), strict=False)
    except UNREADABLE as error:
        raise _unreadable(path, error) from error
    return words, embedding.eval(), packing


def _unreadable(path: Path, error: BaseException) -> UserError:
    return UserError(
        f"vectors {path}: cannot be read ({first_line(error)}); it is damaged or truncated; copy it again"
    )


def _standard(vectors: np.ndarray) -> SharedEmbedding:
    """A plain table with the vectors ``(V, D)``."""
    count, dim = vectors.shape
    with torch.device("meta"):
        embedding = build("standard", num_embeddings=count, embedding_dim=dim)
    embedding.load_state_dict({"weight": torch.from_numpy(vectors)}, assign=True)
    return embedding.eval()


@torch.no_grad()
def _neighbors(embedding: SharedEmbedding, ids: Tensor) -> Predictions:
    """The nearest other word of each of the words ``(n,)``."""
    table = F.normalize(embedding.table().float())
    found = []
    for words in ids.split(_ROWS):
        scores = table[words] @ table.t()
        scores[torch.arange(len(words)), words] = -torch.inf
        found.append(scores.argmax(dim=1))
    return Predictions(torch.cat(found), torch.ones(len(ids)))


def _encoded(words: Sequence[str], lines: Sequence[str]) -> list[list[int]]:
    """The ids of the words of each line that are among `words`."""
    ids = {word: place for place, word in enumerate(words)}
    return [[ids[word] for word in line.split() if word in ids] for line in lines]


def _loader() -> bytes:
    """The content of the module that reads files with numpy."""
    return program(Path(load_vectors.__file__)).encode()
