"""Patch of the training step."""

from __future__ import annotations

from typing import Any

import shared_embeddings as se


def with_update_counts(original: Any) -> Any:
    """Set the number of optimizer updates in shared embeddings before every step."""

    def _maybe_update_dropout(self: Any, step: int) -> None:
        original(self, step)
        # OpenNMT-py counts from 1.
        se.set_updates(self.model, step - 1)

    return _maybe_update_dropout
