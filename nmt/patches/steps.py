"""What a model learns about the progress of its training."""

from __future__ import annotations

from typing import Any

import shared_embeddings as se


def with_updates_reported(original: Any) -> Any:
    """Tell shared embeddings how many updates are done, before the batches of the next one."""

    def _maybe_update_dropout(self: Any, step: int) -> None:
        original(self, step)
        # Upstream counts the update that is being made.
        se.set_updates(self.model, step - 1)

    return _maybe_update_dropout
