"""Perplexity, the neural cache pointer, and text generation."""
