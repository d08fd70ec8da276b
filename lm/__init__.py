"""Language models with shared embeddings: AWD-LSTM, the LSTM for WikiText-103, and Transformer-XL."""

import shared_embeddings  # noqa: F401  # first: it reports signals while the rest is imported
