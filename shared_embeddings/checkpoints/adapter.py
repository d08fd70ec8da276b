"""What a program offers so that its models can be compressed, and which program a model is of.

Axes: ``V`` vocabulary, ``D`` model dimension.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shared_embeddings.checkpoints.agreement import Probe
from shared_embeddings.checkpoints.quality import Quality, Validation
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.method import Layer
from shared_embeddings.registry import build

GROUP = "shared_embeddings.hosts"


@dataclasses.dataclass(frozen=True)
class TiedTable:
    """One table of a trained model, wherever the model uses it.

    Where the output is tied to the map of a DeFINE unit, the table is that map ``(V, n)``: what is stored for
    the words, as in DeFINE's Table 5. The layers after it stay as they are trained. Every other embedding is
    replaced as a whole, by what is fitted to its full table, as that is right for both sides.

    Attributes:
        name: the host's name of it.
        uses: where the model uses it, such as "input" and "output".
        words: in the order of their ids.
        table: ``(V, D)``, its values.
        padding_idx: the word without a vector, or None.
        is_scored: whether the model's output is tied to it.
        sentence_marks: words that stand in every sentence, but in no text.
        parameters: of the embedding as it is.
        stored_bits: of the embedding as it is.
        has_output_bias: whether the output has a bias that a new embedding takes over.
        part: of the embedding that the table is, such as "map of define"; None for all of it.
    """

    name: str
    uses: tuple[str, ...]
    words: Sequence[str]
    table: Tensor
    padding_idx: int | None
    is_scored: bool
    sentence_marks: tuple[str, ...]
    parameters: int
    stored_bits: int
    has_output_bias: bool = False
    part: str | None = None


@dataclasses.dataclass(frozen=True)
class WordEmbedding:
    """One embedding of a trained model, as it is.

    Attributes:
        name: the host's name of it.
        words: in the order of their ids.
        padding_idx: the word without a vector, or None.
        module: a shared embedding, or torch's plain one.
    """

    name: str
    words: Sequence[str]
    padding_idx: int | None
    module: SharedEmbedding | nn.Embedding

    def table(self) -> Tensor:
        """The vectors ``(V, D)`` that the model's input has for its words."""
        with torch.no_grad():
            module = self.module
            table = module.weight if isinstance(module, nn.Embedding) else module.table()
            return table.detach().float()

    def layers(self, ids: Tensor) -> list[Layer]:
        """What words with ids ``(n,)`` are in every layer of the embedding, the output last."""
        with torch.no_grad():
            if isinstance(self.module, nn.Embedding):
                return [Layer("output", self.module(ids))]
            return self.module.layers(ids)


class TrainedModel(Protocol):
    """A model that a host has read."""

    @property
    def module(self) -> nn.Module:
        """The model itself, on the CPU."""

    def embeddings(self) -> list[WordEmbedding]:
        """Its embeddings of words, each once, in evaluation mode; any kind of output side will do."""

    def tables(self) -> list[TiedTable]:
        """Its tables; ValueError where one cannot be replaced."""

    def options_for(self, table: str, method: str, options: Mapping[str, object]) -> dict[str, object]:
        """The options with what the model needs for a table; ValueError where it cannot work with them."""

    def count_text(self, texts: Sequence[Path]) -> dict[str, int]:
        """How often its words are in texts; ValueError where they cannot be counted."""

    def quality(self, validation: Validation) -> Quality:
        """How good the model is now; ValueError where that cannot be measured, before any long work."""

    def probe(self, texts: Sequence[Path] | None, seed: int) -> Probe:
        """What the model predicts in texts, or in what it makes up from a seed where there are none.

        Raises:
            ValueError: it cannot be asked; says why.
        """

    def place(self, fitted: Mapping[str, SharedEmbedding]) -> list[str]:
        """Put one embedding per table into the model; returns what else that changes."""

    def written(self) -> dict[str, Tensor]:
        """The tensors of the model, each once, sharing memory with it."""

    def sources(self) -> list[Path]:
        """The files, or the folder, that it was read from."""

    def files(self, path: Path) -> list[Path]:
        """The files, or the folder, of a model that is called `path`, in the format of this one."""

    def write(self, path: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the model in the host's own format, completely or not at all.

        Args:
            path: the file.
            weights: what `written` gave, packed by `shared_embeddings.checkpoints.storage`.

        Raises:
            OSError: they cannot be written.
        """


class Host(Protocol):
    """What an entry point of the group gives."""

    def recognises(self, path: Path) -> bool:
        """Whether a file or folder is a model of this host; runs no code from it."""

    def read(self, path: Path) -> TrainedModel:
        """Read a model; ValueError where it does not fit itself."""


def find_host(model: Path, group: str = GROUP) -> tuple[str, Any]:
    """The host of a `group` of entry points that a model is of, with its name.

    Raises:
        ValueError: there is no such file, or no host recognises it.
    """
    if not model.exists():
        raise ValueError(f"model {model}: no such file; check the path")
    points = sorted(entry_points(group=group), key=lambda point: point.name)
    for point in points:
        host = point.load()()
        if host.recognises(model):
            return point.name, host
    known = ", ".join(point.name for point in points) or "none"
    raise ValueError(
        f"model {model}: is cut short, or of no program that this command takes (it takes: {known}); files "
        "that hold more than plain values and tensors are not opened, because they could run code"
    )


def name_of_part(embedding: SharedEmbedding) -> str | None:
    """Which part of an embedding is replaced, see `TiedTable.part`."""
    return None if embedding.word_part() is embedding else f"map of {embedding.method}"


def with_untrained_part(
    embedding: SharedEmbedding, words: Sequence[str], method: str, options: Mapping[str, Any]
) -> SharedEmbedding:
    """What `embedding` becomes with a part of another method, whose parameters take no memory.

    Raises:
        OptionError: there cannot be such a part.
    """
    old = embedding.word_part()
    sizes = {"num_embeddings": old.num_embeddings, "embedding_dim": old.embedding_dim}
    with torch.device("meta"):
        part = build(method, **sizes, padding_idx=old.padding_idx, words=words, **options)
    return embedding.with_word_part(part)


def teacher_table(embedding: SharedEmbedding, is_scored: bool) -> Tensor:
    """The table ``(V, D)`` of a trained embedding that another one can stand in for.

    Raises:
        ValueError: it is scored by other vectors than those that it gives to the input.
    """
    with torch.no_grad():
        table = embedding.table().detach().clone()
        if is_scored:
            same = embedding.has_linear_scores and embedding.score_dim == embedding.embedding_dim
            if not same or not torch.allclose(embedding.output_table(), table, atol=1e-6):
                raise ValueError(
                    f"the output side of this {embedding.method} embedding is not the table of its input, so "
                    "that no other method can be fitted to both; compress the plain model instead"
                )
    return table


def take_over_bias(embedding: SharedEmbedding, bias: Tensor) -> list[str]:
    """Copy the bias ``(V,)`` of a model's scores into its new embedding; gives notes about what is lost."""
    if embedding.output_bias() is None:
        return ["the bias of the output is left out; set output_bias: true to keep it"]
    embedding.set_output_bias(bias)
    if embedding.has_linear_scores:
        return []
    return [
        f"the softmax of '{embedding.method}' takes two steps: its words have the bias of the output, its "
        "clusters one that stands for all of their words, which is an approximation"
    ]
