"""Analysis of word vectors: word similarity, and correlation between dimensions."""
