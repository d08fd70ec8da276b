"""How `shared-embeddings` opens checkpoints of ``lm_train``: see `shared_embeddings.compress.host`.

Axes: ``B`` parallel texts, ``T`` tokens of each, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shared_embeddings as se
from lm.checkpoint import FORMAT, load_model, save_state
from lm.data.vocabulary import EOS
from lm.data.vocabulary import Vocabulary as Words
from lm.evaluate.evaluation import Reading, evaluate, evaluating, read_data
from lm.models import LanguageModel
from shared_embeddings.accounting import distinct_state
from shared_embeddings.checkpoints import contains_strings
from shared_embeddings.compress.host import (
    BANDS_NOTE,
    TRAINING_STATE_NOTE,
    EmbeddingTable,
    Vocabulary,
    WordTokens,
    check_scores,
    copy_output_bias,
    lines_without,
    name_of_part,
    teacher_table,
    with_untrained_part,
)
from shared_embeddings.compress.measure import (
    PREDICTIONS,
    Predictions,
    Probe,
    Quality,
    Validation,
    names_of,
    sampled_lines,
)
from shared_embeddings.embedding import WordEmbedding
from shared_embeddings.export.onnx import OnnxBody
from shared_embeddings.quant.storage import packed_as
from shared_embeddings.utils.errors import UserError
from shared_embeddings.words.token_counts import count_words

NAME = "words"
_TEXTS = 20  # texts that are read at a time


class Adapter:
    """Opens the checkpoints of ``lm_train``."""

    def sniff(self, path: Path) -> bool:
        """Whether a file looks like a checkpoint of ``lm_train``."""
        return contains_strings(path, FORMAT)

    def read(self, path: Path) -> CheckpointModel:
        """Read a model."""
        return CheckpointModel(path)

    read_tables = read_trimmable = read


class CheckpointModel(WordTokens):
    """A language model read from a checkpoint, on the CPU.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.module: LanguageModel
        self.module, self.words, self.config, _, self.packing = load_model(path)
        # Any number of embeddings may be placed instead of it, one after another.
        self.trained = self.module.embedding
        self.original = self.trimmed = _vocabulary(self.words)

    def embeddings(self) -> list[WordEmbedding]:
        embedding = self.module.embedding
        return [WordEmbedding(NAME, self.words, embedding.padding_idx, embedding)]

    def tables(self) -> list[EmbeddingTable]:
        embedding = self.trained.inner_embedding()
        try:
            table = teacher_table(embedding, is_scored=True)
        except UserError as error:
            raise UserError(f"model {self.path}: {error}") from error
        counts = embedding.counts()
        return [
            EmbeddingTable(
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
                part=name_of_part(self.trained),
            )
        ]

    def options_for(self, table: str, method: str, options: Mapping[str, object]) -> dict[str, object]:
        old = self.trained
        chosen: dict[str, Any] = dict(options)
        if old.inner_embedding().output_bias() is not None and chosen.get("output") != "none":
            chosen.setdefault("output_bias", True)
        check_scores(with_untrained_part(old, self.words, method, chosen), old.score_dim)
        return chosen

    def count_text(self, texts: Sequence[Path]) -> dict[str, int]:
        return count_words(texts)

    def quality(self, validation: Validation) -> Quality:
        """The perplexity of a text, as ``lm_eval`` computes it by default."""
        path = validation.one_text()
        text = read_data(path, "valid" if path.is_dir() else None, self.words)
        score = evaluate(self.module, text.tokens)
        how = (
            f"{text.name}: {score.tokens:,} targets, {text.unknown:,} <unk>, segments of "
            f"{Reading().target_length} tokens"
        )
        return Quality("perplexity", score.perplexity, how)

    def probe(self, texts: Sequence[Path] | None, seed: int) -> Probe:
        if texts is None:
            ids = self._sampled(seed)
            how = f"{ids.numel():,} tokens sampled from the model; use --text for real ones"
        else:
            lines = map(self.original.encode, sampled_lines(texts, seed))
            flat = list(chain.from_iterable(lines))[:PREDICTIONS]
            columns = min(_TEXTS, len(flat))
            ids = torch.tensor(flat[: len(flat) // columns * columns]).view(columns, -1)
            how = f"{ids.numel():,} tokens of {names_of(texts)}"

        @torch.no_grad()
        def predictions() -> Predictions:
            with evaluating(self.module):
                hidden = self.module(ids, self.module.initial_state(len(ids))).hidden
                return Predictions.of(hidden.flatten(0, 1), self.module.embedding.log_prob)

        return Probe(how, predictions)

    @torch.no_grad()
    def _sampled(self, seed: int) -> Tensor:
        """The ids ``(B, T)`` of texts sampled from the model."""
        model, draw = self.module, torch.Generator().manual_seed(seed)
        written = [torch.full((_TEXTS,), self.original.eos)]
        with evaluating(model):
            state = model.initial_state(_TEXTS)
            while len(written) < PREDICTIONS // _TEXTS:
                output = model(written[-1][:, None], state)
                state = output.state
                probabilities = model.embedding.log_prob(output.hidden[:, -1]).float().exp()  # (B, V)
                if not probabilities.isfinite().all():
                    raise UserError(
                        "the model scores are not finite: training diverged; use another checkpoint"
                    )
                written.append(torch.multinomial(probabilities, 1, generator=draw)[:, 0])
        return torch.stack(written, dim=1)

    def onnx_body(self) -> OnnxBody:
        from lm.tracing import traced

        return traced(self.module, NAME, self.weight_bytes())

    def place(self, fitted: Mapping[str, se.SharedEmbedding]) -> list[str]:
        old = self.trained
        bias = old.inner_embedding().output_bias()
        notes = [TRAINING_STATE_NOTE]
        if bias is not None:
            notes += copy_output_bias(fitted[NAME], bias)
        self._put_in(old.with_inner_embedding(fitted[NAME]))
        return notes

    def _put_in(self, embedding: se.SharedEmbedding) -> None:
        """Put an embedding into the model, and its settings into the configuration."""
        self.module.embedding = embedding
        settings = {"method": embedding.method, **embedding.stored_options()}
        self.config = {**self.config, "embedding": settings}

    def tensors(self) -> dict[str, Tensor]:
        return distinct_state(self.module)

    def sources(self) -> list[Path]:
        return [self.path]

    def files(self, output: Path) -> list[Path]:
        return [output]

    def write(self, output: Path, tensors: Mapping[str, Tensor], card: str = "") -> None:
        """Write a checkpoint without training state, all or nothing."""
        save_state(output, tensors, self.words, self.config, None)

    def vocabularies(self) -> list[Vocabulary]:
        words = self.original
        return [Vocabulary(NAME, words.words, frozenset((words.unk, words.eos)), words.unk)]

    def encode(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        return [self.original.encode(line) for line in lines]

    def trim(self, kept: Mapping[str, Tensor]) -> list[str]:
        """Remove all words except those ``(n,)``; in texts, the others become ``<unk>``."""
        old = self.module.embedding
        self._put_in(old.select_rows(kept[NAME]))
        self.words = [self.original.words[word] for word in kept[NAME].tolist()]
        self.trimmed = _vocabulary(self.words)
        notes = [
            TRAINING_STATE_NOTE,
            "probabilities are normalized over the remaining words: a perplexity is lower than the whole "
            "model's and cannot be compared with it",
        ]
        return notes if old.has_linear_scores else [*notes, BANDS_NOTE]

    def encode_trimmed(self, vocabulary: str, lines: Sequence[str]) -> list[list[int]]:
        return [self.trimmed.encode(line) for line in lines]

    def restored(self, vocabulary: str, lines: Sequence[str], ids: Sequence[Sequence[int]]) -> int:
        """How many lines have no ``<unk>``."""
        return lines_without(self.original.unk, ids)

    def restored_trimmed(self, vocabulary: str, lines: Sequence[str], ids: Sequence[Sequence[int]]) -> int:
        return lines_without(self.trimmed.unk, ids)

    def _stored(self) -> dict[str, Tensor]:
        """The tensors of the model, packed like those in the file that was read."""
        return packed_as(self.tensors(), self.packing)

    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._stored().values())

    def write_trimmed(self, output: Path, card: str = "") -> None:
        """Write a checkpoint without training state, all or nothing."""
        self.write(output, self._stored())


def _vocabulary(words: Sequence[str]) -> Words:
    """The words of a model, whose counts are unknown."""
    return Words(words, [0] * len(words))
