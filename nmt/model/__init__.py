"""Shared embeddings in an OpenNMT model."""
