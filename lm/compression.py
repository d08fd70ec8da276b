"""Language models as a host of `shared_embeddings.checkpoints.adapter`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

import shared_embeddings as se
from lm.checkpoint import is_checkpoint, load_model, save_state
from lm.data.vocabulary import EOS
from lm.evaluate.agreement import probe
from lm.evaluate.quality import perplexity
from lm.models import LanguageModel
from shared_embeddings.checkpoints.adapter import (
    TiedTable,
    WordEmbedding,
    name_of_part,
    take_over_bias,
    teacher_table,
    with_untrained_part,
)
from shared_embeddings.checkpoints.agreement import Probe
from shared_embeddings.checkpoints.quality import Quality, Validation
from shared_embeddings.checkpoints.token_counts import count_words
from shared_embeddings.errors import UserError
from shared_embeddings.sizing.accounting import distinct_state

NAME = "words"


class Host:
    """Checkpoints of lm_train."""

    def recognises(self, path: Path) -> bool:
        """Whether a file is a checkpoint of lm_train, however damaged."""
        return is_checkpoint(path)

    def read(self, path: Path) -> CheckpointModel:
        """Read a model.

        Raises:
            UserError: it does not fit its own configuration.
        """
        return CheckpointModel(path)


class CheckpointModel:
    """A language model that was read from a checkpoint, on the CPU.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.module: LanguageModel
        self.module, self.words, self.config, _, self.packing = load_model(path)

    def embeddings(self) -> list[WordEmbedding]:
        """The one embedding of the words."""
        embedding = self.module.embedding
        return [WordEmbedding(NAME, self.words, embedding.padding_idx, embedding)]

    def tables(self) -> list[TiedTable]:
        """The one table of the words.

        Raises:
            UserError: the output is another table than the input.
        """
        embedding = self.module.embedding.word_part()
        try:
            table = teacher_table(embedding, is_scored=True)
        except ValueError as error:
            raise UserError(f"model {self.path}: {error}") from error
        counts = embedding.counts()
        return [
            TiedTable(
                name=NAME,
                uses=("input", "output"),
                words=self.words,
                table=table,
                padding_idx=embedding.padding_idx,
                is_scored=True,
                has_output_bias=embedding.output_bias() is not None,
                sentence_marks=(EOS,),
                parameters=counts["total"],
                stored_bits=counts["stored_bits"],
                part=name_of_part(self.module.embedding),
            )
        ]

    def options_for(self, table: str, method: str, options: Mapping[str, object]) -> dict[str, object]:
        """The options of a method.

        Raises:
            UserError, shared_embeddings.OptionError: the model cannot work with them.
        """
        del table  # there is one only
        old = self.module.embedding
        chosen: dict[str, Any] = dict(options)
        if old.word_part().output_bias() is not None and chosen.get("output") != "none":
            chosen.setdefault("output_bias", True)
        new = with_untrained_part(old, self.words, method, chosen)
        if not new.has_output or new.score_dim != old.score_dim:
            takes = f"takes {new.score_dim} dimensions" if new.has_output else "has no output side"
            raise UserError(
                f"this {method} embedding {takes}, but the model ends in {old.score_dim}; set output: table "
                "or output_projection: true where the method has them, or take another method"
            )
        return chosen

    def count_text(self, texts: Sequence[Path]) -> dict[str, int]:
        """How often words stand between spaces in texts."""
        return count_words(texts)

    def quality(self, validation: Validation) -> Quality:
        """The perplexity of a text.

        Raises:
            ValueError: there is no such text, it is of another vocabulary, or it is too short.
        """
        return perplexity(self.module, self.words, validation.one_text())

    def probe(self, texts: Sequence[Path] | None, seed: int) -> Probe:
        """What the model predicts in texts, or in what it writes itself.

        Raises:
            UserError: its scores are no numbers.
        """
        return probe(self.module, self.words, texts, seed)

    def place(self, fitted: Mapping[str, se.SharedEmbedding]) -> list[str]:
        """Put the embedding into the model; gives what else changes with it."""
        old = self.module.embedding
        bias = old.word_part().output_bias()
        notes = ["the state of the optimiser and the position in the text are left out"]
        if bias is not None:
            notes += take_over_bias(fitted[NAME], bias)
        new = old.with_word_part(fitted[NAME])
        self.module.embedding = new
        self.config = {**self.config, "embedding": {"method": new.method, **new.stored_options()}}
        return notes

    def written(self) -> dict[str, Tensor]:
        """The tensors of the model, each once."""
        return distinct_state(self.module)

    def sources(self) -> list[Path]:
        """The file that the model was read from."""
        return [self.path]

    def files(self, path: Path) -> list[Path]:
        """The one file of a model that is called `path`."""
        return [path]

    def write(self, path: Path, weights: Mapping[str, Tensor]) -> None:
        """Write a checkpoint without what only training needs, completely or not at all."""
        save_state(path, weights, self.words, self.config, None)
