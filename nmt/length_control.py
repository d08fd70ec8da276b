"""Length control: positional encodings that depend on the output length, and their options.

Takase & Okazaki (2019), "Positional Encoding to Control Output Sequence Length", Eq. 3 to 6.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_embeddings.utils.errors import UserError

BASE = 10000.0
# The angles ``(B or 1, T, D/2)`` of each encoding, from positions ``(1, T, 1)`` that start at 0, desired
# lengths ``(B, 1, 1)`` and the exponents e ``(D/2,)``.
ANGLES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    # pos / 10000^e (Vaswani et al., 2017)
    "pe": lambda positions, lengths, exponents: positions * BASE**-exponents,
    # (len - pos) / 10000^e: the remaining length, 0 at the end of the sentence
    "ldpe": lambda positions, lengths, exponents: (lengths - positions) * BASE**-exponents,
    # pos / len^e: the fraction of the length, which is at least 1
    "lrpe": lambda positions, lengths, exponents: positions * lengths**-exponents,
}
LENGTH_DEPENDENT = ("ldpe", "lrpe")


class LengthControlledPositions(nn.Module):
    """Adds the sum of several encodings to a decoder's input ``(B, T, D)``; replaces OpenNMT-py's sinusoids.

    `set_lengths` sets the lengths of a batch; in a decoding, `lengths` follow the rows of the decoder's state
    when beams are repeated, reordered or finished. The module has no parameters and no maximum length.
    """

    def __init__(self, dim: int, encodings: Sequence[str], layout: str) -> None:
        super().__init__()
        self.dim = dim
        self.encodings = tuple(encodings)
        # OpenNMT-py's SinusoidalInterleaved has the exponents 2i/D (Vaswani et al.), SinusoidalConcat has
        # i/(D/2 - 1), and all sines first.
        self.concatenates = layout == "SinusoidalConcat"
        self.batch_lengths: Tensor | None = None
        self.lengths: Tensor | None = None

    def set_lengths(self, lengths: Tensor) -> None:
        """Set the lengths ``(B,)`` of the next batch, in tokens without start and end."""
        self.batch_lengths = self.lengths = lengths

    def forward(self, emb: Tensor, step: int | None = None) -> Tensor:
        """Return the scaled embeddings ``(B, T, D)`` with their positions, from `step` on, added."""
        assert self.lengths is not None, "set_lengths comes first"
        first, half = step or 0, self.dim // 2
        positions = torch.arange(first, first + emb.size(1), device=emb.device, dtype=torch.float32)
        lengths = self.lengths.to(positions)[:, None, None]
        exponents = torch.arange(half, device=emb.device, dtype=torch.float32)
        exponents = exponents / (half - 1 if self.concatenates else half)
        encodings = []
        for name in self.encodings:
            angles = ANGLES[name](positions[None, :, None], lengths, exponents)
            pair = (angles.sin(), angles.cos())
            encodings.append(torch.cat(pair, -1) if self.concatenates else torch.stack(pair, -1).flatten(-2))
        total = torch.stack(torch.broadcast_tensors(*encodings)).sum(0)
        return emb * math.sqrt(self.dim) + total.to(emb.dtype)


OPTION = "decoder_positions"


def has_length_control(opt: Namespace) -> bool:
    """Return whether a model has an encoding that depends on the length."""
    return any(name in LENGTH_DEPENDENT for name in getattr(opt, OPTION, None) or ())


def check_positions(opt: Namespace) -> None:
    """Check that the options of a model support its decoder positions; raises `UserError` otherwise."""
    names: list[str] = getattr(opt, OPTION, None) or []
    if names and not opt.position_encoding:
        raise UserError(f"{OPTION}: has no effect without position_encoding: true; set it")
    if has_length_control(opt) and getattr(opt, "valid_metrics", None):
        raise UserError(f"valid_metrics: {opt.valid_metrics} needs desired lengths with {OPTION}; remove it")
    is_translator = opt.decoder_type == "transformer" and getattr(opt, "model_task", "seq2seq") == "seq2seq"
    if has_length_control(opt) and not is_translator:
        raise UserError(
            f"{OPTION}: {' '.join(names)} needs decoder_type: transformer, not {opt.decoder_type}, and a "
            "source"
        )


def positions_of(model: nn.Module) -> list[LengthControlledPositions]:
    """Return the length-controlled positions of a model or an ensemble."""
    return [module for module in model.modules() if isinstance(module, LengthControlledPositions)]


def read_desired_lengths(opt: Namespace, lines: int) -> int | list[int] | None:
    """Return the desired lengths of a number of lines: one for all, one per line, or ``None``."""
    path = opt.desired_lengths
    if path is None:
        return opt.desired_length  # type: ignore[no-any-return]
    texts = path.read_text(encoding="utf-8-sig").split()
    if len(texts) != lines:
        raise UserError(f"desired_lengths: {path} has {len(texts)} lengths, but the source has {lines} lines")
    for number, text in enumerate(texts, 1):
        if not text.isdecimal() or int(text) < 1:
            raise UserError(f"desired_lengths: {path}: line {number}: {text!r} is not a positive integer")
    return [int(text) for text in texts]


def prepare_translator(translator: Any, opt: Namespace) -> None:
    """Set the attribute ``desired`` of a translator: one length for all lines, or one per line."""
    name = "desired_length" if opt.desired_lengths is None else "desired_lengths"
    desired = getattr(opt, name)
    if isinstance(desired, Path):
        raise UserError("desired_lengths: is not supported by a server; set desired_length")
    controlled = bool(positions_of(translator.model))
    if desired is None:
        if controlled:
            raise UserError("desired_length: is not set, but this model needs it; set it, or desired_lengths")
        return
    if not controlled:
        raise UserError(f"{name}: has no effect on a model without {OPTION}: [pe, lrpe]; remove it")
    longest = desired if isinstance(desired, int) else max(desired)
    if opt.max_length <= longest:
        raise UserError(
            f"max_length: {opt.max_length} is too small for the {name}; set {longest + 1} or more"
        )
    translator.max_length_ratio = 0
    translator.desired = desired
