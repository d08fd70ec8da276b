"""How a host program opens its trained models for compression, trimming and analysis.

A host registers one `HostAdapter` as an entry point of the group `GROUP`. An adapter module imports nothing
beyond the dependencies of this library, so that a model is recognized even where its host's extra is not
installed.

Axes: ``V`` vocabulary, ``D`` model dimension, ``n`` words that are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shared_embeddings.accounting import distinct_state
from shared_embeddings.compress.measure import Quality, Samples, ScoredWords, Validation
from shared_embeddings.embedding import SharedEmbedding, WordEmbedding, score_only
from shared_embeddings.quant.storage import Packing, packed_as
from shared_embeddings.registry import build
from shared_embeddings.utils.errors import UserError
from shared_embeddings.words.token_counts import count_words

GROUP = "shared_embeddings.hosts"
TRAINING_STATE_NOTE = "the optimizer state and the position in the training data are not kept"
BANDS_NOTE = (
    "each band of the adaptive softmax keeps its total probability: within a band, probabilities are the "
    "original's over the remaining words; across bands they are not"
)


@dataclasses.dataclass(frozen=True)
class EmbeddingTable:
    """One table of a trained model, wherever the model uses it.

    Where the output is tied to the map of a DeFINE unit, the table is that map ``(V, n)``: the values stored
    per word, as in DeFINE's Table 5. The layers on top of it stay as trained. Any other embedding is replaced
    as a whole by one that is fitted to its full table, which is right for both sides.
    """

    name: str  # the host's name for it
    uses: tuple[str, ...]  # where the model uses it, such as "input" and "output"
    words: Sequence[str]  # in the order of their ids; empty if rows are not those of words, but of hashes
    table: Tensor  # ``(V, D)``, its values
    padding_idx: int | None  # the word without a vector, or None
    is_scored: bool  # whether the model's output is tied to it
    sentence_marks: tuple[str, ...]  # words that every sentence gets, but no text contains
    parameters: int  # of the current embedding
    stored_bits: int  # of the current embedding
    is_by_frequency: bool = False  # whether frequent words come first
    has_output_bias: bool = False  # whether the output has a bias that the new embedding inherits
    # The part of the embedding that the table is, such as "map of define"; None for all of it.
    part: str | None = None


@dataclasses.dataclass(frozen=True)
class HostVocabulary:
    """The words of one or more tables of a model."""

    name: str  # the host's name for it
    words: Sequence[str]  # in the order of their ids
    specials: frozenset[int]  # ids that the model always needs, whether or not a text contains them
    unknown: int | None  # the id of out-of-vocabulary words, or None
    # Which sides of a translation model ("source", "target") use it; empty for models without sides.
    sides: tuple[str, ...] = ()


class StoredModel(Protocol):
    """A model on disk; by default, its tokens are whole words. What it cannot do is a `UserError`."""

    # Whether texts are as people write them, so that the model tokenizes words of any language.
    reads_raw_text: bool = False

    def files(self, path: Path) -> list[Path]:
        """Return the files, or the folder, of a model at `path` in this format: its own, or an output's."""
        return [path]

    def count_text(self, texts: Sequence[Path]) -> dict[str, int]:
        """Return how often each token occurs in texts."""
        return count_words(texts)


class TrainedModel(StoredModel, Protocol):
    """A model whose embeddings can be measured and replaced."""

    module: nn.Module  # the model itself, on the CPU

    def embeddings(self) -> list[WordEmbedding]:
        """Return its input embeddings, each once, in evaluation mode."""

    def tables(self) -> list[EmbeddingTable]:
        """Return the embedding tables that can be replaced."""

    def options_for(self, table: str, method: str, options: Mapping[str, object]) -> dict[str, object]:
        """Return the options of a method, completed with those that the model requires for a table."""

    def quality(self, validation: Validation) -> Quality:
        """Return the current quality of the model; raise before any long work."""

    def samples(self, texts: Sequence[Path] | None, seed: int, tokens: int) -> Samples:
        """Return about so many predictions in texts, or without texts in what the model generates."""

    def count_rows(self, texts: Sequence[Path] | None, seed: int) -> Mapping[str, Tensor]:
        """Return how often each row ``(V,)`` is read with texts, by name of the tables without words."""
        return {}

    def place(self, fitted: Mapping[str, SharedEmbedding]) -> list[str]:
        """Put one embedding per table into the model; return notes about other changes."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the model, each once, sharing memory with it."""
        return distinct_state(self.module)

    def write(self, output: Path, tensors: Mapping[str, Tensor], card: str) -> None:
        """Write the model in the host's own format, all or nothing.

        Args:
            output: one of the names that `files` accepts.
            tensors: what `tensors` returned, possibly packed by `shared_embeddings.quant.storage`.
            card: what was done, in Markdown, for formats with a place for it.
        """


class HostAdapter(Protocol):
    """The object behind an entry point of the group `GROUP`; it is constructed without arguments.

    A host that exports whole models to ONNX returns models with a method ``onnx_body() -> OnnxBody``, after
    which the model cannot be used. One that trims vocabularies has ``read_trimmable(path)``.
    Models that are damaged or inconsistent, or do not fit the purpose, are a `UserError`.
    """

    def sniff(self, path: Path) -> bool:
        """Return whether a file or folder looks like a model of this host, damaged or not.

        Reads a bounded part of the file, runs none of its code and loads no tensors.
        """

    def read(self, path: Path, runs: bool = True) -> TrainedModel:
        """Read a model; one that is not run may take less memory."""


class TrimmableModel(StoredModel, Protocol):
    """A model whose vocabulary can be trimmed."""

    def vocabularies(self) -> list[HostVocabulary]:
        """Return its original vocabularies, each with its own rows."""

    def encode(self, vocabulary: str, lines: Sequence[str], trimmed: bool = False) -> list[list[int]]:
        """Return the ids of each line in a vocabulary, before or after trimming, with those of marks."""

    def used(self, vocabulary: str, lines: Sequence[str]) -> list[Counter[int]]:
        """Count the tokens of lines: one counter for each way of reading them, line by line first."""
        return [Counter(word for line in self.encode(vocabulary, lines) for word in line)]

    def closed(self, vocabulary: str, ids: set[int]) -> set[int]:
        """Return the ids, plus those without which texts would be tokenized differently."""
        return ids

    def characters(self, vocabulary: str) -> set[int]:
        """Return the ids without which other texts could no longer be decoded from their ids."""
        return set()

    def trim(self, token_ids: Mapping[str, Tensor]) -> list[str]:
        """Remove all tokens except these ``(n,)`` of each vocabulary; return notes about changes."""

    def restored(
        self, vocabulary: str, lines: Sequence[str], ids: Sequence[Sequence[int]], trimmed: bool = False
    ) -> int:
        """Count the lines that decoding their `ids` gives again, up to spaces and normalization."""

    def weight_bytes(self) -> int:
        """Return the bytes of the tensors as `write_trimmed` would write them."""

    def write_trimmed(self, output: Path, card: str) -> None:
        """Write the model, as `TrainedModel.write` does."""


class TrimmableTrainedModel(TrainedModel, TrimmableModel, Protocol):
    """A model that is read and trimmed as a whole; what is written is packed like what was read."""

    packing: Packing | None

    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in packed_as(self.tensors(), self.packing).values())

    def write_trimmed(self, output: Path, card: str) -> None:
        self.write(output, packed_as(self.tensors(), self.packing), card)


def find_host(model: Path, skip_undecodable: bool = False) -> tuple[str, Any]:
    """Return the name and the `HostAdapter` of the host that a model belongs to; UserError if there is none.

    With `skip_undecodable`, that of word vectors leaves out words that are not UTF-8 text.
    """
    if not model.exists():
        raise UserError(f"model {model}: no such file; check the path")
    # In reverse, since importing "hf" imports transformers where it is installed, which takes long.
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name, reverse=True)
    for point in points:
        adapter = point.load()()
        if adapter.sniff(model):
            if skip_undecodable:
                if not hasattr(adapter, "skip_undecodable"):
                    raise UserError(f"skip_undecodable is for word vectors, but {model} is not; remove it")
                adapter.skip_undecodable = True
            return point.name, adapter
    known = ", ".join(sorted(point.name for point in points)) or "none"
    if model.is_dir():
        raise UserError(
            f"model {model}: this kind of folder is not supported (supported hosts: {known}): name one "
            "with the config.json of a transformers model, or a static model of model2vec or "
            "sentence-transformers"
        )
    raise UserError(
        f"model {model}: truncated or unsupported checkpoint (supported hosts: {known}); check the path, or "
        "copy the file again"
    )


def with_untrained_part(
    embedding: SharedEmbedding, words: Sequence[str], method: str, options: Mapping[str, Any]
) -> SharedEmbedding:
    """`embedding` with its word part replaced by another method, on the meta device."""
    old = embedding.inner_embedding()
    sizes = {"num_embeddings": old.num_embeddings, "embedding_dim": old.embedding_dim}
    with torch.device("meta"):
        part = build(method, **sizes, padding_idx=old.padding_idx, words=words, **options)
    return embedding.with_inner_embedding(part)


def check_scores(embedding: SharedEmbedding, width: int) -> None:
    """Raise `UserError` unless an embedding can score the hidden states of a model ending in `width`."""
    if embedding.has_output and embedding.score_dim == width:
        return
    takes = f"takes {embedding.score_dim} dimensions" if embedding.has_output else "has no output side"
    raise UserError(
        f"this {embedding.method} embedding {takes}, but the model ends in {width}; set output: table or "
        "output_projection: true where the method has them, or choose another method"
    )


@torch.no_grad()
def teacher_table(embedding: SharedEmbedding, is_scored: bool) -> Tensor:
    """Return the table ``(V, D)`` of a trained embedding; UserError if the output side has other vectors."""
    table = embedding.table().detach().clone()
    same = embedding.has_linear_scores and embedding.score_dim == embedding.embedding_dim
    if is_scored and not (same and torch.allclose(embedding.output_table(), table, atol=1e-6)):
        raise UserError(
            f"the output side of this {embedding.method} embedding is not its input table, so no other "
            "method can be fitted to both; compress the uncompressed model instead"
        )
    return table


def place_plain(model: TrainedModel, tables: Sequence[EmbeddingTable]) -> list[SharedEmbedding]:
    """Put an embedding `standard`, which shares its memory, for each table of a model into it.

    Returns the embeddings of tables that are scored.
    """
    plain: dict[str, SharedEmbedding] = {}
    for table in tables:
        options: dict[str, Any] = model.options_for(table.name, "standard", {})
        words, width = table.table.shape
        with torch.device("meta"):
            sizes: dict[str, Any] = {"num_embeddings": words, "embedding_dim": width}
            embedding: Any = build("standard", **sizes, padding_idx=table.padding_idx, **options)
        embedding.weight = nn.Parameter(table.table)
        if embedding.bias is not None:
            embedding.bias = nn.Parameter(table.table.new_zeros(words))
        plain[table.name] = embedding.eval().requires_grad_(False)
    model.place(plain)
    return [plain[table.name] for table in tables if table.is_scored]


@contextlib.contextmanager
def scoring_only(embeddings: Iterable[SharedEmbedding], words: ScoredWords | None) -> Iterator[None]:
    """Within this context, embeddings score these words only; all words for None."""
    with contextlib.ExitStack() as stack:
        if words is not None:
            for embedding in embeddings:
                stack.enter_context(score_only(embedding, words.ids, words.offsets))
        yield


@torch.no_grad()
def scores_rows(embedding: SharedEmbedding, words: Tensor) -> bool:
    """Whether the scores of words ``(n,)`` are products with their rows, as `score_only` computes them."""
    if not embedding.has_linear_scores or embedding.score_dim != embedding.embedding_dim:
        return False
    hidden = torch.randn(1, embedding.score_dim, generator=torch.Generator().manual_seed(0))
    hidden = hidden.to(embedding(words[:1]))
    scores = embedding.logits(hidden)[:, words]
    with score_only(embedding, words):
        return torch.allclose(
            embedding.logits(hidden), scores, rtol=1e-2, atol=1e-2 * float(scores.abs().max())
        )


def copy_output_bias(embedding: SharedEmbedding, bias: Tensor) -> list[str]:
    """Copy the output bias ``(V,)`` of a model into its new embedding; returns notes about what is lost."""
    if embedding.output_bias() is None:
        return ["the output bias is dropped; set output_bias: true to keep it"]
    embedding.set_output_bias(bias)
    if embedding.has_linear_scores:
        return []
    return [
        f"the softmax of '{embedding.method}' has two steps: its words inherit the output bias; the bias of "
        "a cluster approximates that of all its words"
    ]
