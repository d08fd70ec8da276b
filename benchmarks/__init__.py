"""Time and memory of the embeddings, relative to a plain table in the same run."""
