"""Vectors for out-of-vocabulary words of a model with semantic classes (UnClE, appendix A.5).

Axes: ``D`` embedding dimension, ``d`` width of the word vectors.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from shared_embeddings.classes.word_classes import WordClasses


class ClassEmbedding(Protocol):
    """The tensors of an `uncle` embedding, see `UncleEmbedding`."""

    padding_idx: int | None
    unique: nn.Parameter
    class_tables: nn.ParameterList
    classes: Tensor


def out_of_vocabulary_row(embedding: ClassEmbedding, word_classes: WordClasses, vector: np.ndarray) -> Tensor:
    """The row ``(D,)`` of an out-of-vocabulary word, computed from its word vector (A.5).

    Its class is the non-empty one whose center has the highest cosine similarity. Its unique part is the
    weighted mean of the unique parts of that class's words; the weights are their cosine similarities to the
    new word, clipped at zero and normalized to sum to one.

    Args:
        embedding: a trained `uncle` embedding with one level of classes.
        word_classes: the classes it was built with, see `WordClasses.for_vocabulary`.
        vector: ``(d,)`` the word's vector, from the same space as the vectors of the classes.

    Raises:
        ValueError: the classes are not the embedding's, or the vector has the wrong width or is zero.
    """
    if embedding.classes.size(1) != 1:
        raise ValueError("rows of unknown words require an embedding with one level of classes")
    own = embedding.classes[:, 0].cpu().numpy().astype(np.int64)
    if not np.array_equal(own, word_classes.classes):
        raise ValueError(
            "these are not the classes of the embedding; pass the classes it was built with, in the order of "
            "its vocabulary (WordClasses.for_vocabulary)"
        )
    direction = np.asarray(vector, dtype=np.float64)
    if direction.shape != word_classes.centers.shape[1:]:
        raise ValueError(
            f"the word's vector has shape {direction.shape}, but the vectors of the classes have "
            f"{word_classes.centers.shape[1]} dimensions"
        )
    if not np.isfinite(direction).all() or not direction.any():
        raise ValueError("the word's vector is zero or not finite; pass a vector that has a direction")
    usable = np.arange(len(own)) != (-1 if embedding.padding_idx is None else embedding.padding_idx)
    to_centers = _cosines(word_classes.centers, direction)
    to_centers[np.setdiff1d(np.arange(word_classes.num_classes), own[usable])] = -np.inf
    nearest = int(to_centers.argmax())
    members = np.flatnonzero((own == nearest) & usable)
    weights = np.maximum(_cosines(word_classes.vectors[members], direction), 0.0)
    weights = weights / weights.sum() if weights.any() else np.full(len(members), 1.0 / len(members))
    unique = embedding.unique.detach()
    mix = torch.as_tensor(weights, dtype=unique.dtype, device=unique.device)
    chosen = unique.index_select(0, torch.as_tensor(members, device=unique.device))
    return torch.cat((mix @ chosen, embedding.class_tables[0].detach()[nearest]))


def _cosines(vectors: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """``(n,)`` cosine similarities of `vectors` ``(n, d)`` with one vector; 0 for all-zero vectors."""
    products = vectors.astype(np.float64) @ direction
    norms = np.linalg.norm(vectors.astype(np.float64), axis=1) * np.linalg.norm(direction)
    return np.divide(products, norms, out=np.zeros_like(products), where=norms > 0)
