"""Patches of translation: checks, beam and greedy search, desired lengths, and written scores."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from torch import Tensor

from nmt.options.checks import (
    check_attention,
    check_features,
    check_gpu,
    check_reports,
    check_vocabulary_limits,
)
from nmt.summarization import length_control
from nmt.summarization.length_control import LengthControlledPositions


def with_length_per_sentence(original: Any) -> Any:
    """Use the source length of each sentence; OpenNMT-py has one per hypothesis but indexes by sentence."""

    def beams_non_finished(self: Any, i: int, *args: Any) -> bool:
        of_hypotheses = self.src_len
        self.src_len = of_hypotheses[:: self.beam_size]
        try:
            return original(self, i, *args)  # type: ignore[no-any-return]
        finally:
            self.src_len = of_hypotheses

    return beams_non_finished


def with_blocking_per_beam(original: Any) -> Any:
    """Drop the blocked n-grams of finished sentences."""

    def update_finished(self: Any) -> None:
        before = self.batch_offset.tolist()
        original(self)
        left = set(self.batch_offset.tolist())
        if not self.done:
            rows = [
                place * self.beam_size + beam
                for place, sentence in enumerate(before)
                if sentence in left
                for beam in range(self.beam_size)
            ]
            self.forbidden_tokens = [self.forbidden_tokens[row] for row in rows]

    return update_finished


def with_blocked_words(original: Any) -> Any:
    """Block repeated words with ``block_ngram_repeat: 1``; OpenNMT-py blocks the wrong ones."""

    def block_ngram_repeats(self: Any, log_probs: Tensor) -> None:
        if self.block_ngram_repeat != 1:
            original(self, log_probs)
            return
        for scores, after in zip(log_probs, self.forbidden_tokens, strict=True):
            scores[list(after.get((), ()))] = -10e20

    return block_ngram_repeats


def with_blocked_ngrams(original: Any) -> Any:
    """Block repeated n-grams in greedy search, too."""

    def advance(self: Any, log_probs: Tensor, attn: Tensor) -> None:
        original(self, log_probs, attn)
        self.maybe_update_forbidden_tokens()

    return advance


def with_blocking_per_sentence(original: Any) -> Any:
    """Drop the blocked n-grams of finished sentences."""

    def update_finished(self: Any) -> None:
        original(self)
        if not self.done:
            self.forbidden_tokens = [self.forbidden_tokens[row] for row in self.select_indices.tolist()]

    return update_finished


def without_padding(original: Any) -> Any:
    """Exclude padding from the coverage penalty: it has no attention, and log 0 is minus infinity."""

    def coverage_wu(self: Any, coverage: Tensor, beta: float = 0.0) -> Tensor:
        penalty: Tensor = original(self, coverage.masked_fill(coverage == 0.0, 1.0), beta)
        return penalty

    return coverage_wu


def with_desired_lengths(original: Any) -> Any:
    """Set the desired lengths of a batch before it is translated."""

    def translate_batch(self: Any, batch: dict[str, Any], attn_debug: bool) -> Any:
        length_control.set_desired_lengths(self, batch)
        return original(self, batch, attn_debug)

    return translate_batch


def with_target_lengths(original: Any) -> Any:
    """Set the lengths of the targets as desired lengths before a training step."""

    def forward(self: Any, src: Tensor, tgt: Tensor, *args: Any, **kwargs: Any) -> Any:
        length_control.set_target_lengths(self, tgt)
        return original(self, src, tgt, *args, **kwargs)

    return forward


def with_initial_lengths(original: Any) -> Any:
    """Start decoding with the desired lengths of the batch."""

    def init_state(self: Any, src: Any, enc_out: Any, enc_final_hs: Any) -> None:
        original(self, src, enc_out, enc_final_hs)
        positions = _positions_of(self)
        if positions is not None:
            positions.start(len(src))

    return init_state


def with_mapped_lengths(original: Any) -> Any:
    """Repeat, reorder and drop lengths like the other rows of the decoder state."""

    def map_state(self: Any, change: Any) -> None:
        original(self, change)
        positions = _positions_of(self)
        if positions is not None:
            positions.map_rows(change)

    return map_state


def _positions_of(decoder: Any) -> LengthControlledPositions | None:
    """The length-controlled positions of a decoder, or None."""
    positions = getattr(decoder.embeddings.make_embedding, "pe", None)
    return positions if isinstance(positions, LengthControlledPositions) else None


def with_checked_options(original: Any) -> Any:
    """Check the options against the model and the machine, and pass desired lengths to the translator."""

    def build_translator(opt: Namespace, *args: Any, **kwargs: Any) -> Any:
        check_gpu(opt)
        translator = original(opt, *args, **kwargs)
        check_vocabulary_limits(opt, len(translator.vocabs["tgt"]))
        check_attention(opt, translator.model)
        check_reports(opt, translator.model.decoder)
        check_features(opt, translator.vocabs)
        length_control.prepare_translator(translator, opt)
        return translator

    return build_translator


class Score(float):
    """A float with the method `item` of tensors, which OpenNMT-py's writer calls."""

    def item(self) -> float:
        """Return the number."""
        return float(self)


def with_written_scores(original: Any) -> Any:
    """Make ``-with_score`` write the scores of beam search, which are floats, too."""

    def from_batch(self: Any, translation_batch: Any) -> Any:
        translations = original(self, translation_batch)
        for translation in translations:
            scores = translation.pred_scores
            translation.pred_scores = [
                Score(score) if isinstance(score, float) else score for score in scores
            ]
        return translations

    return from_batch
