"""Losses that never hold all scores of a batch."""
