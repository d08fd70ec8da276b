"""The commands of `shared-embeddings`: each module adds its own with `register`."""
