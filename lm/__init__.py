"""Language models with shared embeddings: AWD-LSTM, the LSTM for WikiText-103, and Transformer-XL."""
