"""English-German translation of image captions (Multi30k)."""
