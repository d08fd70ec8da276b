"""Open files of word vectors as models to compress and trim."""
