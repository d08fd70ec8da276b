"""Tables of any size, which need not fit in memory: compressed in blocks of rows, looked up on disk."""
