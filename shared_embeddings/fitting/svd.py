"""The truncated SVD of a table, weighted by how often words occur.

Axes: ``V`` words, ``D`` dimensions, ``R`` rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from tqdm import tqdm

from shared_embeddings.fitting.table import BLOCK, blocks, check_counts, check_rank, check_table


def truncated_svd(table: Tensor, rank: int, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The best approximation of rank R: minimizes ``sum_w weights[w] * ||table[w] - codes[w] @ basis||^2``.

    The basis comes from the Gram matrix ``(D, D)``, so that V may be large; a word of weight zero gets the
    best code that the basis allows.

    Args:
        table: ``(V, D)``.
        rank: R, from 1 to D.
        weights: ``(V,)``, not negative; all one when left out.

    Returns:
        Codes ``(V, R)``, and the basis ``(R, D)`` with orthonormal rows, the most important first.

    Raises:
        ValueError: a table or weights that cannot be used, or an impossible rank.
    """
    check_table(table)
    check_rank(rank, table.size(1))
    if weights is not None:
        check_counts(weights, table.size(0))
    basis = best_basis(table, rank, weights)
    return codes_in(table, basis), basis.to(table.dtype)


def best_basis(table: Tensor, rank: int, weights: Tensor | None, progress: bool = False) -> Tensor:
    """The `rank` most important directions ``(R, D)`` of the weighted rows, orthonormal, in 64 bits."""
    gram = torch.zeros((table.size(1), table.size(1)), dtype=torch.float64, device=table.device)
    total = -(-len(table) // BLOCK)
    for rows, block in tqdm(blocks(table), desc="directions", total=total, disable=not progress):
        weighted = block if weights is None else block * weights[rows].to(block).unsqueeze(1)
        gram.addmm_(weighted.t(), block)
    return torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1).t().contiguous()


def codes_in(table: Tensor, basis: Tensor) -> Tensor:
    """The codes ``(n, R)`` that bring rows ``(n, D)`` nearest in an orthonormal basis ``(R, D)``."""
    return torch.cat([(block @ basis.t()).to(table.dtype) for _, block in blocks(table)])
