"""Checkpoints: reading, writing, averaging, export."""
