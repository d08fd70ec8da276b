"""A corpus as parallel columns of text, read segment by segment.

Axes: ``B`` columns of this process, ``T`` tokens of a segment, ``N`` tokens of the corpus.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shared_embeddings.errors import UserError


class Stream:
    """The columns of one process.

    The corpus is cut into ``world_size * batch_size`` contiguous columns of equal length, the remainder
    dropped, and process `rank` has columns ``rank * batch_size`` and following: together, the processes see
    what one process would see with a batch that is `world_size` times as large.

    Attributes:
        length: tokens of a column; it has ``length - 1`` targets.
    """

    def __init__(self, tokens: np.ndarray, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        """Take the share of process `rank` of `tokens` ``(N,)``, without copying them.

        Raises:
            UserError: a batch size below 1, or too few tokens for two in every column.
            ValueError: no such rank.
        """
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}; it must be at least 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not from 0 to {world_size - 1}")
        columns = world_size * batch_size
        self.length = len(tokens) // columns
        if self.length < 2:
            raise UserError(
                f"{len(tokens)} tokens are too few for {columns} columns of at least 2; lower batch_size, or "
                "give more text"
            )
        share = tokens[: columns * self.length].reshape(columns, self.length)
        self._columns = share[rank * batch_size : (rank + 1) * batch_size]

    def segment(
        self, position: int, length: int, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets ``(B, T)`` after `position` tokens of every column, as int64.

        Target t is the token after input t.

        Args:
            position: number of tokens consumed before, from 0 to ``self.length - 2``.
            length: T; the last segment of the columns may be shorter.
            device: where the tensors go.

        Raises:
            UserError: a length below 1.
            ValueError: a position outside the columns.
        """
        if length < 1:
            raise UserError(f"sequence_length is {length}; it must be at least 1")
        if not 0 <= position < self.length - 1:
            raise ValueError(f"position {position} is not from 0 to {self.length - 2}")
        end = min(position + length, self.length - 1)
        piece = torch.from_numpy(self._columns[:, position : end + 1].astype(np.int64)).to(device)
        return piece[:, :-1].contiguous(), piece[:, 1:].contiguous()
