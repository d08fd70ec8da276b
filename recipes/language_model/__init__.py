"""The steps of the recipes for language models."""
