"""Reading the command line and the configuration file of OpenNMT's commands; nothing is taken silently."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from argparse import Namespace
from collections.abc import Collection
from typing import IO, Any

import configargparse

from nmt.options.paths import Table, check_files, guard
from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import check_repeats, whole_number
from shared_embeddings.utils.reading import parse_yaml

NO_FILES: Table = {}
WORDS_FOR_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse(parser: Any, table: Table = NO_FILES, known_elsewhere: Collection[str] = ()) -> Namespace:
    """Parse the command line and the configuration file; unknown options fail by name.

    An option of the command line goes before that of the file; given twice in one of them, it fails.

    Args:
        parser: of OpenNMT, or one of ours.
        table: which of its options name files, where the parser does not say so.
        known_elsewhere: options of other commands, which one configuration file for all of them may hold.

    Raises:
        UserError: names the unknown options, and the known one that looks most alike; or what is wrong with
            the value of another, or with a file.
    """

    def fail(message: str) -> None:
        raise UserError(message)

    parser.error = fail
    if isinstance(parser, configargparse.ArgumentParser):
        parser._config_file_parser = ConfigurationReader()
        guard(parser, table)
        check_repeats(parser)
    for action in parser._actions:
        action.type = STRICTER.get(action.type, action.type)
    try:
        opt, rest = parser.parse_known_args()
    except argparse.ArgumentTypeError as error:
        raise UserError(str(error)) from error
    _check_rest(parser, rest, known_elsewhere)
    check_files(opt, table)
    return opt  # type: ignore[no-any-return]


def _check_rest(parser: Any, rest: list[str], known_elsewhere: Collection[str]) -> None:
    """Check what is left over of the arguments.

    Raises:
        UserError: names the first that the commands do not know.
    """
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
    """Reads configuration files of plain values: as upstream's, but bounded, and no key counts twice."""

    def parse(self, stream: IO[str]) -> dict[str, Any]:
        """Return the options of a file: lists as they are, mappings as JSON, all else as text.

        Raises:
            UserError: it is no YAML mapping of names to plain values.
        """
        name = f"config {stream.name}"
        try:
            content = parse_yaml(stream.read().removeprefix("\ufeff"), name)
        except UnicodeDecodeError:
            raise UserError(f"{name}: is not UTF-8 text; convert it") from None
        if not isinstance(content, dict):
            raise UserError(f"{name}: holds no mapping; write one 'option: value' per line")
        names = [key.lstrip("-") for key in content]
        for key in names:
            if not re.fullmatch(r"\w[\w-]*", key):
                raise UserError(f"{name}: {key!r} is no option; see --help")
            if names.count(key) > 1:
                raise UserError(f"{name}: the option {key} is given twice; give it once")
        return {key: _as_argument(value) for key, value in content.items() if value is not None}


def _as_argument(value: Any) -> Any:
    """Return a value of a file as the command line would have it."""
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, list) else str(value)


def _truth(text: str) -> bool:
    """Return what a word for true or false stands for; `bool` takes every word for true.

    Raises:
        argparse.ArgumentTypeError: it is no such word.
    """
    if text.lower() not in WORDS_FOR_TRUTH:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return WORDS_FOR_TRUTH[text.lower()]


# Types of options that are stricter than those that upstream gives them.
STRICTER = {bool: _truth, int: whole_number}


def _is_number(text: str) -> bool:
    """Return whether a piece of a command line is a negative number."""
    return re.fullmatch(r"-\d+(\.\d+)?", text) is not None
