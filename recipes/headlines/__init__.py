"""Headlines of texts in a desired number of characters: data, scores and tables."""
