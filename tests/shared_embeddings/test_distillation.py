"""The reconstruction loss beside the cross entropy (Distilled Embedding, Eq. 5 and 6), by hand."""

from __future__ import annotations

import pytest
import torch

import shared_embeddings as se
from shared_embeddings.fitting.distillation import Reconstruction


def test_the_loss_is_the_mean_distance_of_all_words_but_padding() -> None:
    """Words miss their teachers by 5, by 0 and by 1; the padding word, by 7, does not count."""
    first = se.build("standard", num_embeddings=3, embedding_dim=2, padding_idx=2)
    second = se.build("standard", num_embeddings=1, embedding_dim=2)
    with torch.no_grad():
        first.get_parameter("weight").copy_(torch.tensor([[3.0, 4.0], [1.0, 1.0], [0.0, 0.0]]))
        second.get_parameter("weight").copy_(torch.tensor([[0.0, 2.0]]))
    teachers = torch.tensor([[0.0, 0.0], [1.0, 1.0], [7.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    learned = Reconstruction([(first, teachers[0]), (second, teachers[1])], alpha=0.25)
    assert learned.loss().item() == pytest.approx(2.0)
    assert learned.current() == pytest.approx(2.0)
    mixed = learned.mixed_with(torch.tensor(8.0), learned.loss())
    assert mixed.item() == pytest.approx(0.25 * 2.0 + 0.75 * 8.0)
