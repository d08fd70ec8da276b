"""Patch of the loss of a shared output layer."""

from __future__ import annotations

from typing import Any

from onmt.utils import Statistics
from torch import Tensor, nn

from nmt.model.embeddings import SharedGenerator


def with_chunked_loss(original: Any) -> Any:
    """Compute the loss of a shared output layer without materializing all scores.

    Losses that need the scores (language model priors, sparsemax, alignment, coverage) use OpenNMT-py's code.
    """

    def forward(
        self: Any,
        batch: dict[str, Any],
        output: Tensor,
        attns: Any,
        trunc_start: int = 0,
        trunc_size: int | None = None,
    ) -> Any:
        plain = (
            isinstance(self.generator, SharedGenerator)
            and isinstance(self.criterion, nn.CrossEntropyLoss)
            and self.lambda_align == 0.0
            and self.lambda_coverage == 0.0
            and self.lm_generator is None
            and self.lm_prior_model is None
        )
        if not plain:
            return original(self, batch, output, attns, trunc_start, trunc_size)
        size = batch["tgt"].size(1) - trunc_start if trunc_size is None else trunc_size
        first, last = trunc_start + self.tgt_shift_index, trunc_start + size
        targets = batch["tgt"][:, first:last, 0].reshape(-1)  # (N,)
        hidden = output.reshape(-1, output.size(-1))  # (N, D)
        loss, predictions = self.generator.loss_and_predictions(
            hidden,
            targets,
            ignore_index=self.criterion.ignore_index,
            label_smoothing=self.criterion.label_smoothing,
            reduction="sum",
        )
        real = targets.ne(self.criterion.ignore_index)
        sentences = len(batch["srclen"]) if trunc_start == 0 else 0
        statistics = Statistics(
            loss=loss.item(),
            n_batchs=1 if sentences else 0,
            n_sents=sentences,
            n_words=int(real.sum()),
            n_correct=int((predictions.eq(targets) & real).sum()),
        )
        return loss, statistics

    return forward
