"""Patches that pass desired output lengths to the decoder."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nmt.summarization import length_control
from nmt.summarization.positions import LengthControlledPositions


def with_desired_lengths(original: Any) -> Any:
    """Set the desired lengths of a batch before it is translated."""

    def translate_batch(self: Any, batch: dict[str, Any], attn_debug: bool) -> Any:
        length_control.ask_desired_lengths(self, batch)
        return original(self, batch, attn_debug)

    return translate_batch


def with_target_lengths(original: Any) -> Any:
    """Set the lengths of the targets as desired lengths before a training step."""

    def forward(self: Any, src: Tensor, tgt: Tensor, *args: Any, **kwargs: Any) -> Any:
        length_control.ask_target_lengths(self, tgt)
        return original(self, src, tgt, *args, **kwargs)

    return forward


def with_initial_lengths(original: Any) -> Any:
    """Start decoding with the desired lengths of the batch."""

    def init_state(self: Any, src: Any, enc_out: Any, enc_final_hs: Any) -> None:
        original(self, src, enc_out, enc_final_hs)
        positions = _positions_of(self)
        if positions is not None:
            positions.start(len(src))

    return init_state


def with_mapped_lengths(original: Any) -> Any:
    """Repeat, reorder and drop lengths like the other rows of the decoder state."""

    def map_state(self: Any, change: Any) -> None:
        original(self, change)
        positions = _positions_of(self)
        if positions is not None:
            positions.follow(change)

    return map_state


def _positions_of(decoder: Any) -> LengthControlledPositions | None:
    """The length-controlled positions of a decoder, or None."""
    positions = getattr(decoder.embeddings.make_embedding, "pe", None)
    return positions if isinstance(positions, LengthControlledPositions) else None
