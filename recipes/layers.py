"""``python -m recipes layers``: the layers of embeddings: DeFINE's appendix B, UnClE's section 4.6.3.

Axes: ``D`` width of a layer, ``n`` tokens.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from recipes.common.plot import write_png
from shared_embeddings.analysis import cosine
from shared_embeddings.embedding import WordEmbedding
from shared_embeddings.utils.command_line import Parser, align
from shared_embeddings.utils.errors import require
from shared_embeddings.utils.paths import existing_path, output_path

# Tokens per block.
_BLOCK = 2048


class LayerCorrelation(NamedTuple):
    """Pearson's correlation between the dimensions of a layer, over all tokens that pass through it."""

    layer: str
    tokens: int
    correlations: Tensor  # ``(D, D)``; NaN for constant dimensions
    groups: int  # of its dimensions

    def means(self) -> tuple[float, float]:
        """Return the mean absolute correlation of dimensions, and of those of other groups (Figure 11)."""
        width = len(self.correlations)
        group = torch.arange(width) // (width // self.groups)
        values = self.correlations.abs()
        others = values[~torch.eye(width, dtype=torch.bool)]
        return float(others.nanmean()), float(values[group[:, None] != group].nanmean())


class Moments:
    """Mean and covariance of vectors, accumulated in blocks.

    DeFINE's appendix B uses the matrix of products E^T E; here each dimension is standardized, so that maps
    of different layers are comparable.
    """

    def __init__(self, vectors: Tensor) -> None:
        self.shift = vectors.double().mean(dim=0)  # avoids cancellation
        self.count = 0
        self.sums = torch.zeros_like(self.shift)
        self.products = torch.zeros(len(self.shift), len(self.shift), dtype=torch.float64)

    def add(self, vectors: Tensor) -> None:
        """Add vectors ``(n, D)``."""
        shifted = vectors.double() - self.shift
        self.count += len(shifted)
        self.sums += shifted.sum(dim=0)
        self.products.addmm_(shifted.t(), shifted)

    def correlations(self) -> Tensor:
        """Return the correlations ``(D, D)``; NaN in the rows and columns of constant dimensions."""
        mean = self.sums / self.count
        covariance = self.products / self.count - mean.outer(mean)
        deviations = covariance.diagonal().clamp(min=0.0).sqrt()
        # Smaller standard deviations are the rounding error of a constant.
        is_constant = deviations <= 1e-6 * (self.shift + mean).abs()
        scale = deviations.reciprocal().masked_fill(is_constant, torch.nan)
        return (covariance * scale[:, None] * scale).clamp(-1.0, 1.0)


@torch.no_grad()
def layer_correlations(embedding: WordEmbedding) -> list[LayerCorrelation]:
    """Return the correlations of all layers of an embedding, over its tokens except padding."""
    ids = torch.arange(len(embedding.words))
    ids = ids[ids != (-1 if embedding.padding_idx is None else embedding.padding_idx)]
    moments: dict[str, Moments] = {}
    groups: dict[str, int] = {}
    for block in tqdm(ids.split(_BLOCK), desc=embedding.name, unit=" blocks", disable=None):
        for layer in embedding.layers(block):
            if len(layer.values):
                moments.setdefault(layer.name, Moments(layer.values.cpu())).add(layer.values.cpu())
                groups[layer.name] = layer.groups
    return [
        LayerCorrelation(f"{embedding.name}: {name}", moment.count, moment.correlations(), groups[name])
        for name, moment in moments.items()
    ]


@torch.no_grad()
def layers(arguments: Sequence[str]) -> None:
    """Plot the correlation between the dimensions of each layer; print the cosines of words in each."""
    parser = Parser("python -m recipes layers", description=layers.__doc__)
    parser.add_argument("--model", type=existing_path, required=True, help="a trained model of any host")
    parser.add_argument("--output", type=output_path, help="folder for the PNG files")
    parser.add_argument("--words", nargs="+", default=[], help="two or more words, for their cosines")
    options = parser.parse_args(arguments)
    from shared_embeddings.compress.host import find_host

    embeddings = find_host(options.model)[1].read(options.model).embeddings()
    rows = [["", "tokens", "mean |r|", "between groups"]]
    for layer in (layer for table in embeddings if options.output for layer in layer_correlations(table)):
        figure = require("matplotlib.figure").Figure(figsize=(4.4, 4.0), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        # From 0 to 1; constant dimensions are gray.
        colors = require("matplotlib").colormaps["viridis"].with_extremes(bad="lightgrey")
        image = axes.imshow(layer.correlations.abs().numpy(), vmin=0.0, vmax=1.0, cmap=colors)
        axes.set_title(layer.layer, fontsize=9)
        axes.set_xlabel("dimension")
        figure.colorbar(image, label="absolute correlation")
        write_png(figure, options.output / (re.sub(r"[^\w]+", "-", layer.layer).strip("-") + ".png"))
        rows.append([layer.layer, f"{layer.tokens:,}", *(f"{mean:.4f}" for mean in layer.means())])
    if options.output is not None:
        print("\n".join(align(rows)))
    cosines = []
    for embedding in embeddings if options.words else ():
        ids = {word: number for number, word in enumerate(embedding.words)}
        for pair in itertools.combinations(options.words, 2):
            for values in embedding.layers(torch.tensor([ids[word] for word in pair])):
                if len(values.values) == 2:  # both words pass through the layer
                    value = cosine(*values.values.float().numpy())
                    name = f"{embedding.name}: {values.name}"
                    cosines.append([", ".join(pair), name, "–" if value is None else f"{value:.4f}"])
    if cosines:
        print("\n".join(align(cosines)))
