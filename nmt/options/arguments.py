"""Parsing the command line and the configuration file of OpenNMT-py's commands, and checking file options."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import re
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import configargparse

from nmt.checkpoint.files import safetensors_of
from nmt.model.plan import parse_text
from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import check_repeats, finite_number, whole_number
from shared_embeddings.utils.files import check_input, followed, staged
from shared_embeddings.utils.path_options import Given, PathOption, check_paths
from shared_embeddings.utils.reading import parse_yaml

# The options of a command that name files, and how it uses them.
Table = Mapping[str, PathOption]
NO_FILES: Table = {}
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse(parser: Any, table: Table = NO_FILES, known_elsewhere: Collection[str] = ()) -> Namespace:
    """Parse the command line and the configuration file; unknown options fail by name.

    An output that is a symbolic link becomes the target of the link, which is replaced.

    The command line takes precedence over the file. Repeated options fail.

    Args:
        parser: a parser of OpenNMT-py or of this project.
        table: the options of OpenNMT-py that name files.
        known_elsewhere: options of other commands, which a shared configuration file may contain.

    Raises:
        UserError: an option is unknown, a value is invalid, or a file cannot be used.
    """

    def fail(message: str) -> None:
        raise UserError(message)

    parser.error = fail
    if isinstance(parser, configargparse.ArgumentParser):
        parser._config_file_parser = ConfigurationReader()
        secure_config_files(parser, table)
        check_repeats(parser)
    for action in parser._actions:
        action.type = STRICTER.get(action.type, action.type)
    try:
        opt, rest = parser.parse_known_args()
    except argparse.ArgumentTypeError as error:
        raise UserError(str(error)) from error
    _check_rest(parser, rest, known_elsewhere)
    check_files(opt, table)
    for name, kind in table.items():
        if kind is PathOption.OUTPUT and getattr(opt, name, None):
            setattr(opt, name, str(followed(Path(getattr(opt, name)))))
    return opt  # type: ignore[no-any-return]


def _check_rest(parser: Any, rest: list[str], known_elsewhere: Collection[str]) -> None:
    """Check the arguments that the parser did not use."""
    known = {string.lstrip("-") for action in parser._actions for string in action.option_strings}
    unknown = [
        text.lstrip("-").split("=")[0] for text in rest if text.startswith("-") and not _is_number(text)
    ]
    for name in unknown:
        if name not in known_elsewhere:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]}?" if close else "; see --help"
            raise UserError(f"unknown option {name}{hint}")
    if rest and not unknown:
        raise UserError(f"unexpected argument {rest[0]!r}; see --help")


class ConfigurationReader(configargparse.YAMLConfigFileParser):  # type: ignore[misc]
    """Reads YAML configuration files with limits on their size; repeated keys fail."""

    def parse(self, stream: IO[str]) -> dict[str, Any]:
        """Return the options of a file: lists unchanged, mappings as JSON, other values as text.

        Raises:
            UserError: it is not a YAML mapping of option names to plain values.
        """
        name = f"config {stream.name}"
        try:
            content = parse_yaml(stream.read().removeprefix("\ufeff"), name)
        except UnicodeDecodeError:
            raise UserError(f"{name}: is not UTF-8 text; convert it") from None
        if not isinstance(content, dict):
            raise UserError(f"{name}: is not a mapping; write one 'option: value' per line")
        names = [key.lstrip("-") for key in content]
        for key in names:
            if not re.fullmatch(r"\w[\w-]*", key):
                raise UserError(f"{name}: {key!r} is not an option; see --help")
            if names.count(key) > 1:
                raise UserError(f"{name}: the option {key} is given twice; give it once")
        return {key: _as_argument(value) for key, value in content.items() if value is not None}


def _as_argument(value: Any) -> Any:
    """Convert a value of a file to a command-line argument."""
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, list) else str(value)


def _boolean(text: str) -> bool:
    """Parse a boolean; `bool` would accept any text as true."""
    if text.lower() not in BOOLEANS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return BOOLEANS[text.lower()]


# Stricter types of OpenNMT-py's options.
STRICTER = {bool: _boolean, int: whole_number, float: finite_number}


def _is_number(text: str) -> bool:
    """Return whether a piece of a command line is a negative number."""
    return re.fullmatch(r"-\d+(\.\d+)?", text) is not None


# Inputs of several commands.
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
        table: the options that name files, and how the command uses them.

    Raises:
        UserError: see `shared_embeddings.utils.path_options.check_paths`.
    """
    named = {name: (kind, getattr(opt, name, None)) for name, kind in table.items()}
    models = [file for kind, given in named.values() if kind.is_read for file in _weights_beside(given)]
    check_paths({**named, "weights": (PathOption.FILE, models), **_corpora(opt)})


def check_new_model(
    models: Sequence[str], output: str | os.PathLike[str], kind: PathOption, force: bool
) -> None:
    """Check that the output of a command is not one of its input models.

    Args:
        models: checkpoints; their safetensors are checked as well.
        output: the path to write.
        kind: file or folder.
        force: overwrite an existing output.

    Raises:
        UserError: it is an input, or it exists.
    """
    files = [*models, *_weights_beside(models)]
    check_paths({"models": (PathOption.FILE, files), "output": (kind, output)}, force)


def _weights_beside(given: Given) -> list[str]:
    """Return the safetensors files of those paths that are checkpoints."""
    paths = [given] if isinstance(given, (str, os.PathLike)) else given or ()
    found: list[str] = []
    for given_path in paths:
        path = os.fspath(given_path)
        if path.endswith(".pt") and "\0" not in path:
            with contextlib.suppress(UserError):
                found += safetensors_of(path)
    return found


def _corpora(opt: Namespace) -> dict[str, tuple[PathOption, Given]]:
    """Return the files of the option ``data`` by their place in it."""
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


def secure_config_files(parser: Any, table: Table) -> None:
    """Make a parser of OpenNMT-py read only regular files, and write ``-save_config`` atomically.

    Args:
        parser: is modified.
        table: the options that name files.
    """
    parser._config_file_open_func = _open_config
    parser.write_config_file = partial(_save_config, parser, parser.write_config_file, table)


def _open_config(path: str, mode: str = "r") -> IO[str]:
    """Open a configuration file."""
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
    """Write the options into files."""
    names = list(paths)
    if not names:
        return
    inputs = {name: kind for name, kind in table.items() if kind.is_read}
    check_files(
        Namespace(**{**vars(opt), "save_config": names}),
        {**inputs, "config": PathOption.FILE, "save_config": PathOption.OUTPUT},
    )
    with staged([followed(Path(name)) for name in names]) as places:
        with contextlib.redirect_stdout(io.StringIO()):  # OpenNMT-py prints the temporary names
            original(opt, list(map(str, places)))
    print(f"wrote the options to {', '.join(names)}")
    if exit_after:
        parser.exit(0)
