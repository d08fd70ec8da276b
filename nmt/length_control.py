"""Length control: positional encodings that depend on the output length, and their options.

Takase & Okazaki (2019), "Positional Encoding to Control Output Sequence Length", Eq. 3 to 6.
"""

from __future__ import annotations

import argparse
import math
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onmt.opts
import torch
from onmt.utils.parse import ArgumentParser
from torch import Tensor, nn

from shared_embeddings.utils.errors import UserError

BASE = 10000.0
CONCATENATED = "SinusoidalConcat"


def exponents(dim: int, layout: str) -> Tensor:
    """Return the exponents of the base, ``(D/2,)``.

    OpenNMT-py's ``SinusoidalInterleaved`` uses 2i/D (Vaswani et al.), ``SinusoidalConcat`` i/(D/2 - 1).
    """
    half = dim // 2
    return torch.arange(half, dtype=torch.float32) / (half - 1 if layout == CONCATENATED else half)


# The angles ``(B or 1, T, D/2)`` of each encoding, from positions ``(1, T, 1)`` that start at 0, desired
# lengths ``(B, 1, 1)`` and the exponents e ``(D/2,)``.
ANGLES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    # pos / 10000^e (Vaswani et al., 2017)
    "pe": lambda positions, lengths, powers: positions * BASE**-powers,
    # (len - pos) / 10000^e: the remaining length, 0 at the end of the sentence
    "ldpe": lambda positions, lengths, powers: (lengths - positions) * BASE**-powers,
    # pos / len^e: the fraction of the length, which is at least 1
    "lrpe": lambda positions, lengths, powers: positions * lengths**-powers,
}
LENGTH_DEPENDENT = ("ldpe", "lrpe")


def sinusoids(angles: Tensor, layout: str) -> Tensor:
    """Return sines and cosines of angles ``(..., D/2)`` ordered by layout, ``(..., D)``."""
    pair = (angles.sin(), angles.cos())
    return torch.cat(pair, dim=-1) if layout == CONCATENATED else torch.stack(pair, dim=-1).flatten(-2)


class LengthControlledPositions(nn.Module):
    """Adds the sum of several encodings to a decoder's input ``(B, T, D)``; replaces OpenNMT-py's sinusoids.

    `set_lengths` sets the lengths of a batch. `start` begins a decoding, and `map_rows` keeps the lengths
    aligned with the rows of the decoder's state when beams are repeated, reordered or finished. The module
    has no parameters and no maximum length.
    """

    def __init__(self, dim: int, encodings: Sequence[str], layout: str) -> None:
        super().__init__()
        self.dim = dim
        self.encodings = tuple(encodings)
        self.layout = layout
        self.batch_lengths: Tensor | None = None
        self.lengths: Tensor | None = None

    def set_lengths(self, lengths: Tensor) -> None:
        """Set the lengths ``(B,)`` of the next batch, in tokens without start and end."""
        self.batch_lengths = self.lengths = lengths

    def start(self, rows: int) -> None:
        """Begin a decoding whose state has ``rows`` rows: a multiple of the batch size."""
        if self.batch_lengths is None or rows % len(self.batch_lengths):
            raise RuntimeError(f"no lengths are set for the {rows} rows of this batch")
        self.lengths = self.batch_lengths.repeat_interleave(rows // len(self.batch_lengths))

    def map_rows(self, change: Callable[[Tensor, int], Tensor]) -> None:
        """Apply ``change(tensor, dim)``, which changes the rows of the decoder's state, to the lengths."""
        if self.lengths is not None:
            self.lengths = change(self.lengths, 0)

    def forward(self, emb: Tensor, step: int | None = None) -> Tensor:
        """Return the scaled embeddings ``(B, T, D)`` with their positions, from `step` on, added."""
        assert self.lengths is not None, "set_lengths comes first"
        first = step or 0
        last = first + emb.size(1)
        positions = torch.arange(first, last, device=emb.device, dtype=torch.float32)[None, :, None]
        lengths = self.lengths.to(positions)[:, None, None]
        powers = exponents(self.dim, self.layout).to(emb.device)
        added = [sinusoids(ANGLES[name](positions, lengths, powers), self.layout) for name in self.encodings]
        return emb * math.sqrt(self.dim) + torch.stack(torch.broadcast_tensors(*added)).sum(0).to(emb.dtype)

    def extra_repr(self) -> str:
        """Return the width and the encodings."""
        return f"{self.dim}, {' + '.join(self.encodings)}"


OPTION = "decoder_positions"
START_AND_END = 2


def add_model_options(parser: Any) -> None:
    """Add the model option to OpenNMT-py's parser."""
    text = (
        "Positional encodings of the decoder, which are summed: pe (sinusoids), ldpe (length difference), "
        "lrpe (length ratio); ldpe and lrpe require a desired length in translation"
    )
    add = parser.add_argument_group("Length control").add_argument
    add(f"--{OPTION}", f"-{OPTION}", nargs="+", choices=sorted(ANGLES), default=None, help=text)


def add_translation_options(parser: Any) -> None:
    """Add the translation options to OpenNMT-py's parser."""
    add = parser.add_argument_group("Length control").add_argument
    text = "Desired number of tokens per translation, for models with length control"
    add("--desired_length", "-desired_length", type=_length, default=None, metavar="N", help=text)
    text = "File with the desired length of each line of the source"
    add("--desired_lengths", "-desired_lengths", default=None, metavar="FILE", help=text)


def _length(text: str) -> int:
    if re.fullmatch("[0-9]+", text) is None or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a length; expected an integer of at least 1")
    return int(text)


def has_length_control(opt: Namespace) -> bool:
    """Return whether a model has an encoding that depends on the length."""
    return any(name in LENGTH_DEPENDENT for name in getattr(opt, OPTION, None) or ())


def check_positions(opt: Namespace) -> None:
    """Check that the options of a model support its decoder positions; raises `UserError` otherwise."""
    names = getattr(opt, OPTION, None)
    if names is None:
        return
    shown = f"{OPTION}: {' '.join(names)}"
    if len(set(names)) < len(names):
        raise UserError(f"{shown}: has an encoding twice; remove one")
    if not opt.position_encoding:
        raise UserError(f"{shown}: has no effect without position_encoding: true; set it")
    if not has_length_control(opt):
        return
    if opt.decoder_type != "transformer" or getattr(opt, "model_task", "seq2seq") != "seq2seq":
        raise UserError(f"{shown}: needs decoder_type: transformer, not {opt.decoder_type}, and a source")
    if getattr(opt, "truncated_decoder", 0) > 0:
        raise UserError(f"{shown}: needs whole targets; remove truncated_decoder")
    for name in ("train_metrics", "valid_metrics"):
        if getattr(opt, name, None):
            raise UserError(f"{name}: translates without desired lengths, which {OPTION} requires; remove it")


def check_same_positions(opt: Namespace, saved: Namespace) -> None:
    """Check that the positions are those of the checkpoint to train from; raises `UserError` otherwise."""
    asked, found = (set(getattr(options, OPTION, None) or ["pe"]) for options in (opt, saved))
    if getattr(opt, OPTION, None) is not None and asked != found:
        raise UserError(
            f"{OPTION}: {' '.join(sorted(asked))} has no effect with train_from, because the checkpoint was "
            f"trained with {' '.join(sorted(found))}; remove the option, or train a new model"
        )


def insert_positions(model: Any, opt: Namespace) -> None:
    """Replace the decoder's sinusoids by length-controlled positions if the options say so."""
    if has_length_control(opt):
        own = model.decoder.embeddings.make_embedding
        own.pe = LengthControlledPositions(own.pe.dim, getattr(opt, OPTION), opt.position_encoding_type)


def positions_of(model: nn.Module) -> list[LengthControlledPositions]:
    """Return the length-controlled positions of a model or an ensemble."""
    return [module for module in model.modules() if isinstance(module, LengthControlledPositions)]


def set_target_lengths(model: Any, target: Tensor) -> None:
    """Set the lengths of a training batch to those of its targets ``(B, T, 1)``."""
    for positions in positions_of(model):
        padding = model.decoder.embeddings.word_padding_idx
        positions.set_lengths(target[:, :, 0].ne(padding).sum(dim=1) - START_AND_END)


def read_desired_lengths(opt: Namespace, lines: int) -> int | list[int] | None:
    """Return the desired lengths of a number of lines: one for all, one per line, or ``None``."""
    path = opt.desired_lengths
    if path is None:
        return opt.desired_length  # type: ignore[no-any-return]
    if opt.desired_length is not None:
        raise UserError("desired_length: has no effect with desired_lengths; remove one of them")
    if not Path(path).is_file():
        raise UserError(f"desired_lengths: no such file: {path}")
    texts = Path(path).read_text(encoding="utf-8-sig", errors="replace").splitlines()
    if len(texts) != lines:
        raise UserError(f"desired_lengths: {path} has {len(texts)} lines, but the source has {lines}")
    lengths = []
    for number, text in enumerate(texts, 1):
        try:
            lengths.append(_length(text.strip()))
        except argparse.ArgumentTypeError as error:
            raise UserError(f"desired_lengths: {path}: line {number}: {error}") from None
    return lengths


def prepare_translator(translator: Any, opt: Namespace) -> None:
    """Set the attribute ``desired`` of a translator: one length for all lines, or one per line."""
    desired = opt.desired_length if opt.desired_lengths is None else opt.desired_lengths
    name = "desired_length" if opt.desired_lengths is None else "desired_lengths"
    if isinstance(desired, str):
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
    defaults = ArgumentParser()
    onmt.opts.translate_opts(defaults)
    if translator.max_length_ratio not in (0, float(defaults.get_default("max_length_ratio"))):
        raise UserError(
            f"max_length_ratio: {translator.max_length_ratio} has no effect with {name}; remove it"
        )
    translator.max_length_ratio = 0
    translator.desired = desired


def set_desired_lengths(translator: Any, batch: dict[str, Any]) -> None:
    """Set the desired lengths of a batch before it is translated."""
    found = positions_of(translator.model)
    if not found:
        return
    desired = translator.desired
    if isinstance(desired, int):
        values = [desired] * len(batch["srclen"])
    elif "cid_line_number" in batch:
        values = [desired[number] for number in batch["cid_line_number"]]
    else:
        raise UserError("desired_lengths: does not support line breaks within a line; set desired_length")
    lengths = torch.tensor(values, device=batch["srclen"].device)
    for positions in found:
        positions.set_lengths(lengths)
