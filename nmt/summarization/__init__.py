"""Headline generation: source in subwords, target in characters, length control, reranking, ROUGE.

Follows Takase & Okazaki, "Positional Encoding to Control Output Sequence Length" (NAACL 2019), like
section 3.3 of the ALONE paper. docs/opennmt.md describes the commands.
"""
