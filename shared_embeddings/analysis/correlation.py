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

from shared_embeddings.embedding import WordEmbedding
from shared_embeddings.fitting.task import BAR_DELAY
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import replacing

# Words per block.
_BLOCK = 2048
# A standard deviation below this fraction of the mean is the rounding error of a constant.
_CONSTANT = 1e-6


class CorrelationMap:
    """Pearson's correlation between the dimensions of vectors, accumulated in blocks.

    DeFINE's appendix B uses the matrix of products E^T E; here each dimension is standardized, so that maps
    of different layers are comparable. Memory is two float64 matrices ``(D, D)``, for any number of vectors.
    """

    def __init__(self, dim: int) -> None:
        self.count = 0
        self._mean = torch.zeros(dim, dtype=torch.float64)
        self._products = torch.zeros(dim, dim, dtype=torch.float64)

    def add(self, vectors: Tensor) -> None:
        """Add vectors ``(n, D)``.

        Merges centered sums of products with the update of Chan et al. (1979), which avoids cancellation.
        """
        number = len(vectors)
        if number == 0:
            return
        block = vectors.detach().to("cpu", torch.float64)
        mean = block.mean(dim=0)
        block = block - mean
        total = self.count + number
        difference = mean - self._mean
        self._products.addmm_(block.t(), block)
        self._products.addr_(difference, difference, alpha=self.count * number / total)
        self._mean += difference * (number / total)
        self.count = total

    def matrix(self) -> Tensor:
        """The correlations ``(D, D)``; NaN in the rows and columns of constant dimensions."""
        deviations = (self._products.diagonal() / max(self.count, 1)).clamp(min=0.0).sqrt()
        constant = deviations <= _CONSTANT * self._mean.abs()
        scale = deviations.reciprocal().masked_fill(constant, torch.nan)
        found = self._products * scale.unsqueeze(0) * scale.unsqueeze(1) / max(self.count, 1)
        return found.clamp(-1.0, 1.0)


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
        width = len(self.correlations) // self.groups
        return [
            LayerCorrelation(
                self.embedding,
                f"{self.layer}, group {group + 1}",
                self.words,
                self.correlations[group * width :, group * width :][:width, :width],
                1,
            )
            for group in range(self.groups if self.groups > 1 else 0)
        ]

    def summary(self) -> dict[str, Any]:
        """Its statistics for a table or JSON; means are of absolute values, None if nothing is left."""
        found = self.correlations
        group = torch.arange(len(found)) // (len(found) // self.groups)
        is_between = group.unsqueeze(0) != group.unsqueeze(1)
        return {
            "embedding": self.embedding,
            "layer": self.layer,
            "words": self.words,
            "width": len(found),
            "constant": int(found.diagonal().isnan().sum()),
            "mean_correlation": _mean_absolute(found[~torch.eye(len(found), dtype=torch.bool)]),
            "groups": self.groups,
            # DeFINE, Figure 11.
            "between_groups": _mean_absolute(found[is_between]),
        }

    def file_name(self) -> str:
        """The file name of its plot."""
        return re.sub(r"[^\w]+", "-", f"{self.embedding} {self.layer}").strip("-") + ".png"


def _mean_absolute(values: Tensor) -> float | None:
    kept = values[~values.isnan()]
    return float(kept.abs().mean()) if len(kept) else None


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
    bar = tqdm(total=len(ids), desc=embedding.name, unit=" words", delay=BAR_DELAY, disable=not progress)
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
