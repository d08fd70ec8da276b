"""Reconstruction of pre-trained word vectors (ALONE, section 3.1)."""
