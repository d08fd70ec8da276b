"""Correlation maps of the layers of an embedding (DeFINE, appendix B), computed in blocks and plotted.

Axes: ``V`` vocabulary, ``n`` words of a block.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from shared_embeddings.analysis.similarity import (
    CorrelationMap,
    blocks_of_groups,
    constant_dimensions,
    mean_between_groups,
    mean_off_diagonal,
)
from shared_embeddings.embedding import WordEmbedding
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import replacing

# Words per block.
_BLOCK = 2048
# Seconds after which a progress bar appears.
_BAR_DELAY = 2.0


@dataclasses.dataclass(frozen=True)
class LayerCorrelation:
    """The correlation between the dimensions of one layer, over all words that pass through it.

    Attributes:
        embedding: its name in the host.
        layer: its name in the method, followed by the group for a group of dimensions.
        words: the number of words that pass through it.
        correlations: ``(width, width)``; NaN for constant dimensions.
        groups: the number of groups of its dimensions.
    """

    embedding: str
    layer: str
    words: int
    correlations: Tensor
    groups: int

    def by_group(self) -> list[LayerCorrelation]:
        """The correlation within each group; empty for a single group."""
        if self.groups == 1:
            return []
        blocks = blocks_of_groups(self.correlations, self.groups)
        return [
            LayerCorrelation(self.embedding, f"{self.layer}, group {number}", self.words, block, 1)
            for number, block in enumerate(blocks, 1)
        ]

    def summary(self) -> dict[str, Any]:
        """The summary statistics of the layer, for a table or JSON."""
        is_grouped = self.groups > 1
        return {
            "embedding": self.embedding,
            "layer": self.layer,
            "words": self.words,
            "width": len(self.correlations),
            "constant": constant_dimensions(self.correlations),
            "mean_correlation": mean_off_diagonal(self.correlations),
            "groups": self.groups,
            "between_groups": mean_between_groups(self.correlations, self.groups) if is_grouped else None,
        }

    def file_name(self) -> str:
        """The file name of its plot."""
        return re.sub(r"[^\w]+", "-", f"{self.embedding} {self.layer}").strip("-") + ".png"


def layer_correlations(embedding: WordEmbedding, progress: bool = True) -> list[LayerCorrelation]:
    """The correlation maps of all layers of an embedding, over its words except padding.

    Memory depends on the widths of the layers, not on the vocabulary.

    Args:
        embedding: of any host.
        progress: show a progress bar after two seconds.
    """
    number = len(embedding.words)
    ids = torch.arange(number)
    if embedding.padding_idx is not None:
        ids = ids[ids != embedding.padding_idx]
    maps: dict[str, CorrelationMap] = {}
    groups: dict[str, int] = {}
    bar = tqdm(total=len(ids), desc=embedding.name, unit=" words", delay=_BAR_DELAY, disable=not progress)
    for block in ids.split(_BLOCK):
        for layer in embedding.layers(block):
            if layer.name not in maps:
                maps[layer.name] = CorrelationMap(layer.values.size(1))
            maps[layer.name].add(layer.values)
            groups[layer.name] = layer.groups
        bar.update(len(block))
    bar.close()
    return [
        LayerCorrelation(embedding.name, name, found.count, found.matrix(), groups[name])
        for name, found in maps.items()
    ]


def draw_map(found: LayerCorrelation, path: Path) -> None:
    """Plot the absolute correlations, from 0 to 1 as in the paper's figures, to a PNG file.

    Constant dimensions are gray.
    """
    # Not pyplot, which chooses a GUI backend and keeps every figure alive.
    figure = require("matplotlib.figure").Figure(figsize=(4.4, 4.0), dpi=120, layout="constrained")
    require("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colors = require("matplotlib").colormaps["viridis"].with_extremes(bad="lightgrey")
    image = axes.imshow(found.correlations.abs().numpy(), vmin=0.0, vmax=1.0, cmap=colors)
    axes.set_title(f"{found.embedding}: {found.layer}", fontsize=9)
    axes.set_xlabel("dimension")
    figure.colorbar(image, label="absolute correlation")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})
