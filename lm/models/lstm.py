"""LSTM for WikiText-103 as in DeFINE (Mehta et al., 2020), Tables 1a and 9."""

from __future__ import annotations

import dataclasses

from lm.models.awd_lstm import AWDLSTM, AWDLSTMOptions
from lm.models.interface import register


@dataclasses.dataclass(frozen=True)
class LSTMOptions(AWDLSTMOptions):
    """Options of `lstm`: those of `awd_lstm`, with other defaults.

    Dropout as in Merity et al. (2018), An analysis of neural language modeling at multiple scales, for
    WikiText-103: 0.1, without embedding dropout, weight drop, AR and TAR.
    """

    embedding_dim: int = 256
    hidden_dim: int = 1024
    num_layers: int = 4
    embedding_dropout: float = 0.0
    input_dropout: float = 0.1
    hidden_dropout: float = 0.1
    output_dropout: float = 0.1
    weight_drop: float = 0.0
    ar_weight: float = 0.0
    tar_weight: float = 0.0


@register("lstm", LSTMOptions)
class LSTM(AWDLSTM):
    """LSTM layers D -> 1024 -> 1024 -> 1024 -> S by default."""
