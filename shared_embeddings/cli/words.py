"""The commands `classes`, `correlation`, `cosines` and `similarity`: words and their vectors."""

from __future__ import annotations

import argparse
import dataclasses
import json

from shared_embeddings.cli.arguments import add, add_flags, add_model
from shared_embeddings.utils.command_line import Parser, align
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.path_options import PathOption, check_new_files

SUMMARY = "correlation.json"
# Options for training word vectors.
_SKIP_GRAM = {
    "dim": "width of the word vectors (with --text; default: 100)",
    "window": "words of context each side (with --text; default: 5)",
    "epochs": "passes over the text (with --text; default: 5)",
}


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the commands."""
    title = "cluster the words of a vocabulary into semantic classes"
    command = add(commands, "classes", title, _classes)
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
    add_flags(command, "force")

    title = "plot the correlation between the dimensions of each layer"
    command = add(commands, "correlation", title, _correlation)
    add_model(command)
    command.add_argument(
        "--output", required=True, type=PathOption.FOLDER, help=f"folder for the PNG files and {SUMMARY}"
    )
    add_flags(command, "force")

    command = add(commands, "cosines", "print the cosines of words in each layer of an embedding", _cosines)
    add_model(command)
    command.add_argument("--words", required=True, nargs="+", metavar="WORD", help="two or more words")
    add_flags(command, "json")

    command = add(commands, "similarity", "evaluate word vectors on word similarity", _similarity)
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--vectors", type=PathOption.FILE, help="vectors of GloVe, word2vec or fastText, text or binary"
    )
    add_model(source, required=False)
    command.add_argument(
        "--pairs",
        required=True,
        nargs="+",
        type=PathOption.FILE,
        help="word similarity data: files with two words and a score per line",
    )
    command.add_argument("--limit", type=int, help="read only this many words of --vectors")
    add_flags(command, "json")


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


def _correlation(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.analysis.correlation import draw_map, layer_correlations
    from shared_embeddings.compress.host import find_host
    from shared_embeddings.utils.files import staged, write_text

    check_new_files([known.output / SUMMARY], known.force)
    embeddings = find_host(known.model)[1].read(known.model).embeddings()
    layers = [layer for embedding in embeddings for layer in layer_correlations(embedding)]
    drawn = [found for layer in layers for found in (layer, *layer.by_group())]
    outputs = [known.output / name for name in (SUMMARY, *(found.file_name() for found in drawn))]
    check_new_files(outputs, known.force)
    summaries = [{**found.summary(), "picture": found.file_name()} for found in drawn]
    record = {"model": str(known.model), "layers": summaries}
    with staged(outputs) as places:
        write_text(places[0], json.dumps(record, indent=1) + "\n")
        for found, place in zip(drawn, places[1:]):
            draw_map(found, place)
    rows = [["", "words", "width", "constant", "mean |r|", "between groups"]]
    for row in summaries:
        numbers = [f"{row[name]:,}" for name in ("words", "width", "constant")]
        numbers += [_as_number(row[name]) for name in ("mean_correlation", "between_groups")]
        rows.append([f"{row['embedding']}: {row['layer']}", *numbers])
    written = f"wrote {len(summaries)} pictures and {SUMMARY} to {known.output}"
    return "\n".join([*align(rows), written])


def _cosines(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.analysis.similarity import layer_cosines
    from shared_embeddings.compress.host import find_host

    embeddings = find_host(known.model)[1].read(known.model).embeddings()
    found = {one.name: layer_cosines(one, known.words) for one in embeddings}
    if known.json:
        rows = {name: [pair._asdict() for pair in pairs] for name, pairs in found.items()}
        return json.dumps({"embeddings": rows}, indent=1, ensure_ascii=False)
    lines: list[str] = []
    for name, pairs in found.items():
        layers = list(dict.fromkeys(layer for pair in pairs for layer in pair.cosines))
        cells = [[_as_number(pair.cosines.get(layer)) for layer in layers] for pair in pairs]
        words = [f"{pair.first}, {pair.second}" for pair in pairs]
        lines += [name, *align([["", *layers], *([pair, *numbers] for pair, numbers in zip(words, cells))])]
    return "\n".join(lines)


def _as_number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _similarity(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.analysis.similarity import read_pairs, word_similarity
    from shared_embeddings.compress.host import find_host
    from shared_embeddings.words.vectors import WordVectors, read_vectors

    if known.limit is not None and known.vectors is None:
        raise UserError("--limit has no effect without --vectors; remove it")
    tests = [read_pairs(path) for path in known.pairs]
    if known.vectors is not None:
        tables = {known.vectors.name: read_vectors(known.vectors, known.limit)}
    else:
        embeddings = find_host(known.model)[1].read(known.model).embeddings()
        tables = {one.name: WordVectors(list(one.words), one.table().numpy()) for one in embeddings}
    found = {
        name: [word_similarity(table.words, table.vectors, test) for test in tests]
        for name, table in tables.items()
    }
    if not any(result.known for results in found.values() for result in results):
        raise UserError(
            f"pairs {', '.join(map(str, known.pairs))}: no pair has vectors for both words in "
            f"{known.vectors or known.model}; use pairs of the same language, or other vectors"
        )
    rows, lines = {}, []
    for name, results in found.items():
        words, dim = tables[name].vectors.shape
        sets = [{**dataclasses.asdict(result), "coverage": result.coverage} for result in results]
        rows[name] = {"words": words, "dimensions": dim, "sets": sets}
        cells = [["", "Spearman's rho", "known pairs"]]
        for result in results:
            rho = "undefined" if result.rho is None else f"{result.rho:.4f}"
            note = f", {result.lower_cased} in lower case" if result.lower_cased else ""
            share = f"{result.known} of {result.pairs} ({result.coverage:.0%}){note}"
            cells.append([f"  {result.name}", rho, share])
        lines += [f"{name}: {words:,} words in {dim:,} dimensions", *align(cells)]
    return json.dumps({"tables": rows}, indent=1) if known.json else "\n".join(lines)
