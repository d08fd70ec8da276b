"""The size of each row's embedding, from the papers' formulas and before any training."""

from __future__ import annotations

import shared_embeddings as se
from recipes.common.errors import UserError
from recipes.common.rows import Row

# Unknown, padding, start and end of a sentence.
SPECIAL_TOKENS = 4


def padded_vocabulary(entries: int, multiple: int) -> int:
    """Rows of the table for a vocabulary file of `entries` lines, as OpenNMT-py pads them to a `multiple`."""
    return -(-(entries + SPECIAL_TOKENS) // multiple) * multiple


def describe_size(row: Row, entries: int) -> str:
    """One line: embedding parameters of `row`, input and output together, and the compression.

    Raises:
        UserError: the method does not accept its options.
    """
    is_language_model = "model" in row.train
    vocabulary = (
        entries if is_language_model else padded_vocabulary(entries, row.train.get("vocab_size_multiple", 8))
    )
    size = row.train["embedding_dim" if is_language_model else "hidden_size"]
    options = {key: value for key, value in row.embedding.items() if key != "method"}
    try:
        method = row.embedding["method"]
        # Their files may not exist yet.
        options |= {name: se.STORED for name in se.file_options(method) if name in options}
        count = se.num_parameters(method, num_embeddings=vocabulary, embedding_dim=size, **options)
    except (se.OptionError, KeyError) as error:
        raise UserError(f"{row.name}: {error}") from error
    dense = vocabulary * size
    return f"{count:,} embedding parameters, {dense / count:.1f} times fewer than {vocabulary:,} x {size}"
