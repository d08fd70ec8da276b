"""Texts, vocabularies and token files."""
