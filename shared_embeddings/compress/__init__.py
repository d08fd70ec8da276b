"""Compressing and trimming trained models of any host: read once, fit and measure in memory, write once."""

# The subword markers in the texts of translation models.
SUBWORDS = ("none", "bpe", "sentencepiece")
# What of a table is calibrated, see `shared_embeddings.compress.calibration`.
SIDES = ("both", "output", "none")
