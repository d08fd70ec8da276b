"""Language models as a host of `shared_embeddings.checkpoints.trim_adapter`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from lm import compression
from lm.data.vocabulary import Vocabulary as Words
from shared_embeddings.checkpoints.storage import packed_as
from shared_embeddings.checkpoints.trim_adapter import BANDS_NOTE, Vocabulary, maps_beside, write_maps

NAME = compression.NAME


class Host:
    """Checkpoints of lm_train."""

    def recognises(self, path: Path) -> bool:
        """Whether a file is a checkpoint of lm_train."""
        return compression.Host().recognises(path)

    def read(self, path: Path) -> TrimmableCheckpoint:
        """Read a model.

        Raises:
            UserError: it does not fit its own configuration.
        """
        return TrimmableCheckpoint(path)


class TrimmableCheckpoint:
    """A language model whose words can be left out; texts that have them then read ``<unk>``.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.checkpoint = compression.CheckpointModel(path)
        self.words = _vocabulary(self.checkpoint.words)
        self.trimmed = self.words

    def vocabularies(self) -> list[Vocabulary]:
        """The one vocabulary."""
        words = self.words
        return [Vocabulary(NAME, words.words, frozenset((words.unk, words.eos)), words.unk)]

    def encoded(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        """The ids of the words of each line, and of ``<eos>``."""
        del vocabulary  # there is one only
        return [self.words.encode(line) for line in lines]

    def used(self, vocabulary: str, lines: Sequence[str]) -> Counter[int]:
        """How often the lines have each word."""
        return Counter(word for line in self.encoded(vocabulary, lines) for word in line)

    def closed(self, vocabulary: str, ids: set[int]) -> set[int]:
        """The ids: words stand for themselves."""
        del vocabulary
        return ids

    def trim(self, kept: Mapping[str, Tensor]) -> list[str]:
        """Leave out all words but those ``(n,)``.

        Raises:
            ValueError: the embedding cannot leave words out.
        """
        old = self.checkpoint.module.embedding
        new = old.select_rows(kept[NAME])
        words = [self.words.words[word] for word in kept[NAME].tolist()]
        self.checkpoint.module.embedding = new
        self.checkpoint.words, self.trimmed = words, _vocabulary(words)
        settings = {"method": new.method, **new.stored_options()}
        self.checkpoint.config = {**self.checkpoint.config, "embedding": settings}
        notes = [
            "the state of the optimiser and the position in the text are left out",
            "probabilities are shared out among the words that are left: a perplexity is lower than that of "
            "the whole model, and cannot be compared with it",
        ]
        return notes if old.has_linear_scores else [*notes, BANDS_NOTE]

    def encoded_anew(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        """As `encoded`, in the words that are left."""
        del vocabulary
        return [self.trimmed.encode(line) for line in lines]

    def _weights(self) -> dict[str, Tensor]:
        """The tensors, each once, packed as they were."""
        return packed_as(self.checkpoint.written(), self.checkpoint.packing)

    def weight_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._weights().values())

    def sources(self) -> list[Path]:
        """The file that the model was read from."""
        return self.checkpoint.sources()

    def files(self, output: Path) -> list[Path]:
        """The file of a model that is called `output`."""
        return self.checkpoint.files(output)

    def map_files(self, output: Path) -> dict[str, Path]:
        """One file beside the model."""
        return maps_beside(output, self.vocabularies())

    def write(self, output: Path, maps: Mapping[Path, str]) -> None:
        """Write the model without what only training needs, and the maps."""
        self.checkpoint.write(output, self._weights())
        write_maps(maps)


def _vocabulary(words: Sequence[str]) -> Words:
    """The words of a model, whose counts it does not hold.

    Raises:
        UserError: ``<unk>`` or ``<eos>`` is missing.
    """
    return Words(words, [0] * len(words))
