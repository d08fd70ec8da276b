"""Word vectors as a host: files of word2vec, GloVe and fastText, and small files of compressed vectors."""
