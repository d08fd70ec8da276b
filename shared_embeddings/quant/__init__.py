"""Codecs of quantized tables: rows of numbers in a few bits each, and back."""

# The storage dtypes of plain tensors.
STORES = ("fp32", "fp16", "int8")
