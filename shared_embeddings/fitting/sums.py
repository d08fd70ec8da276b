"""Sums of codebook entries near the rows of a table, found one codebook after the other.

Axes: ``V`` words, ``D`` dimensions, ``M`` codebooks, ``K`` entries, ``n`` words of a sample or block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from tqdm import tqdm

from shared_embeddings.fitting.clustering import kmeans
from shared_embeddings.layers.word_codes import code_dtype

# Words that codebooks are fitted to, and words that stay in the cache while their codes are chosen.
_SAMPLE = 2**16
_ROWS = 1024
# Rounds over all codebooks of a sample: at most so many, for at most so many products in all (minutes), and
# no more once the error falls by less than a share. Each product of an entry comes with the cost of so many.
_ROUNDS = 20
_PRODUCTS = 3 * 10**12
_LEAST_GAIN = 2e-3
_COST = 48
# Rounds for the words that are not in the sample.
_OTHER_ROUNDS = 2


class Sums:
    """Codes and codebooks whose sums approach a table; what they leave of it is kept up to date.

    Attributes:
        left: ``(V, D)`` float32 on the CPU, the table minus the sums; the columns by falling variance.
        codes: ``(V, M)`` in the smallest type that holds them.
        codebooks: ``(M, K, D)``.
    """

    def __init__(self, table: Tensor, num_codebooks: int, codebook_size: int) -> None:
        self.left = table.float()
        self.codes = torch.zeros(len(table), num_codebooks, dtype=code_dtype(codebook_size))
        self.codebooks = self.left.new_zeros(num_codebooks, codebook_size, table.size(1))

    def start(self, seed: int, progress: bool) -> None:
        """Cluster what is left in a few columns for each codebook, in all columns once for D codebooks."""
        number, size, dim = self.codebooks.shape
        bar = tqdm(total=number, desc="codebooks", unit=" codebooks", disable=not progress)
        for first in range(0, number, dim):
            shares = _shares(self.left.var(dim=0, correction=0), min(dim, number - first), math.log2(size))
            for place, columns in enumerate(shares, first):
                codes, entries = kmeans(self.left[:, columns], size, seed + place, _PRODUCTS // number)
                self.codes[:, place] = codes
                self.codebooks[place][:, columns] = entries
                self.left[:, columns] -= entries[codes]
                bar.update()
        bar.close()

    def improve(self, seed: int, progress: bool) -> None:
        """Fit codebooks and codes to a sample of words, then choose the codes of the others."""
        words = torch.randperm(len(self.left), generator=torch.Generator().manual_seed(seed % 2**64))
        sample, others = words[:_SAMPLE].sort().values, words[_SAMPLE:]
        is_all = not len(others)
        left, codes = (self.left, self.codes) if is_all else (self.left[sample], self.codes[sample])
        first = self.codebooks.clone()
        self._fit(left, codes, progress)
        if is_all:
            return
        self.left[sample], self.codes[sample] = left, codes
        bar = tqdm(total=len(others), desc="codes", unit=" words", disable=not progress)
        for ids in others.split(_ROWS):
            left, codes = self.left[ids], self.codes[ids].long()
            for before, after, chosen in zip(first, self.codebooks, codes.unbind(1)):
                left += (before - after)[chosen]
            for _ in range(_OTHER_ROUNDS):
                self._choose(left, codes)
            self.left[ids], self.codes[ids] = left, codes.to(self.codes)
            bar.update(len(ids))
        bar.close()

    def _fit(self, left: Tensor, codes: Tensor, progress: bool) -> None:
        """Rounds of new entries and codes for a sample, of which `left` ``(n, D)`` is left, in place."""
        number, size, dim = self.codebooks.shape
        rounds = min(max(_PRODUCTS // (left.numel() * number * (size + _COST)), 1), _ROUNDS)
        error = float(left.square().sum())
        bar = tqdm(total=rounds * number, desc="sums", unit=" codebooks", disable=not progress)
        for _ in range(rounds):
            for place, entries in enumerate(self.codebooks):
                old = codes[:, place].long()
                counts = old.bincount(minlength=size).clamp(min=1).unsqueeze(1)
                fitted = entries + torch.zeros_like(entries).index_add_(0, old, left) / counts
                new = _best(left, entries, fitted, old)
                left += (entries.unsqueeze(1) - fitted).view(-1, dim)[old * size + new]
                codes[:, place] = new
                self.codebooks[place] = fitted
                bar.update()
            before, error = error, float(left.square().sum())
            bar.set_postfix(error=f"{error:.4g}")
            if error >= before * (1.0 - _LEAST_GAIN):
                break
        bar.close()

    def _choose(self, left: Tensor, codes: Tensor) -> None:
        """One round of better codes for words of which `left` ``(n, D)`` is left, in place."""
        for place, entries in enumerate(self.codebooks):
            old = codes[:, place]
            new = _best(left, entries, entries, old)
            changed = (new != old).nonzero().squeeze(1)
            if len(changed):
                left.index_add_(0, changed, entries[old[changed]] - entries[new[changed]])
                codes[:, place] = new


def _best(left: Tensor, before: Tensor, entries: Tensor, codes: Tensor) -> Tensor:
    """The entries ``(n,)`` nearest to what is left without `codes`, the entries of `before`."""
    scores = (before @ entries.t() - entries.square().sum(dim=1) / 2)[codes]
    return scores.addmm_(left, entries.t()).argmax(dim=1)


def _shares(variances: Tensor, number: int, bits: float) -> list[Tensor]:
    """Columns for each of `number` codebooks of so many bits: each bit goes where the variance is largest.

    Args:
        variances: ``(D,)`` of the columns, at least as many as codebooks.
    """
    given = torch.zeros(len(variances))
    rest = variances.clone()
    for _ in range(int(number * bits)):
        column = int(rest.argmax())
        given[column] += 1
        # A bit takes three quarters; a codebook has no more bits than its own.
        rest[column] = rest[column] / 4 if given[column] < int(bits) else -1.0
    loads = torch.zeros(number)
    columns: list[list[int]] = [[] for _ in range(number)]
    for column in given.argsort(descending=True, stable=True).tolist():
        codebook = int(loads.argmin())
        columns[codebook].append(column)
        # Columns without bits are shared out evenly.
        loads[codebook] += max(float(given[column]), 1e-3)
    return [torch.tensor(sorted(found)) for found in columns]
