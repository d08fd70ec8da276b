"""Patches of the translator and its output."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from nmt.options.checks import (
    check_attention,
    check_features,
    check_gpu,
    check_reports,
    check_vocabulary_limits,
)
from nmt.summarization import length_control


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
        """The number."""
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
