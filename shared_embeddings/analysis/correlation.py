"""Correlation maps of the layers of an embedding (DeFINE, appendix B): streamed over the words, then drawn.

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
from shared_embeddings.checkpoints.adapter import WordEmbedding
from shared_embeddings.utils.files import replacing

# Words that are looked at together.
_BLOCK = 2048
# A bar appears for what takes longer than this, in seconds.
_BAR_DELAY = 2.0


@dataclasses.dataclass(frozen=True)
class LayerCorrelation:
    """The correlation between the dimensions of one layer, over all words that go through it.

    Attributes:
        embedding: the host's name of it.
        layer: the method's name of it; for a group of dimensions, the group follows.
        words: how many words go through it.
        correlations: ``(width, width)``; NaN for constant dimensions.
        groups: into how many groups its dimensions fall.
    """

    embedding: str
    layer: str
    words: int
    correlations: Tensor
    groups: int

    def by_group(self) -> list[LayerCorrelation]:
        """The correlation within each of its groups, where there are several."""
        if self.groups == 1:
            return []
        blocks = blocks_of_groups(self.correlations, self.groups)
        return [
            LayerCorrelation(self.embedding, f"{self.layer}, group {number}", self.words, block, 1)
            for number, block in enumerate(blocks, 1)
        ]

    def summary(self) -> dict[str, Any]:
        """The numbers that tell about the layer, for a table or JSON."""
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
        """The name of the picture of its map."""
        return re.sub(r"[^\w]+", "-", f"{self.embedding} {self.layer}").strip("-") + ".png"


def layer_correlations(embedding: WordEmbedding, progress: bool = True) -> list[LayerCorrelation]:
    """The correlation maps of all layers of an embedding, over its words without the padding word.

    Words are taken in blocks: memory depends on the widths of the layers, not on the vocabulary.

    Args:
        embedding: of any host.
        progress: show a bar for what takes long.
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
    """Draw the absolute correlations, from 0 to 1 as in the paper's figures, into a PNG file.

    Constant dimensions are grey.
    """
    # Not pyplot: it would choose a window system and keep every figure alive.
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4, 4.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = colormaps["viridis"].with_extremes(bad="lightgrey")
    image = axes.imshow(found.correlations.abs().numpy(), vmin=0.0, vmax=1.0, cmap=colours)
    axes.set_title(f"{found.embedding}: {found.layer}", fontsize=9)
    axes.set_xlabel("dimension")
    figure.colorbar(image, label="absolute correlation")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})
