"""Time and memory of the embeddings, as ratios to a plain table in the same run."""
