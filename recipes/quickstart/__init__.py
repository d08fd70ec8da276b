"""A translation model in five minutes, on text that needs no download."""
