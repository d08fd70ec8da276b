"""The files that OpenNMT's own commands read and write, by the options that name them, and their checks.

Options of a parser of ours say so themselves (`shared_embeddings.utils.path_options`).
"""

from __future__ import annotations

import contextlib
import io
import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from nmt.checkpoint.parts import safetensors_of
from nmt.model.plan import parse_text
from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import check_input, replacing_all
from shared_embeddings.utils.path_options import Given, PathOption, check_paths

Table = Mapping[str, PathOption]

# What several commands read.
READ: Table = dict.fromkeys(
    (
        "src_subword_model",
        "tgt_subword_model",
        "src_subword_vocab",
        "tgt_subword_vocab",
        "termbase_path",
        "tm_path",
        "tags_dictionary_path",
    ),
    PathOption.FILE,
)
TRANSLATE: Table = {
    **READ,
    "models": PathOption.FILE,
    "src": PathOption.FILE,
    "tgt": PathOption.FILE,
    "desired_lengths": PathOption.FILE,
    "phrase_table": PathOption.FILE,
    "output": PathOption.OUTPUT,
    "log_file": PathOption.OUTPUT,
}
TRAIN: Table = {
    **READ,
    "train_from": PathOption.FILE,
    "src_embeddings": PathOption.FILE,
    "tgt_embeddings": PathOption.FILE,
    "both_embeddings": PathOption.FILE,
    "pre_word_vecs_enc": PathOption.FILE,
    "pre_word_vecs_dec": PathOption.FILE,
    "log_file": PathOption.OUTPUT,
}
CORPUS_FILES = ("path_src", "path_tgt", "path_txt", "path_align")


def check_files(opt: Namespace, table: Table) -> None:
    """Check the files that the options of a command name.

    Args:
        opt: the options.
        table: what the command does with those that name files.

    Raises:
        UserError: see `shared_embeddings.utils.path_options.check_paths`.
    """
    named = {name: (kind, getattr(opt, name, None)) for name, kind in table.items()}
    models = [file for kind, given in named.values() if kind.is_read for file in _weights_beside(given)]
    check_paths({**named, "weights": (PathOption.FILE, models), **_corpora(opt)})


def check_new_model(
    models: Sequence[str], output: str | os.PathLike[str], kind: PathOption, force: bool
) -> None:
    """Check that a model which is made of others replaces none of them.

    Args:
        models: checkpoints, with the weights beside them.
        output: what is written.
        kind: whether that is a file.
        force: replace what is there.

    Raises:
        UserError: it would, or there is something already.
    """
    files = [*models, *_weights_beside(models)]
    check_paths({"models": (PathOption.FILE, files), "output": (kind, output)}, force)


def _weights_beside(given: Given) -> list[str]:
    """Return the safetensors beside those of some paths that are checkpoints."""
    paths = [given] if isinstance(given, (str, os.PathLike)) else given or ()
    found: list[str] = []
    for given_path in paths:
        path = os.fspath(given_path)
        if path.endswith(".pt") and "\0" not in path:
            with contextlib.suppress(UserError):
                found += safetensors_of(path)
    return found


def _corpora(opt: Namespace) -> dict[str, tuple[PathOption, Given]]:
    """Return the files of the option ``data``, by where they stand in it."""
    corpora = parse_text("data", getattr(opt, "data", None) or "{}", "{corpus: {path_src: train.en}}")
    if not isinstance(corpora, dict):
        return {}
    return {
        f"data: {name}: {side}": (PathOption.FILE, corpus[side])
        for name, corpus in corpora.items()
        if isinstance(corpus, dict)
        for side in CORPUS_FILES
        if isinstance(corpus.get(side), str)
    }


def guard(parser: Any, table: Table) -> None:
    """Let a parser of OpenNMT, which opens files itself, read configurations from regular files only, and
    write that of ``-save_config`` over no input, completely or not at all.

    Args:
        parser: gets other functions for that.
        table: of its command.
    """
    parser._config_file_open_func = _open_config
    parser.write_config_file = partial(_save_config, parser, parser.write_config_file, table)


def _open_config(path: str, mode: str = "r") -> IO[str]:
    """Open a configuration.

    Raises:
        UserError: it is to be read and is no regular file.
    """
    if mode == "r":
        check_input("config", path)
    return open(path, mode, encoding="utf-8")


def _save_config(
    parser: Any,
    original: Callable[..., None],
    table: Table,
    opt: Namespace,
    paths: Iterable[str],
    exit_after: bool = False,
) -> None:
    """Write the options into files.

    Raises:
        UserError: a file is one that the command reads.
        OSError: a file cannot be written.
    """
    names = list(paths)
    if not names:
        return
    inputs = {name: kind for name, kind in table.items() if kind.is_read}
    check_files(
        Namespace(**{**vars(opt), "save_config": names}),
        {**inputs, "config": PathOption.FILE, "save_config": PathOption.OUTPUT},
    )
    with replacing_all([Path(name) for name in names]) as temporaries:
        with contextlib.redirect_stdout(io.StringIO()):  # it would name the temporary files
            original(opt, list(map(str, temporaries)))
    print(f"wrote the options to {', '.join(names)}")
    if exit_after:
        parser.exit(0)
