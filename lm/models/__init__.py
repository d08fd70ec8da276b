"""The language models, one file for each kind."""
