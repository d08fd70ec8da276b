"""A corpus as columns of text for truncated backpropagation through time.

Axes: ``B`` columns of this process, ``T`` tokens of a segment, ``N`` tokens of the corpus.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shared_embeddings.errors import UserError


class Stream:
    """The columns of one process.

    The corpus is split into ``world_size * batch_size`` contiguous columns of equal length, dropping the
    remainder. Process `rank` has `batch_size` of them, starting at ``rank * batch_size``, so that all
    processes together have the same batches as one process with the total batch size.

    Attributes:
        length: tokens per column, with ``length - 1`` targets.
    """

    def __init__(self, tokens: np.ndarray, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        """Create views of the columns of process `rank` in `tokens` ``(N,)``.

        Raises:
            UserError: the batch size is below 1, or there are fewer than two tokens per column.
            ValueError: `rank` is out of range.
        """
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}; it must be at least 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not from 0 to {world_size - 1}")
        columns = world_size * batch_size
        self.length = len(tokens) // columns
        if self.length < 2:
            raise UserError(
                f"{len(tokens)} tokens are too few for {columns} columns of at least 2; lower batch_size or "
                "use a longer text"
            )
        share = tokens[: columns * self.length].reshape(columns, self.length)
        self._columns = share[rank * batch_size : (rank + 1) * batch_size]

    def segment(
        self, position: int, length: int, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, Tensor]:
        """Return inputs and targets ``(B, T)``, int64; target t is the token after input t.

        Args:
            position: tokens of each column already consumed, from 0 to ``self.length - 2``.
            length: T; the last segment may be shorter.
            device: device of the tensors.

        Raises:
            UserError: `length` is below 1.
            ValueError: `position` is out of range.
        """
        if length < 1:
            raise UserError(f"sequence_length is {length}; it must be at least 1")
        if not 0 <= position < self.length - 1:
            raise ValueError(f"position {position} is not from 0 to {self.length - 2}")
        end = min(position + length, self.length - 1)
        piece = torch.from_numpy(self._columns[:, position : end + 1].astype(np.int64)).to(device)
        return piece[:, :-1].contiguous(), piece[:, 1:].contiguous()
