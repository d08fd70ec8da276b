"""Parameter counts of a language model, compared to the same model with plain tied tables."""

from __future__ import annotations

import shared_embeddings as se
from lm.models.interface import LanguageModel
from shared_embeddings.sizing.accounting import count_parameters, parameter_table, stored_bits


def count_model(model: LanguageModel) -> dict[str, int | float]:
    """Count parameters by role; tied tensors count once.

    Returns:
        For the embedding: ``input`` and ``output`` (used on one side only), ``shared`` (used on both sides)
        and ``embedding`` (their sum). For the model: ``rest``, ``total`` and ``stored_bits``. For comparison:
        ``dense_embedding`` (a tied V x D table), ``dense_total`` and ``compression`` (dense_embedding over
        embedding).
    """
    embedding = model.embedding
    counts = embedding.counts()
    total = count_parameters(model)
    rest = total - counts["total"]
    dense = se.num_parameters(
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
    """The report of the embedding and the parameter counts that training prints first."""
    counts = count_model(model)
    embedding = model.embedding
    tied = "input = output" if counts["shared"] else "input and output not tied"
    names = {"input": "input only", "output": "output only", "shared": "input and output"}
    rows = [(f"embedding, {names[key]}", counts[key]) for key in names if counts[key]]
    rows += [("rest", counts["rest"]), ("total", counts["total"])]
    rows.append(("with a plain table", counts["dense_total"]))
    return parameter_table(f"Embedding, {tied}: {embedding.method} {embedding.options}", rows, counts)
