"""The command `similarity`: whether words that people find similar have similar vectors."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from shared_embeddings.cli.arguments import add
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.path_options import PathOption

if TYPE_CHECKING:
    from shared_embeddings.analysis.similarity import Similarity
    from shared_embeddings.analysis.vectors import WordVectors


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = add(
        commands, "similarity", "compare the similarity of word vectors with people's judgment", _similarity
    )
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--vectors", type=PathOption.FILE, help="vectors of GloVe, word2vec or fastText, text or binary"
    )
    source.add_argument("--model", type=PathOption.SOURCE, help="a trained model of any host")
    command.add_argument(
        "--pairs",
        required=True,
        nargs="+",
        type=PathOption.FILE,
        help="files of two words and a score on a line",
    )
    command.add_argument("--limit", type=int, help="read the first so many words of --vectors only")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _similarity(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.analysis.similarity import word_similarity
    from shared_embeddings.analysis.word_pairs import read_pairs

    if known.limit is not None and known.vectors is None:
        raise ValueError("--limit has no effect without --vectors; leave it out")
    tests = [read_pairs(path) for path in known.pairs]
    tables = _tables_of(known.model) if known.vectors is None else _table_in(known.vectors, known.limit)
    found = {
        name: [word_similarity(table.words, table.vectors, test) for test in tests]
        for name, table in tables.items()
    }
    return _as_json(found, tables) if known.json else _as_text(found, tables)


def _table_in(path: Path, limit: int | None) -> dict[str, WordVectors]:
    """The vectors of a file by its name."""
    from shared_embeddings.analysis.vectors import read_vectors

    return {path.name: read_vectors(path, limit)}


def _tables_of(path: Path) -> dict[str, WordVectors]:
    """The input vectors of all embeddings of a model by their names."""
    from shared_embeddings.analysis.vectors import WordVectors
    from shared_embeddings.checkpoints.adapter import find_host

    embeddings = find_host(path)[1].read(path).embeddings()
    return {one.name: WordVectors(list(one.words), one.table().numpy()) for one in embeddings}


def _as_json(found: dict[str, list[Similarity]], tables: dict[str, WordVectors]) -> str:
    """All numbers as one JSON object."""
    rows = {
        name: {
            "words": len(tables[name].words),
            "dimensions": tables[name].vectors.shape[1],
            "sets": [{**dataclasses.asdict(result), "coverage": result.coverage} for result in results],
        }
        for name, results in found.items()
    }
    return json.dumps({"tables": rows}, indent=1)


def _as_text(found: dict[str, list[Similarity]], tables: dict[str, WordVectors]) -> str:
    """A small table for each table of vectors."""
    lines: list[str] = []
    for name, results in found.items():
        words, dim = tables[name].vectors.shape
        lines += [f"{name}: {words:,} words in {dim:,} dimensions"]
        width = max(len(result.name) for result in results)
        lines += [f"  {'':<{width}}  Spearman's rho  known pairs"]
        for result in results:
            rho = "undefined" if result.rho is None else f"{result.rho:.4f}"
            known = f"{result.known} of {result.pairs} ({result.coverage:.0%})"
            note = f", {result.lower_cased} in lower case" if result.lower_cased else ""
            lines.append(f"  {result.name:<{width}}  {rho:>14}  {known}{note}")
    return "\n".join(lines)
