"""Text, vocabularies, transforms and batches."""
