"""Fitting embeddings to trained tables, and the factorizations behind it."""
