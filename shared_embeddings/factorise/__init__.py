"""Factorising a table: the algorithms that turn a trained ``(V, D)`` table into the parameters of a method.

Nothing here knows of embedding modules. Sums run in 64 bits, a block of words at a time (except in `tt_svd`,
which needs the table as a whole), so that several hundred thousand words take little more than their table.
"""

from shared_embeddings.factorise.codes import learn_codes, product_quantisation
from shared_embeddings.factorise.groups import (
    GroupLayout,
    GroupReduction,
    GroupRound,
    frequency_groups,
    group_reduce,
)
from shared_embeddings.factorise.low_rank import truncated_svd
from shared_embeddings.factorise.tensor_train import tt_svd

__all__ = [
    "GroupLayout",
    "GroupReduction",
    "GroupRound",
    "frequency_groups",
    "group_reduce",
    "learn_codes",
    "product_quantisation",
    "truncated_svd",
    "tt_svd",
]
