"""Positional encodings that know how long the output is to be (Takase & Okazaki, 2019, Eq. 3 to 6)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

BASE = 10000.0
CONCATENATED = "SinusoidalConcat"


def exponents(dim: int, layout: str) -> Tensor:
    """Return the exponent of the base for each sine, ``(D/2,)``.

    Args:
        dim: D, even.
        layout: OpenNMT's ``position_encoding_type``: ``SinusoidalInterleaved`` has 2i/D (Vaswani et al.),
            ``SinusoidalConcat`` has i/(D/2 - 1).
    """
    half = dim // 2
    return torch.arange(half, dtype=torch.float32) / (half - 1 if layout == CONCATENATED else half)


def pe_angles(positions: Tensor, lengths: Tensor, powers: Tensor) -> Tensor:
    """Return ``pos / 10000^e``, ``(1, T, D/2)``, for the ordinary sinusoids (Vaswani et al., 2017).

    Args:
        positions: ``(T,)``, from 0 on.
        lengths: ``(B,)``, which these angles do not depend on.
        powers: the exponents e, ``(D/2,)``.
    """
    return positions[None, :, None] * BASE**-powers


def ldpe_angles(positions: Tensor, lengths: Tensor, powers: Tensor) -> Tensor:
    """Return ``(len - pos) / 10000^e``, ``(B, T, D/2)``: the same wherever equally much is left to write.

    Args:
        positions: ``(T,)``, from 0 on.
        lengths: ``(B,)``; the difference is 0 where the end of the sentence is due.
        powers: the exponents e, ``(D/2,)``.
    """
    return (lengths[:, None] - positions[None, :])[:, :, None] * BASE**-powers


def lrpe_angles(positions: Tensor, lengths: Tensor, powers: Tensor) -> Tensor:
    """Return ``pos / len^e``, ``(B, T, D/2)``: alike wherever the same share is written.

    Args:
        positions: ``(T,)``, from 0 on.
        lengths: ``(B,)``, at least 1.
        powers: the exponents e, ``(D/2,)``.
    """
    return positions[None, :, None] * lengths[:, None, None] ** -powers


ANGLES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "pe": pe_angles,
    "ldpe": ldpe_angles,
    "lrpe": lrpe_angles,
}
LENGTH_DEPENDENT = ("ldpe", "lrpe")


def sinusoids(angles: Tensor, layout: str) -> Tensor:
    """Return sines and cosines of angles ``(..., D/2)`` in the order of a layout, ``(..., D)``."""
    pair = (angles.sin(), angles.cos())
    return torch.cat(pair, dim=-1) if layout == CONCATENATED else torch.stack(pair, dim=-1).flatten(-2)


class LengthControlledPositions(nn.Module):
    """Add the sum of several encodings to a decoder's input, in place of OpenNMT's sinusoids.

    The lengths of a batch are asked for once; each decoding of it starts with them, and they follow the rows
    of the decoder's state when beams are repeated, reordered and finished. There are no parameters and no
    tables, so that a sentence may have any length and a checkpoint holds nothing of it.

    Args:
        dim: width D of the input.
        encodings: some of ``pe``, ``ldpe``, ``lrpe``.
        layout: OpenNMT's ``position_encoding_type``.
    """

    def __init__(self, dim: int, encodings: Sequence[str], layout: str) -> None:
        super().__init__()
        self.dim = dim
        self.encodings = tuple(encodings)
        self.layout = layout
        self.asked: Tensor | None = None
        self.lengths: Tensor | None = None

    def ask(self, lengths: Tensor) -> None:
        """Set the lengths ``(B,)`` of the batch that comes next, in tokens without start and end."""
        self.asked = self.lengths = lengths

    def start(self, rows: int) -> None:
        """Begin a decoding whose state has ``rows`` rows: those of the batch, each repeated equally often.

        Raises:
            RuntimeError: no lengths were asked for, or for another batch.
        """
        if self.asked is None or rows % len(self.asked):
            raise RuntimeError(f"no lengths were asked for the {rows} rows of this batch")
        self.lengths = self.asked.repeat_interleave(rows // len(self.asked))

    def follow(self, change: Callable[[Tensor, int], Tensor]) -> None:
        """Change the lengths as the rows of the decoder's state are changed by ``change(tensor, dim)``."""
        if self.lengths is not None:
            self.lengths = change(self.lengths, 0)

    def forward(self, emb: Tensor, step: int | None = None) -> Tensor:
        """Return the scaled embeddings ``(B, T, D)`` with their positions added.

        Args:
            emb: ``(B, T, D)``.
            step: position of the first of them; ``None`` stands for 0.
        """
        assert self.lengths is not None, "a decoding has to start with lengths"
        first = step or 0
        positions = torch.arange(first, first + emb.size(1), device=emb.device, dtype=torch.float32)
        lengths = self.lengths.to(positions)
        powers = exponents(self.dim, self.layout).to(emb.device)
        added = [sinusoids(ANGLES[name](positions, lengths, powers), self.layout) for name in self.encodings]
        return emb * math.sqrt(self.dim) + torch.stack(torch.broadcast_tensors(*added)).sum(0).to(emb.dtype)

    def extra_repr(self) -> str:
        """Return what the printed module says."""
        return f"{self.dim}, {' + '.join(self.encodings)}"
