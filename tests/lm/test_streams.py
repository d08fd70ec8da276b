"""Columns, segments, and each process's share of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lm.data.corpus import Columns
from shared_embeddings.errors import UserError

TOKENS = np.arange(23, dtype=np.int32)


def test_columns_are_contiguous_and_targets_are_the_next_tokens() -> None:
    stream = Columns(TOKENS, batch_size=3)
    assert stream.length == 7
    ids, targets = stream.segment(2, 3)
    assert ids.tolist() == [[2, 3, 4], [9, 10, 11], [16, 17, 18]]
    assert targets.tolist() == [[3, 4, 5], [10, 11, 12], [17, 18, 19]]
    assert ids.dtype == targets.dtype == torch.int64
    assert ids.is_contiguous() and targets.is_contiguous()


def test_segments_cover_each_target_once() -> None:
    stream = Columns(TOKENS, batch_size=2)
    position, targets = 0, []
    while position < stream.length - 1:
        ids, following = stream.segment(position, 4)
        assert torch.equal(following, ids + 1)
        targets += following[0].tolist()
        position += ids.size(1)
    assert targets == list(range(1, 11))


def test_processes_share_the_columns_of_the_larger_batch() -> None:
    whole = Columns(TOKENS, batch_size=4).segment(1, 2)
    shares = [Columns(TOKENS, batch_size=2, rank=rank, world_size=2).segment(1, 2) for rank in (0, 1)]
    assert torch.equal(torch.cat([ids for ids, _ in shares]), whole[0])
    assert torch.equal(torch.cat([targets for _, targets in shares]), whole[1])


def test_segments_are_copies_of_the_tokens() -> None:
    tokens = TOKENS.copy()
    tokens.setflags(write=False)
    ids, _ = Columns(tokens, batch_size=1).segment(0, 4)
    ids.zero_()
    assert tokens[3] == 3


@pytest.mark.parametrize(
    ("tokens", "batch_size", "said"),
    [
        (23, 0, "batch_size is 0"),
        (23, 12, "23 tokens are too few for 12 columns"),
        (1, 1, "1 tokens"),
        (0, 1, "0 tokens"),
    ],
)
def test_too_little_text_is_refused(tokens: int, batch_size: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Columns(TOKENS[:tokens], batch_size)


def test_segments_of_no_length_are_refused() -> None:
    with pytest.raises(UserError, match="sequence_length is 0; it must be at least 1"):
        Columns(TOKENS, 1).segment(0, 0)


@pytest.mark.parametrize("position", [-1, 22, 23])
def test_positions_outside_are_refused(position: int) -> None:
    with pytest.raises(ValueError, match="from 0 to 21"):
        Columns(TOKENS, 1).segment(position, 2)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2)])
def test_ranks_outside_are_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        Columns(TOKENS, 1, rank, world_size)
