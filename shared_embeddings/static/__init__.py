"""Compress models that are only a table of token vectors: model2vec, StaticEmbedding and WordLlama."""
