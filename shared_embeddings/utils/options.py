"""Options: dataclasses declare them, pydantic checks them, and argparse offers them.

A field is written once, with its type, default and description, as ``bits: float = option("Bits per
parameter.", 4.0)``. `parse_options` reads it from Python, YAML, JSON or a command line.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import json
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from typing import Any, Literal, TypeVar

from shared_embeddings.utils.errors import UserError

T = TypeVar("T")

# The value of an option that otherwise names a file: the content of the file is in the state_dict.
STORED = "stored"
_UNIONS = (typing.Union, types.UnionType)


class OptionError(UserError):
    """An option is unknown, has the wrong type, is impossible, or would have no effect."""


def option(
    description: str | Callable[[], str],
    default: Any = dataclasses.MISSING,
    *,
    factory: Any = dataclasses.MISSING,
    repr: bool = True,
    parse: Callable[[str], Any] | None = None,
    minimum: float | None = None,
    below: float = 2**31,
    flag: str | None = None,
    choices: Callable[[], Iterable[str]] | None = None,
) -> Any:
    """Declare a field of an options dataclass.

    Args:
        description: help text of one or two sentences, or a function that returns it.
        default: the value when the option is omitted; an option without a default is required.
        factory: makes the default of an option whose values are mutable.
        repr: whether the value is part of the options' ``repr``.
        parse: the argparse type for `add_options`, if it is not that of the annotation.
        minimum, below: `parse_options` accepts numbers from `minimum` up to, not including, `below`.
        flag: its name on the command line, where that is a keyword of Python.
        choices: a function that returns the values that the command line offers.
    """
    metadata: dict[str, Any] = {"description": description, "parse": parse, "flag": flag, "choices": choices}
    metadata |= {"minimum": minimum, "below": below}
    return dataclasses.field(default=default, default_factory=factory, repr=repr, metadata=metadata)


def add_options(
    parser: argparse._ActionsContainer, options_class: type[Any], only: Collection[str] | None = None
) -> None:
    """Add the fields of an options dataclass, or `only` these, to a command.

    The field ``map_dim`` becomes ``--map-dim``.

    A bool becomes the flags ``--name`` and ``--no-name``, a tuple takes several words, a Literal has choices.
    Omitted options are missing in the parsed arguments: their defaults are those of the class::

        add_options(parser, Settings)
        settings = parse_options("compress", Settings, vars(parser.parse_args()))
    """
    hints = typing.get_type_hints(options_class)
    for field in dataclasses.fields(options_class):
        if only is not None and field.name not in only:
            continue
        hint, metadata = hints[field.name], option_metadata(options_class, field.name)
        parse, text = metadata["parse"], metadata["description"]
        if typing.get_origin(hint) in _UNIONS:
            hint = [part for part in typing.get_args(hint) if part is not types.NoneType][-1]
        settings: dict[str, Any] = {"type": parse or hint}
        if hint is bool:
            settings = {"action": argparse.BooleanOptionalAction}
        elif typing.get_origin(hint) is Literal:
            settings = {"choices": typing.get_args(hint)}
        elif typing.get_origin(hint) is tuple:
            settings = {"type": parse or typing.get_args(hint)[0], "nargs": "+"}
        if metadata["choices"] is not None:
            settings["choices"] = list(metadata["choices"]())
        if metadata["flag"] is not None:
            settings["dest"] = field.name
        parser.add_argument(
            "--" + (metadata["flag"] or field.name).replace("_", "-"),
            required=field.default is field.default_factory is dataclasses.MISSING,
            default=argparse.SUPPRESS,
            help=(text() if callable(text) else text).replace("%", "%%"),
            **settings,
        )


def option_metadata(options_class: type[Any], name: str) -> Mapping[str, Any]:
    """Return the arguments of `option` for a field; subclasses may change its default alone."""
    fields = (getattr(base, "__dataclass_fields__", {}).get(name) for base in options_class.__mro__)
    return next((field.metadata for field in fields if field is not None and field.metadata), {})


@functools.cache
def _validator(options_class: Any) -> Any:
    from pydantic import TypeAdapter  # slow to import

    return TypeAdapter(options_class)


def parse_options(where: str, options_class: type[T], values: object) -> T:
    """Build a dataclass of options from plain values, as Python, YAML, JSON or a command line provide them.

    Types are strict: no bool or text is a number, and numbers are finite. Lists become tuples, NumPy numbers
    plain ones, and mappings the dataclasses that annotations name.

    Args:
        where: what the options are of, such as a method or a file; the prefix of messages.

    Raises:
        OptionError: `values` is not a mapping; an option is unknown, missing or of the wrong type; or the
            class itself rejects it.
    """
    from pydantic import ValidationError  # slow to import

    if not isinstance(values, Mapping):
        raise OptionError(f"{where}: {quote(values)} is not a mapping; write option: value")
    try:
        names = [field.name for field in dataclasses.fields(options_class)]  # type: ignore[arg-type]
        for name, value in values.items():
            check_known("option", name, names)
            metadata = option_metadata(options_class, name)
            for number in value if isinstance(value, (list, tuple)) else (value,):
                is_number = isinstance(number, Real) and not isinstance(number, bool)
                if is_number and metadata.get("minimum") is not None:
                    require_at_least(name, float(number), metadata["minimum"], metadata["below"])
        # In JSON, pydantic's strict mode takes lists for tuples and mappings for dataclasses.
        text = json.dumps(
            dict(values),
            default=lambda value: value.tolist() if hasattr(value, "tolist") else os.fspath(value),
            allow_nan=False,
        )
        return _validator(options_class).validate_json(text, strict=True, extra="forbid")  # type: ignore
    except ValidationError as error:
        problem = error.errors()[0]
        place, cause = ".".join(map(str, problem["loc"])), problem.get("ctx", {}).get("error")
        if isinstance(cause, UserError):  # of __post_init__
            raise OptionError(": ".join(filter(None, [where, place, str(cause)]))) from None
        first = str(problem["loc"][0])
        expected = describe_type(typing.get_type_hints(options_class)[first])
        if problem["type"] == "missing":
            message = f"option '{place}' is missing; give it a value"
        elif "mapping" in expected and place != first:
            message = f"option '{place}': {problem['msg']}; change it"
        else:
            message = f"option '{first}' is {quote(values[first])}, but it must be {expected}; change it"
        raise OptionError(f"{where}: {message}") from None
    except (UserError, TypeError) as error:
        raise OptionError(f"{where}: {error}") from None
    except ValueError:
        raise OptionError(f"{where}: {quote(values)} has a number that is not finite; change it") from None


def check_known(kind: str, name: object, valid: Iterable[str]) -> None:
    """Raise `OptionError`, which names the closest of the `valid` names, unless `name` is one of them.

    The kind is what is named, such as "option"; configurations may hold names of other types.
    """
    names = list(valid)
    if name not in names:
        close = difflib.get_close_matches(str(name), names, 1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise OptionError(f"unknown {kind} {quote(name)}.{hint} Valid {kind}s: {', '.join(names) or 'none'}")


def parse_words(words: Iterable[str]) -> dict[str, object]:
    """Parse options such as ``--name value`` or ``-name=value``, whose values are YAML, 100,200 or text."""
    from shared_embeddings.utils.reading import parse_yaml

    options: dict[str, object] = {}
    rest = iter(words)
    for word in rest:
        flag, separator, text = word.partition("=")
        value = text if separator else next(rest, None)
        if not flag.startswith("-") or value is None:
            raise OptionError(f"unexpected argument {quote(word)}; write --option value, see --help")
        try:
            parsed = parse_yaml(value, flag)
            if isinstance(parsed, str) and "," in value:
                parsed = parse_yaml(f"[{value}]", flag)
        except UserError:
            parsed = value
        options[flag.lstrip("-").replace("-", "_")] = parsed
    return options


def quote(value: object) -> str:
    """Return the ``repr`` of a value for a message, cut to a length that can be read."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def plain_options(options: Any) -> dict[str, object]:
    """Return the options that differ from their defaults, as types that YAML and JSON support."""
    plain = {}
    for field in dataclasses.fields(options):
        value, default = getattr(options, field.name), field.default
        if value != (default if field.default_factory is dataclasses.MISSING else field.default_factory()):
            plain[field.name] = list(value) if isinstance(value, tuple) else value
    return plain


def require(condition: bool, message: str) -> None:
    """Raise `OptionError` with `message` unless `condition` holds."""
    if not condition:
        raise OptionError(message)


def require_at_least(name: str, value: float | None, minimum: float, below: float = 2**31) -> None:
    """Raise `OptionError` unless option `name` is None or from `minimum` up to, not including, `below`."""
    require(
        value is None or minimum <= value < below,
        f"option '{name}' is {value}, but it must be at least {minimum} and below {below}; change it",
    )


def require_effect(options: Any, names: Iterable[str], condition: str) -> None:
    """Raise `OptionError` if one of the named options differs from its default, but has no effect.

    The condition says when, such as "with output 'none'".
    """
    for name, value in plain_options(options).items():
        message = f"option '{name}' is {quote(value)}, which has no effect {condition}; remove it"
        require(name not in names, message)


def describe_type(hint: Any) -> str:
    """Describe the values that an annotation accepts, such as ``int | list[int] | null``."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return " | ".join(map(repr, arguments))
    if typing.get_origin(hint) in _UNIONS:
        return " | ".join(map(describe_type, arguments))
    if typing.get_origin(hint) is tuple:
        return f"list[{describe_type(arguments[0])}]"
    return {types.NoneType: "null", int: "int", float: "float", bool: "bool", str: "str"}.get(hint, "mapping")
