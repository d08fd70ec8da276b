"""The sizes of rows by the papers' formulas."""

from __future__ import annotations

import shared_embeddings as se
from recipes.common.recipe import Row


def times_fewer(row: Row, words: int) -> float:
    """How many times fewer parameters than a plain table of V words the embedding of a row has."""
    dim = row.train.get("embedding_dim") or row.train["hidden_size"]
    files = se.get_method_config(row.embedding["method"]).file_options  # they need not exist
    options = {key: se.STORED if key in files else value for key, value in row.embedding.items()}
    return float(words * dim / se.num_parameters(num_embeddings=words, embedding_dim=dim, **options))
