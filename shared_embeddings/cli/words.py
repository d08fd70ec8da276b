"""The commands ``classes`` and ``similarity``."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable

from shared_embeddings.compress.options import MODEL, SKIP_UNDECODABLE
from shared_embeddings.utils.command_line import align
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.paths import existing_file, model_path, new_path

# Options for training word vectors.
_SKIP_GRAM = {
    "dim": "width of the word vectors (with --text; default: 100)",
    "window": "words of context each side (with --text; default: 5)",
    "epochs": "passes over the text (with --text; default: 5)",
}


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands; for `add`, see `shared_embeddings.cli.main`."""
    title = "cluster the tokens of a vocabulary into semantic classes, for UnClE"
    example = "--text train.txt --vocab vocab.txt --num-classes 1000 --output classes.npz"
    command = add("classes", title, _classes, example)
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", nargs="+", type=existing_file, help="tokenized text files")
    source.add_argument(
        "--vectors-of",
        type=existing_file,
        metavar="CLASSES",
        help="cluster the word vectors in this class file (.npz) again",
    )
    command.add_argument("--vocab", type=existing_file, help="vocabulary, one token per line (with --text)")
    command.add_argument(
        "--num-classes", required=True, type=int, help="number of classes, such as a twelfth of V"
    )
    command.add_argument("--output", required=True, type=new_path, help="output file (.npz)")
    for name, description in _SKIP_GRAM.items():
        command.add_argument(f"--{name}", type=int, help=description)
    command.add_argument("--seed", type=int, default=0, help="(default: 0)")
    command.add_argument("--figure", type=new_path, help="plot the class sizes to this PNG file")
    command.add_argument("--force", action="store_true", help="overwrite existing files")

    title = "evaluate word vectors on word similarity"
    command = add("similarity", title, _similarity, "--model MODEL --pairs pairs.txt")
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--vectors", type=existing_file, help="vectors of GloVe, word2vec or fastText, text or binary"
    )
    source.add_argument("--model", type=model_path, help=MODEL)
    command.add_argument(
        "--pairs",
        required=True,
        nargs="+",
        type=existing_file,
        help="word similarity data: files with two words and a score per line",
    )
    command.add_argument("--limit", type=int, help="read only this many words of --vectors")
    command.add_argument("--skip-undecodable", action="store_true", help=SKIP_UNDECODABLE)
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _classes(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.words.classes import make_classes, regroup

    skip_gram = {name: vars(known)[name] for name in _SKIP_GRAM if vars(known)[name] is not None}
    if known.vectors_of is not None:
        for name in [*skip_gram, *(["vocab"] if known.vocab is not None else [])]:
            raise UserError(
                f"--{name} has no effect with --vectors-of, which provides the word vectors; remove it"
            )
        return regroup(
            known.vectors_of, known.num_classes, known.output, known.seed, known.figure, known.force
        )
    if known.vocab is None:
        raise UserError("--text needs --vocab")
    return make_classes(
        known.text,
        known.vocab,
        known.num_classes,
        known.output,
        seed=known.seed,
        figure=known.figure,
        force=known.force,
        **skip_gram,
    )


def _similarity(known: argparse.Namespace, _: list[str]) -> str:
    from shared_embeddings.analysis import read_pairs, word_similarity
    from shared_embeddings.compress.host import find_host
    from shared_embeddings.words.vectors import WordVectors, read_vectors

    skip = known.skip_undecodable
    if known.limit is not None and known.vectors is None:
        raise UserError("--limit has no effect without --vectors; remove it")
    tests = [read_pairs(path) for path in known.pairs]
    if known.vectors is not None:
        tables = {known.vectors.name: read_vectors(known.vectors, known.limit, skip)}
    else:
        embeddings = find_host(known.model, skip)[1].read(known.model).embeddings()
        tables = {part.name: WordVectors(list(part.words), part.table().numpy()) for part in embeddings}
    results = {
        name: [word_similarity(table.words, table.vectors, test) for test in tests]
        for name, table in tables.items()
    }
    if not any(result.known for of_table in results.values() for result in of_table):
        raise UserError(
            f"pairs {', '.join(map(str, known.pairs))}: no pair has vectors for both words in "
            f"{known.vectors or known.model}; use pairs of the same language, or other vectors"
        )
    rows, lines = {}, []
    for name, of_table in results.items():
        words, dim = tables[name].vectors.shape
        sets = [dataclasses.asdict(result) for result in of_table]
        rows[name] = {"words": words, "dimensions": dim, "sets": sets}
        cells = [["", "Spearman's rho", "known pairs"]]
        for result in of_table:
            rho = "undefined" if result.rho is None else f"{result.rho:.4f}"
            note = f", {result.lower_cased} in lower case" if result.lower_cased else ""
            share = f"{result.known} of {result.pairs} ({result.coverage:.0%}){note}"
            cells.append([f"  {result.name}", rho, share])
        lines += [f"{name}: {words:,} words in {dim:,} dimensions", *align(cells)]
    return json.dumps({"tables": rows}, indent=1) if known.json else "\n".join(lines)
