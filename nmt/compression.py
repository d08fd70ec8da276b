"""Compressing and trimming a translation model: the models behind `nmt.adapter`."""

from __future__ import annotations

import copy
import dataclasses
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from onmt.utils.parse import ArgumentParser
from torch import Tensor, nn

import shared_embeddings as se
from nmt import checkpoints, embeddings
from nmt import plan as plans
from nmt.models import build_from_checkpoint
from nmt.train.embeddings import OPTION, REQUESTED
from nmt.vocabulary import SENTENCE_MARKS, UNKNOWN, Vocab
from shared_embeddings.accounting import distinct_state
from shared_embeddings.compress import host
from shared_embeddings.compress.measure import Quality, Samples, Validation
from shared_embeddings.embedding import WordEmbedding
from shared_embeddings.utils.errors import UserError

# What options mean nothing for a trained model are set to: those of embeddings and of their beginning.
UNSET: dict[str, bool | None] = {
    **dict.fromkeys((*plans.OPTION_NAMES, OPTION, "both_embeddings", "src_embeddings", "tgt_embeddings")),
    **dict.fromkeys(("freeze_word_vecs_enc", "freeze_word_vecs_dec", "update_vocab"), False),
}


class CheckpointModel(host.TrainedModel):
    """A translation model read from a checkpoint ``NAME.pt``, on the CPU."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.module: Any
        self.module, self.vocabs, _, self.checkpoint = build_from_checkpoint(str(path))
        self.is_safetensors = "model" not in self.checkpoint
        self.options: Namespace = copy.copy(self.checkpoint["opt"])
        self.is_language_model = getattr(self.options, "model_task", "seq2seq") == "lm"
        is_shared = bool(getattr(self.options, "share_embeddings", False))
        self.share_inputs = is_shared and not self.is_language_model
        self.share_output = bool(getattr(self.options, "share_decoder_embeddings", False))
        self.lookup_sides = (
            ["target"] if self.share_inputs or self.is_language_model else ["source", "target"]
        )
        # The side whose table scores the words.
        self.scored = "target" if self.share_output else "output"
        self.sides = self.lookup_sides if self.share_output else [*self.lookup_sides, "output"]
        # Any number of embeddings may be placed instead of these, one after another.
        self.trained = {side: embeddings.words_module(self.module, side) for side in self.sides}
        self.trained_bias = embeddings.output_bias(self.module)

    def embeddings(self) -> list[WordEmbedding]:
        """Return the input embedding of each side; one for both sides where they share it."""
        self.module.eval()
        inputs = []
        for side in self.lookup_sides:
            lookup = embeddings.words_module(self.module, side)
            assert isinstance(lookup, (se.SharedEmbedding, nn.Embedding))  # upstream has no other
            words, padding = plans.words_of(self.vocabs, side), plans.padding_of(self.vocabs, side)
            inputs.append(WordEmbedding(side, words, padding, lookup))
        return inputs

    def tables(self) -> list[host.EmbeddingTable]:
        """Return the table of each side and of a separate output layer; one table where they share it."""
        tables = []
        for side in self.sides:
            module: Any = self.trained[side]
            is_scored, part = side == self.scored, None
            uses = ["source", "target"] if self.share_inputs and side == "target" else [side]
            if isinstance(module, se.SharedEmbedding):
                inner = module.inner_embedding()
                part = None if inner is module else f"map of {module.method}"
                try:
                    table = host.teacher_table(inner, is_scored)
                except ValueError as error:
                    raise UserError(f"{side} embedding: {error}") from error
                parameters, bits = inner.counts()["total"], inner.counts()["stored_bits"]
            else:
                table = module.weight.detach().clone()
                parameters, bits = table.numel(), 8 * table.nbytes
            tables.append(
                host.EmbeddingTable(
                    name=side,
                    uses=(*uses, "output") if is_scored and side == "target" else tuple(uses),
                    words=plans.words_of(self.vocabs, side),
                    table=table,
                    padding_idx=plans.padding_of(self.vocabs, side),
                    is_scored=is_scored,
                    is_by_frequency=True,
                    has_output_bias=is_scored and self.trained_bias is not None,
                    sentence_marks=SENTENCE_MARKS,
                    parameters=parameters,
                    stored_bits=bits,
                    part=part,
                )
            )
        return tables

    def options_for(self, table: str, method: str, options: Mapping[str, object]) -> dict[str, object]:
        """Return the options of a method for one side; those of the output only where the side has one."""
        is_scored = table == self.scored
        settings: dict[str, Any] = {"method": method, **options}
        if not is_scored:
            settings = plans.for_input(settings)
        if is_scored and self.trained_bias is not None and settings.get("output") != "none":
            settings.setdefault("output_bias", True)
        old, whole = self.trained[table], settings
        if isinstance(old, se.SharedEmbedding) and old.inner_embedding() is not old:
            method_settings = {name: value for name, value in settings.items() if name != "method"}
            new = host.with_untrained_part(old, plans.words_of(self.vocabs, table), method, method_settings)
            whole = embeddings.stored_settings(new)
        plan = self._plan({table: whole})
        stored = self._stored_options(plan)
        sized: Namespace = ArgumentParser.ckpt_model_opts(stored)
        ArgumentParser.update_model_opts(sized)
        with torch.device("meta"):  # checks the options against the sizes
            plans.build_embeddings(plan, sized, self.vocabs)
        return plans.method_options(table, settings, is_scored)

    def quality(self, validation: Validation) -> Quality:
        """Return the BLEU of a text."""
        if self.is_language_model:
            raise UserError(f"model {self.path}: is a language model and has no BLEU; leave --validation out")
        if self.vocabs.get("src_feats"):
            raise UserError(f"model {self.path}: needs features of source words; leave --validation out")
        from nmt.translation import bleu

        source, target = validation.two_sides()
        return bleu(self.path, self.module, source, target)

    def samples(self, texts: Sequence[Path] | None, seed: int, tokens: int) -> Samples:
        """Return the model's predictions in its translations or, for a language model, in texts."""
        from nmt.translation import language_samples, translation_samples

        samples = language_samples if self.is_language_model else translation_samples
        predictions = samples(self.module, self.vocabs, texts, seed, tokens)
        modules = {side: embeddings.words_module(self.module, side) for side in self.lookup_sides}
        lookups = {side: {module: 1.0} for side, module in modules.items() if module is not None}
        return dataclasses.replace(predictions, lookups=lookups)

    def place(self, fitted: Mapping[str, se.SharedEmbedding]) -> list[str]:
        """Put the embeddings of all sides into the model; return notes about other changes."""
        notes = [host.TRAINING_STATE_NOTE]
        if self.trained_bias is not None:
            notes += host.copy_output_bias(fitted[self.scored], self.trained_bias)
        placed = {}
        for side, part in fitted.items():
            old: Any = self.trained[side]  # a plain table is replaced as a whole
            is_shared = isinstance(old, se.SharedEmbedding)
            placed[side] = old.with_inner_embedding(part) if is_shared else part
        self._put_in(placed)
        return notes

    def _put_in(self, placed: Mapping[str, se.SharedEmbedding]) -> None:
        """Put the embeddings of sides into the model, and their settings into its options."""
        settings = {side: embeddings.stored_settings(embedding) for side, embedding in placed.items()}
        plan = self._plan(settings)
        embeddings.place_embeddings(self.module, plan, dict(placed))
        self.options = self._stored_options(plan)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the model, each once."""
        return embeddings.without_positions(distinct_state(self.module))

    def files(self, path: Path) -> list[Path]:
        """Return the files of a model at `path`."""
        if not self.is_safetensors:
            return [path]
        if path == self.path:
            return [path, *map(Path, checkpoints.safetensors_of(str(path)))]
        if path.suffix != ".pt":
            raise UserError(f"output {path}: must end in .pt because its weights are in a separate file")
        return [path, path.with_suffix(".safetensors")]

    def write(self, output: Path, tensors: Mapping[str, Tensor], card: str = "") -> None:
        """Write the model without training state, all or nothing."""
        saved = {**checkpoints.released(self.checkpoint), "opt": self.options}
        save_format = "safetensors" if self.is_safetensors else "pytorch"
        checkpoints.write_model(tensors, saved, str(output), save_format)

    def _plan(self, settings: Mapping[str, dict[str, Any]]) -> plans.EmbeddingPlan:
        target = settings.get("target")
        source = target if self.share_inputs else settings.get("source")
        share_output = self.share_output and target is not None
        return plans.EmbeddingPlan(source, target, self.share_inputs, share_output, settings.get("output"))

    def _stored_options(self, plan: plans.EmbeddingPlan) -> Namespace:
        stored = copy.copy(self.options)
        vars(stored).pop(REQUESTED, None)
        for name, unset in UNSET.items():
            if hasattr(stored, name):
                setattr(stored, name, unset)
        vars(stored).update(plan.options())
        return stored


# The key of the words of each side in a checkpoint, and the name of a vocabulary of both.
_KEYS = {"source": "src", "target": "tgt"}
_BOTH = "words"


class TrimmableCheckpoint(CheckpointModel, host.TrimmableTrainedModel):
    """A translation model whose words can be removed; sentences that contain them then read ``<unk>``.

    A vocabulary shared by both sides is trimmed for both at once.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.packing = checkpoints.packing_of_checkpoint(str(path), self.checkpoint)
        self.words = {side: plans.words_of(self.vocabs, side) for side in _KEYS}
        is_shared = bool(getattr(self.options, "share_vocab", False)) or self.share_inputs
        has_one_side = "source" not in self.sides and not self.share_inputs
        is_one = self.words["source"] == self.words["target"] and (is_shared or has_one_side)
        self.sides_of = {_BOTH: tuple(_KEYS)} if is_one else {side: (side,) for side in _KEYS}
        self.original = {name: Vocab(self.words[sides[0]]) for name, sides in self.sides_of.items()}
        self.trimmed = dict(self.original)

    def vocabularies(self) -> list[host.HostVocabulary]:
        start = self.checkpoint["vocab"].get("decoder_start_token")
        marks = {
            UNKNOWN,
            plans.PADDING,
            *SENTENCE_MARKS,
            start,
            *(getattr(self.options, "default_specials", None) or ()),
        }
        vocabularies = []
        for name, vocab in self.original.items():
            words = vocab.ids_to_tokens
            # OpenNMT's marks, those that transforms insert, and the start token
            specials = [w for w in words if w in marks or (w.startswith("｟") and w.endswith("｠"))]
            ids = frozenset(vocab(specials))
            vocabularies.append(host.HostVocabulary(name, words, ids, vocab.default_id, self.sides_of[name]))
        return vocabularies

    def encode(self, vocabulary: str, lines: Sequence[str], trimmed: bool = False) -> list[list[int]]:
        words = (self.trimmed if trimmed else self.original)[vocabulary]
        return [words(line.split()) for line in lines]

    def restored(
        self, vocabulary: str, lines: Sequence[str], ids: Sequence[Sequence[int]], trimmed: bool = False
    ) -> int:
        unknown = (self.trimmed if trimmed else self.original)[vocabulary].default_id
        return sum(unknown not in line for line in ids)

    def trim(self, token_ids: Mapping[str, Tensor]) -> list[str]:
        """Remove all words except those ``(n,)`` of each vocabulary."""
        ids = {side: token_ids[name] for name, sides in self.sides_of.items() for side in sides}
        ids["output"] = ids["target"]
        stored = dict(self.checkpoint["vocab"])
        for name, sides in self.sides_of.items():
            words = [self.words[sides[0]][word] for word in token_ids[name].tolist()]
            self.trimmed[name] = Vocab(words)
            for side in sides:
                stored[_KEYS[side]] = list(words)
        modules = {side: embeddings.words_module(self.module, side) for side in self.sides}
        selected = {
            side: module.select_rows(ids[side])
            for side, module in modules.items()
            if isinstance(module, se.SharedEmbedding)
        }
        if selected:
            self._put_in(selected)
        rows: dict[int, nn.Parameter] = {}
        for side in (*_KEYS, "output"):  # OpenNMT's own tables and output layer
            table = embeddings.words_module(self.module, side)
            if table is not None and not isinstance(table, se.SharedEmbedding):
                _select(table, ids[side], rows)
        self.checkpoint = {**self.checkpoint, "vocab": stored}
        scored = selected.get(self.scored)
        has_bands = scored is not None and not scored.has_linear_scores
        return [host.TRAINING_STATE_NOTE, host.BANDS_NOTE] if has_bands else [host.TRAINING_STATE_NOTE]

    def write_trimmed(self, output: Path, card: str = "") -> None:
        if embeddings.shared_embeddings_of(self.module):
            super().write_trimmed(output, card)
        else:  # OpenNMT itself expects every name of a tied tensor
            self.write(output, self.module.state_dict())


def _select(layer: nn.Module, ids: Tensor, rows: dict[int, nn.Parameter]) -> None:
    """Select the rows `ids` ``(n,)`` of a table or output layer in place.

    `rows` has the parameters selected so far, by the identity of the original, so that ties are kept.
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
