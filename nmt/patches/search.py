"""What `nmt.patches.table` puts in place of OpenNMT's searches and copy attention: sentence by sentence.

Axes: ``B`` hypotheses of all sentences, ``T`` target words, ``S`` source words, ``C`` different words of a
source, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import Any

from onmt.inputters.text_utils import _addcopykeys
from torch import Tensor

from nmt.model import copying


def with_copied_words(original: Any) -> Any:
    """Give the batches what a copy generator needs, which upstream does in training only."""

    def translate(self: Any, infer_iter: Any) -> Any:
        infer_iter.copy = self.translator.copy_attn
        return original(self, infer_iter)

    return translate


def with_copied_words_of_requests(original: Any) -> Any:
    """Give the sentences that a server is sent what a copy generator needs; others pass it over."""

    def textbatch_to_tensor(vocabs: dict[str, Any], batch: list[dict[str, Any]], *args: Any) -> Any:
        return original(vocabs, [_addcopykeys(vocabs, example) for example in batch], *args)

    return textbatch_to_tensor


def copying_by_sentence(original: Any) -> Any:
    """Mix the words of each sentence's own source in, whatever the number of sentences."""
    del original
    return copying.mixed_probabilities


def with_sentences_first(original: Any) -> Any:
    """Take the rows of a batch apart by sentences."""
    del original

    def unbottle(self: Any, rows: Tensor, sentences: int) -> Tensor:
        return rows.view(sentences, -1, rows.size(1))

    return unbottle


def collapsing_by_sentence(original: Any) -> Any:
    """Count copies of words of the vocabulary as these words, in the statistics of training."""
    del original

    def collapse_copy_scores(scores: Tensor, batch: dict[str, Any], vocabulary: Any) -> Tensor:
        sources = batch["src_ex_vocab"]
        copies = [copying.copies_of(words, vocabulary, scores.device) for words in sources]
        return copying.collapsed(scores, copies)

    return collapse_copy_scores


def covering_by_sentence(original: Any) -> Any:
    """Compare the attention of each word with that of the words before it, and weigh it as asked."""
    del original

    def compute_coverage_loss(self: Any, attention: Tensor, coverage: Tensor, targets: Tensor) -> Tensor:
        is_word = targets.ne(self.padding_idx).view(attention.shape[:2])
        loss: Tensor = self.lambda_coverage * copying.coverage_loss(attention, coverage, is_word)
        return loss

    return compute_coverage_loss


def attending_by_sentence(original: Any) -> Any:
    """Put the sentences first, where upstream stacks the attention step by step; copy no padding."""

    def forward(
        self: Any, tgt: Tensor, enc_out: Tensor, src_len: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        hidden, attentions = original(self, tgt, enc_out, src_len=src_len, **kwargs)
        found = {name: steps.transpose(0, 1).contiguous() for name, steps in attentions.items()}
        if "copy" in found and src_len is not None:
            found["copy"] = copying.over_words(found["copy"], src_len)
        return hidden, found

    return forward


def knowing_the_search(original: Any) -> Any:
    """Keep at hand the search of a batch, which knows the sentences left of it, and what they copy."""

    def translate_batch_with_strategy(self: Any, batch: dict[str, Any], strategy: Any) -> Any:
        self.search = strategy
        if self.copy_attn:
            device, sources = batch["src"].device, batch["src_ex_vocab"]
            self.copies = [copying.copies_of(words, self._tgt_vocab, device) for words in sources]
        return original(self, batch, strategy)

    return translate_batch_with_strategy


def copying_in_search(original: Any) -> Any:
    """Give hypotheses, or whole targets to be scored, the words of their own source."""

    def decode_and_generate(
        self: Any,
        decoder_in: Tensor,
        enc_out: Any,
        batch: dict[str, Any],
        src_len: Tensor,
        src_map: Tensor | None = None,
        step: int | None = None,
        batch_offset: Any = None,
        return_attn: bool = False,
    ) -> tuple[Tensor, Tensor]:
        if src_map is None:
            return original(  # type: ignore[no-any-return]
                self, decoder_in, enc_out, batch, src_len, src_map, step, batch_offset, return_attn
            )
        known = decoder_in.masked_fill(decoder_in.ge(self._tgt_vocab_len), self._tgt_unk_idx)
        asked = {"return_attn": self.global_scorer.has_cov_pen or return_attn}
        hidden, attentions = self.model.decoder(known, enc_out, src_len=src_len, step=step, **asked)
        attention = attentions["copy"]  # (B, T, S)
        # An ensemble's states have no other way to be of one step.
        rows = hidden.squeeze(1) if step is not None else hidden.flatten(0, 1)
        mixed = self.model.generator(rows, attention.flatten(0, 1), src_map)
        mixed = mixed.view(len(src_map), -1, mixed.size(1))  # (B, T, V + C)
        sentences = range(len(src_map)) if step is None else copying.sentences_of(self.search)
        log_probs = copying.collapsed(mixed, [self.copies[sentence] for sentence in sentences]).log()
        return log_probs if step is None else log_probs.squeeze(1), attention

    return decode_and_generate


def with_length_of_sentence(original: Any) -> Any:
    """Give each sentence the length of its own source; upstream keeps one for each hypothesis."""

    def beams_non_finished(self: Any, i: int, *args: Any) -> bool:
        of_hypotheses = self.src_len
        self.src_len = of_hypotheses[:: self.beam_size]
        try:
            return original(self, i, *args)  # type: ignore[no-any-return]
        finally:
            self.src_len = of_hypotheses

    return beams_non_finished


def forbidding_in_beams(original: Any) -> Any:
    """Let the repetitions that are forbidden go with their sentences."""

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


def forbidding_single_words(original: Any) -> Any:
    """Forbid to repeat a word, where upstream takes the whole sentence for the words before it."""

    def block_ngram_repeats(self: Any, log_probs: Tensor) -> None:
        if self.block_ngram_repeat != 1:
            original(self, log_probs)
            return
        for scores, after in zip(log_probs, self.forbidden_tokens, strict=True):
            scores[list(after.get((), ()))] = -10e20

    return block_ngram_repeats


def remembering_what_was_said(original: Any) -> Any:
    """Forbid repetitions in greedy search, too."""

    def advance(self: Any, log_probs: Tensor, attn: Tensor) -> None:
        original(self, log_probs, attn)
        self.maybe_update_forbidden_tokens()

    return advance


def forbidding_in_greedy_search(original: Any) -> Any:
    """Let the repetitions that are forbidden go with their sentences."""

    def update_finished(self: Any) -> None:
        original(self)
        if not self.done:
            self.forbidden_tokens = [self.forbidden_tokens[row] for row in self.select_indices.tolist()]

    return update_finished


def covering_words(original: Any) -> Any:
    """Ask for coverage of words only: padding has no attention, and its logarithm is minus infinity."""

    def coverage_wu(self: Any, coverage: Tensor, beta: float = 0.0) -> Tensor:
        penalty: Tensor = original(self, coverage.masked_fill(coverage == 0.0, 1.0), beta)
        return penalty

    return coverage_wu
