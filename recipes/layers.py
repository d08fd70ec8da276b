"""``python -m recipes layers``: the layers of an embedding: DeFINE's appendix B, UnClE's section 4.6.3."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from shared_embeddings.utils.command_line import Parser, align
from shared_embeddings.utils.files import write_text

SUMMARY = "correlation.json"


def layers(arguments: Sequence[str]) -> None:
    """Plot the correlation between the dimensions of each layer; print the cosines of words in each."""
    parser = Parser("python -m recipes layers", description=layers.__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a trained model of any host")
    parser.add_argument("--output", type=Path, help=f"folder for the PNG files and {SUMMARY}")
    parser.add_argument("--words", nargs="+", default=[], help="two or more words, for their cosines")
    options = parser.parse_args(arguments)
    from shared_embeddings.analysis import draw_map, layer_correlations, layer_cosines
    from shared_embeddings.compress.host import find_host

    embeddings = find_host(options.model)[1].read(options.model).embeddings()
    if options.output is not None:
        maps = [layer for embedding in embeddings for layer in layer_correlations(embedding)]
        maps = [part for layer in maps for part in (layer, *layer.by_group())]
        options.output.mkdir(parents=True, exist_ok=True)
        for layer in maps:
            draw_map(layer, options.output / layer.file_name())
        summaries = [{**layer.summary(), "picture": layer.file_name()} for layer in maps]
        write_text(options.output / SUMMARY, json.dumps(summaries, indent=1) + "\n")
        rows = [["", "words", "width", "constant", "mean |r|", "between groups"]]
        for row in summaries:
            numbers = [f"{row[name]:,}" for name in ("words", "width", "constant")]
            numbers += [_number(row[name]) for name in ("mean_correlation", "between_groups")]
            rows.append([f"{row['embedding']}: {row['layer']}", *numbers])
        print("\n".join(align(rows)))
    for embedding in embeddings if options.words else ():
        pairs = layer_cosines(embedding, options.words)
        names = list(dict.fromkeys(name for pair in pairs for name in pair.cosines))
        cells = [
            [f"{pair.first}, {pair.second}", *(_number(pair.cosines.get(name)) for name in names)]
            for pair in pairs
        ]
        print("\n".join([embedding.name, *align([["", *names], *cells])]))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
