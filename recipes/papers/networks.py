"""The networks around the embeddings that the papers' totals need: for counting, not for running."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn


def build_network(name: str, sizes: dict[str, object]) -> nn.Module:
    """The network called `name`, on the meta device: it has shapes, but no weights.

    Raises:
        ValueError: there is no such network.
    """
    if name not in _NETWORKS:
        raise ValueError(f"unknown network '{name}'; choose one of {', '.join(sorted(_NETWORKS))}")
    with torch.device("meta"):
        network: nn.Module = _NETWORKS[name](**sizes)
    return network


def transformer(dim: int, ffn_dim: int, layers: int, heads: int = 8) -> nn.Module:
    """The Transformer of Vaswani et al. (2017) without embeddings, `layers` each in encoder and decoder.

    With biases everywhere and a normalization behind each stack, as torch builds it.
    """
    return nn.Transformer(dim, heads, layers, layers, ffn_dim, batch_first=True)


def lstm(sizes: Sequence[int]) -> nn.Module:
    """A stack of LSTM layers, ``sizes[i] -> sizes[i + 1]`` each, with torch's two biases per gate.

    AWD-LSTM is ``[400, 1150, 1150, 400]``; DeFINE's model for WikiText-103 ``[m, 1024, 1024, 1024, n]``.
    """
    return nn.ModuleList(nn.LSTM(inputs, outputs) for inputs, outputs in zip(sizes, sizes[1:]))


def transformer_xl(dim: int, heads: int, head_dim: int, ffn_dim: int, layers: int) -> nn.Module:
    """The context model of Transformer-XL (Dai et al., 2019).

    A layer has queries, keys and values, the projection of relative positions and the output projection, all
    without biases, then a feed-forward net with biases and two normalizations. The two biases of the
    attention scores are shared by all layers (``untie_r`` off in the authors' code).
    """
    network = nn.ModuleList(_transformer_xl_layer(dim, heads * head_dim, ffn_dim) for _ in range(layers))
    network.register_parameter("content_bias", nn.Parameter(torch.empty(heads, head_dim)))
    network.register_parameter("position_bias", nn.Parameter(torch.empty(heads, head_dim)))
    return network


def _transformer_xl_layer(dim: int, attention_dim: int, ffn_dim: int) -> nn.Module:
    """The weights of one layer, see `transformer_xl`."""
    return nn.ModuleDict(
        {
            "in_proj": nn.Linear(dim, 3 * attention_dim, bias=False),
            "positions": nn.Linear(dim, attention_dim, bias=False),
            "out_proj": nn.Linear(attention_dim, dim, bias=False),
            "attention_norm": nn.LayerNorm(dim),
            "linear1": nn.Linear(dim, ffn_dim),
            "linear2": nn.Linear(ffn_dim, dim),
            "ffn_norm": nn.LayerNorm(dim),
        }
    )


_NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "transformer": transformer,
    "lstm": lstm,
    "transformer_xl": transformer_xl,
}
