"""Where the parameters of a language model are, beside the same model with plain tied tables."""

from __future__ import annotations

import shared_embeddings as se
from lm.models.interface import LanguageModel
from shared_embeddings.sizing.accounting import count_parameters, parameter_table, stored_bits


def count_model(model: LanguageModel) -> dict[str, int | float]:
    """Count parameters by role, each tensor once.

    Returns:
        Of the embedding: ``input`` and ``output`` (what one side has alone), ``shared`` (what both use),
        ``embedding`` (their sum). ``rest``, ``total``, ``stored_bits`` of the model; ``dense_embedding`` (a
        plain V x D table for both sides) and ``dense_total``; ``compression``, dense over ours.
    """
    embedding = model.embedding
    counts = embedding.counts()
    total = count_parameters(model)
    rest = total - counts["total"]
    dense = se.expected_count(
        "standard", num_embeddings=embedding.num_embeddings, embedding_dim=embedding.embedding_dim
    )
    return {
        "input": counts["input"],
        "output": counts["output"],
        "shared": counts["shared"],
        "embedding": counts["total"],
        "rest": rest,
        "total": total,
        "stored_bits": stored_bits(model),
        "dense_embedding": dense,
        "dense_total": dense + rest,
        "compression": dense / max(counts["total"], 1),
    }


def describe_parameters(model: LanguageModel) -> str:
    """The lines that training prints first: what the embedding is, what is tied, and the counts."""
    counts = count_model(model)
    embedding = model.embedding
    tied = "input = output" if counts["shared"] else "input and output apart"
    names = {"input": "input only", "output": "output only", "shared": "input and output"}
    rows = [(f"embedding, {names[key]}", counts[key]) for key in names if counts[key]]
    rows += [("rest", counts["rest"]), ("total", counts["total"])]
    rows.append(("with a plain table", counts["dense_total"]))
    return parameter_table(f"Embedding, {tied}: {embedding.method} {embedding.options}", rows, counts)
