"""The steps of the translation recipes: pieces and vocabularies, training, scores."""
