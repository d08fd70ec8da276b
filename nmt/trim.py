"""Trimming the vocabulary of a translation model: the model behind `nmt.adapter`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

import shared_embeddings as se
from nmt.checkpoint.checkpoint import packing_of_checkpoint
from nmt.compression import CheckpointModel
from nmt.data.vocabulary import SENTENCE_MARKS, UNKNOWN, Vocab
from nmt.model.embeddings import shared_embeddings_of, words_module
from nmt.model.plan import PADDING, words_of
from shared_embeddings.compress.host import (
    BANDS_NOTE,
    TRAINING_STATE_NOTE,
    Vocabulary,
    WordTokens,
    lines_without,
)
from shared_embeddings.quant.storage import packed_as
from shared_embeddings.utils.errors import UserError

MARKS = (UNKNOWN, PADDING, *SENTENCE_MARKS)
SIDES = {"source": "src", "target": "tgt"}
BOTH = "words"


class TrimmableCheckpoint(WordTokens, CheckpointModel):
    """A translation model whose words can be removed; sentences that contain them then read ``<unk>``.

    A vocabulary shared by both sides is trimmed for both at once.

    Args:
        path: ``NAME.pt``.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.packing = packing_of_checkpoint(str(path), self.checkpoint)
        self.words = {side: words_of(self.vocabs, side) for side in SIDES}
        is_shared = bool(getattr(self.options, "share_vocab", False)) or self.share_inputs
        has_one_side = "source" not in self.sides and not self.share_inputs
        is_one = self.words["source"] == self.words["target"] and (is_shared or has_one_side)
        self.sides_of = {BOTH: tuple(SIDES)} if is_one else {side: (side,) for side in SIDES}
        self.original = {name: Vocab(self.words[sides[0]]) for name, sides in self.sides_of.items()}
        self.trimmed = dict(self.original)

    def vocabularies(self) -> list[Vocabulary]:
        """Return the shared vocabulary, or that of each side."""
        return [
            Vocabulary(
                name, words.ids_to_tokens, self._specials(words), words.default_id, self.sides_of[name]
            )
            for name, words in self.original.items()
        ]

    def _specials(self, words: Vocab) -> frozenset[int]:
        """Return the ids of OpenNMT's marks, of those that transforms insert, and of the start token."""
        start = self.checkpoint["vocab"].get("decoder_start_token")
        named = {*MARKS, start, *(getattr(self.options, "default_specials", None) or ())}
        return frozenset(
            number
            for number, word in enumerate(words.ids_to_tokens)
            if word in named or (word.startswith("｟") and word.endswith("｠"))
        )

    def encode(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of the words of each line."""
        return [self.original[vocabulary](line.split()) for line in lines]

    def encode_trimmed(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        """Like `encode`, with the trimmed vocabulary."""
        return [self.trimmed[vocabulary](line.split()) for line in lines]

    def restored(self, vocabulary: str, lines: Sequence[str], ids: Sequence[Sequence[int]]) -> int:
        """Return how many lines have no ``<unk>``."""
        return lines_without(self.original[vocabulary].default_id, ids)

    def restored_trimmed(self, vocabulary: str, lines: Sequence[str], ids: Sequence[Sequence[int]]) -> int:
        """Like `restored`, with the trimmed vocabulary."""
        return lines_without(self.trimmed[vocabulary].default_id, ids)

    def trim(self, kept: Mapping[str, Tensor]) -> list[str]:
        """Remove all words except those ``(n,)`` of each vocabulary.

        Raises:
            ValueError: an embedding cannot drop words.
        """
        ids = {side: kept[name] for name, sides in self.sides_of.items() for side in sides}
        ids["output"] = ids["target"]
        stored = dict(self.checkpoint["vocab"])
        for name, sides in self.sides_of.items():
            words = [self.words[sides[0]][word] for word in kept[name].tolist()]
            self.trimmed[name] = Vocab(words)
            for side in sides:
                stored[SIDES[side]] = list(words)
        embeddings = self._select_embeddings(ids)
        self._select_plain_tables(ids)
        self.checkpoint = {**self.checkpoint, "vocab": stored}
        scored = embeddings.get(self.scored)
        has_bands = scored is not None and not scored.has_linear_scores
        return [TRAINING_STATE_NOTE, BANDS_NOTE] if has_bands else [TRAINING_STATE_NOTE]

    def _select_embeddings(self, ids: Mapping[str, Tensor]) -> dict[str, se.SharedEmbedding]:
        """Replace the model's shared embeddings by ones with fewer words; returns the new ones by side."""
        modules = {side: words_module(self.module, side) for side in self.sides}
        selected = {
            side: module.select_rows(ids[side])
            for side, module in modules.items()
            if isinstance(module, se.SharedEmbedding)
        }
        if selected:
            self.put_in(selected)
        return selected

    def _select_plain_tables(self, ids: Mapping[str, Tensor]) -> None:
        """Select rows of OpenNMT's own tables and output layer; tied parameters stay tied."""
        rows: dict[int, nn.Parameter] = {}
        for side in (*SIDES, "output"):
            table = words_module(self.module, side)
            if table is not None and not isinstance(table, se.SharedEmbedding):
                _select(table, ids[side], rows)

    def _stored(self) -> dict[str, Tensor]:
        """Return the tensors, each once, packed like those in the file that was read."""
        return packed_as(self.tensors(), self.packing)

    def weight_bytes(self) -> int:
        """Return the bytes of all tensors as stored."""
        return sum(tensor.nbytes for tensor in self._stored().values())

    def write_trimmed(self, output: Path, card: str = "") -> None:
        """Write the model without training state, all or nothing."""
        # OpenNMT itself expects every name of a tied tensor.
        is_shared = shared_embeddings_of(self.module)
        self.write(output, self._stored() if is_shared else self.module.state_dict())


def _select(layer: nn.Module, ids: Tensor, rows: dict[int, nn.Parameter]) -> None:
    """Select the rows `ids` ``(n,)`` of a table or output layer in place.

    Args:
        layer: is changed.
        ids: the words.
        rows: the parameters selected so far, by the identity of the original.
    """
    if type(layer) not in (nn.Embedding, nn.Linear):
        raise UserError(
            f"the words of the model are in a {type(layer).__name__}; only plain tables and output layers "
            "can be trimmed (merge LoRA weights first)"
        )
    for name, old in list(layer.named_parameters()):
        if id(old) not in rows:
            rows[id(old)] = nn.Parameter(old.detach().index_select(0, ids), requires_grad=old.requires_grad)
        setattr(layer, name, rows[id(old)])
