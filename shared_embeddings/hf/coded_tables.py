"""Tables of embeddings in the grids of runtimes.

Axes: ``V`` vocabulary, ``D`` dimensions.
"""

from __future__ import annotations

import torch

from shared_embeddings.compress.fit import fit
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.modules.quantized import QuantizedEmbedding
from shared_embeddings.quant.bits import unpack_bits
from shared_embeddings.quant.grid import GridCodec
from shared_embeddings.quant.packed_tensor import dense
from shared_embeddings.runtimes.base import CodedTable, Grid


def is_in(embedding: SharedEmbedding, grid: Grid) -> bool:
    """Return whether the codes of an embedding are those of a grid."""
    if not isinstance(embedding, QuantizedEmbedding) or [*embedding.word_counts] != [grid.bits]:
        return False
    group = grid.group_size or embedding.embedding_dim
    return embedding.options.codec == grid.codec and embedding.codec.group_size == group


@torch.no_grad()
def coded_table(embedding: SharedEmbedding, grid: Grid, is_output: bool = False) -> CodedTable:
    """Return an embedding in a grid: its own codes, or if they are others, the nearest ones to its table.

    That is the table of the output layer if `is_output`.
    """
    dim = embedding.embedding_dim
    if not is_in(embedding, grid):
        table = embedding.output_table() if is_output else embedding.table()
        embedding, _ = fit("quantized", table.float(), **grid.options([dim]))
    assert isinstance(embedding, QuantizedEmbedding) and isinstance(embedding.codec, GridCodec)
    codes = unpack_bits(embedding.codes(grid.bits), dim, grid.bits)
    scales = dense(embedding.get_parameter("scales")).float().view(len(codes), -1).clone()
    if embedding.padding_idx is not None:
        scales[embedding.padding_idx] = 0.0
    factors, *offsets = scales.split(embedding.codec.num_groups, dim=1)
    return CodedTable(codes.numpy(), factors.numpy(), offsets[0].numpy() if offsets else None)
