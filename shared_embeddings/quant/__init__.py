"""Codecs of quantized tables: rows of numbers in a few bits each, and back."""
