"""Semantic word classes for UnClE: clustering word vectors, class files, and unknown words."""

from shared_embeddings.classes.making import (
    Clusters,
    cluster,
    describe_sizes,
    draw_sizes,
    make_classes,
    read_vocabulary,
    regroup,
)
from shared_embeddings.classes.word_classes import WordClasses, class_of_unseen, out_of_vocabulary_row

__all__ = [
    "Clusters",
    "WordClasses",
    "class_of_unseen",
    "cluster",
    "describe_sizes",
    "draw_sizes",
    "make_classes",
    "out_of_vocabulary_row",
    "read_vocabulary",
    "regroup",
]
