"""Counting parameters, and choosing options for a size."""
