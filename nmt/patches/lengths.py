"""How the decoder learns of the lengths that its outputs are to have."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nmt.summarization import length_control
from nmt.summarization.positions import LengthControlledPositions


def asking_desired_lengths(original: Any) -> Any:
    """Ask for the lengths of a batch before it is translated."""

    def translate_batch(self: Any, batch: dict[str, Any], attn_debug: bool) -> Any:
        length_control.ask_desired_lengths(self, batch)
        return original(self, batch, attn_debug)

    return translate_batch


def asking_target_lengths(original: Any) -> Any:
    """Ask for the lengths of the targets before a batch is trained."""

    def forward(self: Any, src: Tensor, tgt: Tensor, *args: Any, **kwargs: Any) -> Any:
        length_control.ask_target_lengths(self, tgt)
        return original(self, src, tgt, *args, **kwargs)

    return forward


def starting_with_lengths(original: Any) -> Any:
    """Start a decoding with the lengths that the batch asked for."""

    def init_state(self: Any, src: Any, enc_out: Any, enc_final_hs: Any) -> None:
        original(self, src, enc_out, enc_final_hs)
        positions = _positions_of(self)
        if positions is not None:
            positions.start(len(src))

    return init_state


def with_lengths_following(original: Any) -> Any:
    """Repeat, reorder and drop lengths as the other rows of a decoder's state."""

    def map_state(self: Any, change: Any) -> None:
        original(self, change)
        positions = _positions_of(self)
        if positions is not None:
            positions.follow(change)

    return map_state


def _positions_of(decoder: Any) -> LengthControlledPositions | None:
    """Return the positions of a decoder that know the length, where it has such."""
    positions = getattr(decoder.embeddings.make_embedding, "pe", None)
    return positions if isinstance(positions, LengthControlledPositions) else None
