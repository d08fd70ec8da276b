"""The commands `classes`, `correlation`, `cosines` and `similarity`: words and their vectors."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from shared_embeddings.cli.arguments import add
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.path_options import PathOption

if TYPE_CHECKING:
    from shared_embeddings.analysis.similarity import Similarity
    from shared_embeddings.words.vectors import WordVectors
from collections.abc import Sequence
from typing import Any

from shared_embeddings.utils.path_options import check_paths


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the commands."""
    _add_classes(commands)
    _add_correlation(commands)
    _add_cosines(commands)
    _add_similarity(commands)


def _add_similarity(commands: argparse._SubParsersAction[Parser]) -> None:
    command = add(commands, "similarity", "evaluate word vectors on word similarity", _similarity)
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
        help="word similarity data: files with two words and a score per line",
    )
    command.add_argument("--limit", type=int, help="read only this many words of --vectors")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _similarity(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.analysis.similarity import read_pairs, word_similarity

    if known.limit is not None and known.vectors is None:
        raise UserError("--limit has no effect without --vectors; remove it")
    tests = [read_pairs(path) for path in known.pairs]
    tables = _tables_of(known.model) if known.vectors is None else _table_in(known.vectors, known.limit)
    found = {
        name: [word_similarity(table.words, table.vectors, test) for test in tests]
        for name, table in tables.items()
    }
    if not any(result.known for results in found.values() for result in results):
        raise UserError(
            f"pairs {', '.join(map(str, known.pairs))}: no pair has vectors for both words in "
            f"{known.vectors or known.model}; use pairs of the same language, or other vectors"
        )
    return _as_json(found, tables) if known.json else _as_text(found, tables)


def _table_in(path: Path, limit: int | None) -> dict[str, WordVectors]:
    """The vectors of a file, by file name."""
    from shared_embeddings.words.vectors import read_vectors

    return {path.name: read_vectors(path, limit)}


def _tables_of(path: Path) -> dict[str, WordVectors]:
    """The input vectors of all embeddings of a model, by name."""
    from shared_embeddings.compress.host import find_host
    from shared_embeddings.words.vectors import WordVectors

    embeddings = find_host(path)[1].read(path).embeddings()
    return {one.name: WordVectors(list(one.words), one.table().numpy()) for one in embeddings}


def _as_json(found: dict[str, list[Similarity]], tables: dict[str, WordVectors]) -> str:
    """The results as a JSON object."""
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
    """The results as text, one table for each set of vectors."""
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


def _add_cosines(commands: argparse._SubParsersAction[Parser]) -> None:
    command = add(commands, "cosines", "print the cosines of words in each layer of an embedding", _cosines)
    command.add_argument("--model", required=True, type=PathOption.SOURCE, help="a trained model of any host")
    command.add_argument("--words", required=True, nargs="+", metavar="WORD", help="two or more words")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _cosines(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.analysis.similarity import layer_cosines
    from shared_embeddings.compress.host import find_host

    embeddings = find_host(known.model)[1].read(known.model).embeddings()
    found = {one.name: layer_cosines(one, known.words) for one in embeddings}
    if known.json:
        rows = {name: [pair._asdict() for pair in pairs] for name, pairs in found.items()}
        return json.dumps({"embeddings": rows}, indent=1, ensure_ascii=False)
    width = max(len(f"{pair.first}, {pair.second}") for pairs in found.values() for pair in pairs)
    lines: list[str] = []
    for name, pairs in found.items():
        layers = list(dict.fromkeys(layer for pair in pairs for layer in pair.cosines))
        lines += [name, " " * width + "".join(f"{layer:>16}" for layer in layers)]
        for pair in pairs:
            numbers = [_as_number(pair.cosines.get(layer)) for layer in layers]
            lines.append(f"{pair.first}, {pair.second}".ljust(width) + "".join(numbers))
    return "\n".join(lines)


# Options for training word vectors.
_SKIP_GRAM = {
    "dim": "width of the word vectors (with --text; default: 100)",
    "window": "words of context each side (with --text; default: 5)",
    "epochs": "passes over the text (with --text; default: 5)",
}


def _add_classes(commands: argparse._SubParsersAction[Parser]) -> None:
    command = add(commands, "classes", "cluster the words of a vocabulary into semantic classes", _classes)
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", nargs="+", type=PathOption.FILE, help="tokenized text files")
    source.add_argument(
        "--vectors-of",
        type=PathOption.FILE,
        metavar="CLASSES",
        help="cluster the word vectors in this class file (.npz) again",
    )
    command.add_argument("--vocab", type=PathOption.FILE, help="vocabulary, one word per line (with --text)")
    command.add_argument(
        "--num-classes", required=True, type=int, help="number of classes, such as a twelfth of V"
    )
    command.add_argument("--output", required=True, type=PathOption.NEW_FILE, help="output file (.npz)")
    for name, description in _SKIP_GRAM.items():
        command.add_argument(f"--{name}", type=int, help=description)
    command.add_argument("--seed", type=int, default=0, help="(default: 0)")
    command.add_argument("--figure", type=PathOption.NEW_FILE, help="plot the class sizes to this PNG file")
    command.add_argument("--force", action="store_true", help="overwrite existing files")


def _classes(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.words.classes import make_classes, regroup

    given = {
        name: getattr(known, name) for name in ("vocab", *_SKIP_GRAM) if getattr(known, name) is not None
    }
    if known.vectors_of is not None:
        if given:
            raise UserError(
                f"--{next(iter(given))} has no effect with --vectors-of, which provides the word vectors; "
                "remove it"
            )
        return regroup(
            known.vectors_of, known.num_classes, known.output, known.seed, known.figure, known.force
        )
    if known.vocab is None:
        raise UserError("--text needs --vocab")
    vocabulary = given.pop("vocab")
    return make_classes(
        known.text,
        vocabulary,
        known.num_classes,
        known.output,
        seed=known.seed,
        figure=known.figure,
        force=known.force,
        **given,
    )


SUMMARY = "correlation.json"


def _add_correlation(commands: argparse._SubParsersAction[Parser]) -> None:
    command = add(
        commands, "correlation", "plot the correlation between the dimensions of each layer", _correlation
    )
    command.add_argument("--model", required=True, type=PathOption.SOURCE, help="a trained model of any host")
    command.add_argument(
        "--output", required=True, type=PathOption.FOLDER, help=f"folder for the PNG files and {SUMMARY}"
    )
    command.add_argument("--force", action="store_true", help="overwrite existing files")


def _correlation(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.analysis.correlation import draw_map, layer_correlations
    from shared_embeddings.compress.host import find_host
    from shared_embeddings.utils.files import staged, write_text

    _check_free([known.output / SUMMARY], known.force)
    embeddings = find_host(known.model)[1].read(known.model).embeddings()
    layers = [layer for embedding in embeddings for layer in layer_correlations(embedding)]
    drawn = [found for layer in layers for found in (layer, *layer.by_group())]
    outputs = [known.output / name for name in (SUMMARY, *(found.file_name() for found in drawn))]
    _check_free(outputs, known.force)
    summaries = [{**found.summary(), "picture": found.file_name()} for found in drawn]
    record = {"model": str(known.model), "layers": summaries}
    with staged(outputs) as places:
        write_text(places[0], json.dumps(record, indent=1) + "\n")
        for found, place in zip(drawn, places[1:]):
            draw_map(found, place)
    return f"{_as_table(summaries)}\nwrote {len(summaries)} pictures and {SUMMARY} to {known.output}"


def _check_free(outputs: Sequence[Path], force: bool) -> None:
    """Raise UserError unless files can be written and do not exist, or may be overwritten with `force`."""
    check_paths({f"--output ({path.name})": (PathOption.NEW_FILE, path) for path in outputs}, force)


def _as_table(summaries: list[dict[str, Any]]) -> str:
    """The statistics of all layers as a table."""
    width = max(len(f"{row['embedding']}: {row['layer']}") for row in summaries)
    titles = ("words", "width", "constant", "mean |r|", "between groups")
    lines = [" " * width + "".join(f"{title:>16}" for title in titles)]
    for row in summaries:
        numbers = [f"{row[name]:>16,}" for name in ("words", "width", "constant")]
        numbers += [_as_number(row[name]) for name in ("mean_correlation", "between_groups")]
        lines.append(f"{row['embedding']}: {row['layer']}".ljust(width) + "".join(numbers))
    return "\n".join(lines)


def _as_number(value: float | None) -> str:
    """A correlation or a cosine in a cell of the table, or a dash."""
    return f"{'–' if value is None else f'{value:.4f}':>16}"
