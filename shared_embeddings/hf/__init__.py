"""Hugging Face models: their vocabularies can be trimmed, see `shared_embeddings.hf.trim`."""
