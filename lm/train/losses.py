"""The training loss of language models.

Axes: ``B`` columns of text, ``T`` tokens of a segment.
"""

from __future__ import annotations

from torch import Tensor, nn

from lm.models.interface import LanguageModel, State
from shared_embeddings.fitting.distillation import Reconstruction


class SegmentLoss(nn.Module):
    """A model and its training loss in one module, for compilation and data parallelism.

    Args:
        model: the model.
        reconstruction: reconstruction loss of the teacher's table, or None.
    """

    def __init__(self, model: LanguageModel, reconstruction: Reconstruction | None = None) -> None:
        super().__init__()
        self.model = model
        self.reconstruction = reconstruction

    def forward(self, ids: Tensor, targets: Tensor, *state: Tensor) -> tuple[Tensor, Tensor, State]:
        """Return the loss, the mean cross entropy in nats, and the next state.

        Args:
            ids: ``(B, T)``.
            targets: ``(B, T)``, next words.
            state: state of the model.
        """
        output = self.model(ids, state)
        cross_entropy = self.model.embedding.cross_entropy(output.hidden, targets)
        loss = cross_entropy
        if self.reconstruction is not None:
            loss = self.reconstruction.mixed_with(cross_entropy, self.reconstruction.loss())
        return loss + output.penalty, cross_entropy.detach(), output.state
