"""Codes for words: one piece after another by k-means, or sums of entries by an auto-encoder.

Axes: ``V`` words, ``D`` dimensions, ``G`` groups, ``M`` codebooks, ``K`` clusters or codes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from shared_embeddings.fitting.table import BLOCK, blocks, check_table
from shared_embeddings.utils.extras import require

# Words per step of the auto-encoder (Shu & Nakayama, section 4).
_AUTOENCODER_BATCH = 128
# The authors take 1e-4 for 200,000 steps; this needs far fewer.
_AUTOENCODER_RATE = 3e-3


def product_quantization(
    table: Tensor, num_groups: int, num_clusters: int, seed: int = 0, progress: bool = False
) -> tuple[Tensor, Tensor]:
    """Cut the vectors into G pieces and cluster the pieces at each place by k-means (Shi & Yu, 2018).

    Args:
        table: ``(V, D)``.
        num_groups: G, a divisor of D.
        num_clusters: K, at most V.
        seed: what the first centroids are drawn from.
        progress: whether to show a progress bar.

    Returns:
        Codes ``(V, G)`` int64, and centroids ``(G, K, D / G)``.

    Raises:
        ValueError: a table that cannot be used, or sizes that do not fit it.
    """
    check_table(table)
    words, dim = table.shape
    if num_groups < 1 or dim % num_groups:
        raise ValueError(f"num_groups is {num_groups}, but it must divide the {dim} dimensions of the table")
    if not 1 <= num_clusters <= words:
        raise ValueError(f"num_clusters is {num_clusters}, but it must be from 1 to the {words} words")
    codes, centroids = [], []
    pieces = table.detach().float().cpu().view(words, num_groups, -1).unbind(1)
    for group, piece in enumerate(tqdm(pieces, desc="k-means", disable=not progress)):
        # Any whole number is a seed elsewhere; this takes 32 bits without a sign.
        means = require("sklearn.cluster").KMeans(num_clusters, n_init=1, random_state=(seed + group) % 2**32)
        codes.append(torch.from_numpy(means.fit_predict(piece.contiguous().numpy())).long())
        centroids.append(torch.from_numpy(means.cluster_centers_))
    return torch.stack(codes, dim=1).to(table.device), torch.stack(centroids).to(table)


def learn_codes(
    table: Tensor,
    num_codebooks: int,
    codebook_size: int,
    seed: int = 0,
    steps: int = 10_000,
    progress: bool = False,
) -> tuple[Tensor, Tensor]:
    """Codes whose entries add up to the vectors, by an auto-encoder (Shu & Nakayama, 2018, section 4).

    The encoder (a tanh layer of M * K / 2, then a softplus) gives each codebook's scores, from which one
    entry is drawn by the Gumbel-softmax at temperature 1; the decoder adds up the entries. The codes come
    from the trained encoder; the codebooks are then the least-squares solution for these codes, which can
    only be nearer to the table than the decoder's.

    Args:
        table: ``(V, D)``.
        num_codebooks, codebook_size: M and K.
        seed: what all is drawn from; torch's own random state stays as it is.
        steps: steps of Adam, with 128 words each.
        progress: whether to show a progress bar.

    Returns:
        Codes ``(V, M)`` int64, and codebooks ``(M, K, D)``.

    Raises:
        ValueError: a table that cannot be used, or a size below 1.
    """
    check_table(table)
    for name, size in (("num_codebooks", num_codebooks), ("codebook_size", codebook_size), ("steps", steps)):
        if size < 1:
            raise ValueError(f"{name} is {size}, but it must be at least 1")
    # All entries near one, so that the learning rate fits every table.
    scaled = table.detach().float()
    scaled = scaled / scaled.square().mean().sqrt().clamp(min=1e-12)
    with torch.random.fork_rng(devices=[table.device] if table.is_cuda else []), torch.enable_grad():
        torch.manual_seed(seed)
        coder = _AutoEncoder(table.size(1), num_codebooks, codebook_size).to(scaled)
        optimizer = torch.optim.Adam(coder.parameters(), lr=_AUTOENCODER_RATE, fused=True)
        for _ in tqdm(range(steps), desc="codes", disable=not progress):
            words = torch.randint(len(scaled), (_AUTOENCODER_BATCH,), device=scaled.device)
            loss = (coder(scaled[words]) - scaled[words]).square().sum(dim=1).mean() / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        codes = torch.cat([coder.log_scores(block).argmax(dim=-1) for block in scaled.split(BLOCK)])
    return codes, least_squares_codebooks(table, codes, codebook_size)


class _AutoEncoder(nn.Module):
    """Encoder and decoder of `learn_codes`."""

    def __init__(self, dim: int, num_codebooks: int, codebook_size: int) -> None:
        super().__init__()
        self.sizes = (num_codebooks, codebook_size)
        entries = num_codebooks * codebook_size
        self.hidden = nn.Linear(dim, max(entries // 2, 1))
        self.scores = nn.Linear(max(entries // 2, 1), entries)
        self.codebooks = nn.Parameter(torch.randn(entries, dim) * (1 / num_codebooks) ** 0.5)

    def log_scores(self, vectors: Tensor) -> Tensor:
        """The logarithms ``(n, M, K)`` of the scores of vectors ``(n, D)``."""
        scores = F.softplus(self.scores(torch.tanh(self.hidden(vectors))))
        return scores.clamp(min=1e-20).log().unflatten(1, self.sizes)

    def forward(self, vectors: Tensor) -> Tensor:
        """The vectors ``(n, D)`` that are left of vectors ``(n, D)``."""
        return F.gumbel_softmax(self.log_scores(vectors), tau=1.0).flatten(1) @ self.codebooks


def least_squares_codebooks(table: Tensor, codes: Tensor, codebook_size: int) -> Tensor:
    """The codebooks ``(M, K, D)`` whose sums for `codes` ``(V, M)`` are nearest to the table."""
    number = codes.size(1)
    entries = number * codebook_size
    places = codes + torch.arange(number, device=codes.device) * codebook_size
    normal = torch.zeros((entries, entries), dtype=torch.float64, device=table.device)
    right = torch.zeros((entries, table.size(1)), dtype=torch.float64, device=table.device)
    for rows, block in blocks(table):
        ones = block.new_zeros((len(block), entries)).scatter_(1, places[rows], 1.0)
        normal.addmm_(ones.t(), ones)
        right.addmm_(ones.t(), block)
    # What one codebook adds another can take away, so the solution is not unique: prefer small entries.
    normal.diagonal().add_(1e-6 * len(table) / codebook_size)
    solved = torch.linalg.solve(normal, right)
    return solved.view(number, codebook_size, -1).to(table.dtype)
