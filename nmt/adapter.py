"""The adapter of `shared-embeddings` for OpenNMT-py, see `shared_embeddings.compress.host`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shared_embeddings.checkpoints import contains_strings

if TYPE_CHECKING:
    from nmt.compression import CheckpointModel, TrimmableCheckpoint


class TranslationAdapter:
    """Opens checkpoints of OpenNMT-py, with its own tables or with shared embeddings."""

    def sniff(self, path: Path) -> bool:
        """Return whether a file looks like a checkpoint of OpenNMT-py."""
        return contains_strings(path, "opt", "vocab")

    def read(self, path: Path, runs: bool = True) -> CheckpointModel:
        """Read a model."""
        from nmt.compression import CheckpointModel

        return CheckpointModel(path)

    def read_trimmable(self, path: Path) -> TrimmableCheckpoint:
        """Read a model to trim it, see `read`."""
        from nmt.compression import TrimmableCheckpoint

        return TrimmableCheckpoint(path)
