"""Translation models as a host of `shared_embeddings.checkpoints.trim_adapter`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

import shared_embeddings as se
from nmt import compression
from nmt.checkpoint.checkpoint import packing_of_checkpoint
from nmt.data.vocabulary import SENTENCE_MARKS, UNKNOWN, Vocab
from nmt.model.embeddings import shared_embeddings_of, words_module
from nmt.model.plan import PADDING, words_of
from shared_embeddings.checkpoints.storage import packed_as
from shared_embeddings.checkpoints.trim_adapter import BANDS_NOTE, Vocabulary, maps_beside, write_maps
from shared_embeddings.errors import UserError

MARKS = (UNKNOWN, PADDING, *SENTENCE_MARKS)
SIDES = {"source": "src", "target": "tgt"}
BOTH = "words"


class Host:
    """Checkpoints of OpenNMT-py, with its own tables or with shared embeddings."""

    def recognises(self, path: Path) -> bool:
        """Say whether a file holds a model of OpenNMT-py."""
        return compression.Host().recognises(path)

    def read(self, path: Path) -> TrimmableCheckpoint:
        """Read a model.

        Raises:
            UserError: it does not fit its own options, or its weights are missing.
        """
        return TrimmableCheckpoint(path)


class TrimmableCheckpoint:
    """A translation model whose words can be left out; sentences that have them then read ``<unk>``.

    A vocabulary that both sides share is trimmed for both at once.

    Args:
        path: ``NAME.pt``.
    """

    def __init__(self, path: Path) -> None:
        self.model = compression.CheckpointModel(path)
        self.packing = packing_of_checkpoint(str(path), self.model.checkpoint)
        self.words = {side: words_of(self.model.vocabs, side) for side in SIDES}
        shared = bool(getattr(self.model.options, "share_vocab", False)) or self.model.share_inputs
        is_language_model = "source" not in self.model.sides and not self.model.share_inputs
        is_one = self.words["source"] == self.words["target"] and (shared or is_language_model)
        self.sides = {BOTH: tuple(SIDES)} if is_one else {side: (side,) for side in SIDES}
        self.before = {name: Vocab(self.words[sides[0]]) for name, sides in self.sides.items()}
        self.after = dict(self.before)

    def vocabularies(self) -> list[Vocabulary]:
        """Return the one vocabulary of both sides, or the two."""
        return [
            Vocabulary(name, words.ids_to_tokens, self._specials(words), words.default_id, self.sides[name])
            for name, words in self.before.items()
        ]

    def _specials(self, words: Vocab) -> frozenset[int]:
        """Return the ids of OpenNMT's marks, of those that transforms put in, and of the first word."""
        start = self.model.checkpoint["vocab"].get("decoder_start_token")
        named = {*MARKS, start, *(getattr(self.model.options, "default_specials", None) or ())}
        return frozenset(
            number
            for number, word in enumerate(words.ids_to_tokens)
            if word in named or (word.startswith("｟") and word.endswith("｠"))
        )

    def encoded(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of the words of each line."""
        return [self.before[vocabulary](line.split()) for line in lines]

    def used(self, vocabulary: str, lines: Sequence[str]) -> Counter[int]:
        """Return how often the lines have each word."""
        return Counter(word for line in self.encoded(vocabulary, lines) for word in line)

    def closed(self, vocabulary: str, ids: set[int]) -> set[int]:
        """Return the ids: words stand for themselves."""
        del vocabulary
        return ids

    def encoded_anew(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        """Return what `encoded` does, in the words that are left."""
        return [self.after[vocabulary](line.split()) for line in lines]

    def trim(self, kept: Mapping[str, Tensor]) -> list[str]:
        """Leave out all words but those ``(n,)`` of each vocabulary.

        Raises:
            ValueError: an embedding cannot leave words out.
        """
        ids = {side: kept[name] for name, sides in self.sides.items() for side in sides}
        ids["output"] = ids["target"]
        stored = dict(self.model.checkpoint["vocab"])
        for name, sides in self.sides.items():
            words = [self.words[sides[0]][word] for word in kept[name].tolist()]
            self.after[name] = Vocab(words)
            for side in sides:
                stored[SIDES[side]] = list(words)
        notes = ["the state of the optimiser and the position in the data are left out"]
        embeddings = self._select_embeddings(ids)
        self._select_plain_tables(ids)
        self.model.checkpoint = {**self.model.checkpoint, "vocab": stored}
        scored = embeddings.get(self.model.scored)
        return notes if scored is None or scored.has_linear_scores else [*notes, BANDS_NOTE]

    def _select_embeddings(self, ids: Mapping[str, Tensor]) -> dict[str, se.SharedEmbedding]:
        """Put shared embeddings of fewer words in place of the model's, where it has such; returns them.

        Raises:
            ValueError: one of them cannot leave words out.
        """
        modules = {side: words_module(self.model.module, side) for side in self.model.sides}
        selected = {
            side: module.select_rows(ids[side])
            for side, module in modules.items()
            if isinstance(module, se.SharedEmbedding)
        }
        if selected:
            self.model.put_in(selected)
        return selected

    def _select_plain_tables(self, ids: Mapping[str, Tensor]) -> None:
        """Take rows out of upstream's own tables and output layer; what was tied stays so.

        Raises:
            UserError: a table is of a kind that is not known.
        """
        rows: dict[int, nn.Parameter] = {}
        for side in (*SIDES, "output"):
            table = words_module(self.model.module, side)
            if table is not None and not isinstance(table, se.SharedEmbedding):
                _select(table, ids[side], rows)

    def _weights(self) -> dict[str, Tensor]:
        """Return the tensors, each once, packed as they were."""
        return packed_as(self.model.written(), self.packing)

    def weight_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._weights().values())

    def sources(self) -> list[Path]:
        """Return the files that the model was read from."""
        return self.model.sources()

    def files(self, output: Path) -> list[Path]:
        """Return the files of a model that is called `output`.

        Raises:
            UserError: weights beside it need a name that ends in .pt.
        """
        return self.model.files(output)

    def map_files(self, output: Path) -> dict[str, Path]:
        """Return the files for ids, beside the model."""
        return maps_beside(output, self.vocabularies())

    def write(self, output: Path, maps: Mapping[Path, str]) -> None:
        """Write the model without what only training needs, and the maps."""
        module = self.model.module
        # Upstream reads models of its own with every name of a tied tensor.
        weights = self._weights() if shared_embeddings_of(module) else module.state_dict()
        self.model.write(output, weights)
        write_maps(maps)


def _select(layer: nn.Module, ids: Tensor, rows: dict[int, nn.Parameter]) -> None:
    """Take the rows `ids` ``(n,)`` of a table or of an output layer.

    Args:
        layer: gets them.
        ids: the words.
        rows: what was taken of every parameter already, by the parameter's identity.

    Raises:
        UserError: it is neither.
    """
    if type(layer) not in (nn.Embedding, nn.Linear):
        raise UserError(
            f"the model has a {type(layer).__name__} for its words; only plain tables and output layers can "
            "be trimmed (merge LoRA weights first)"
        )
    for name, old in list(layer.named_parameters()):
        if id(old) not in rows:
            rows[id(old)] = nn.Parameter(old.detach().index_select(0, ids), requires_grad=old.requires_grad)
        setattr(layer, name, rows[id(old)])
