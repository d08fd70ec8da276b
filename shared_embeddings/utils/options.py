"""Options: how dataclasses declare them, and how their names, types and sizes are checked.

Options of methods, hosts, recipes and commands are read here, so that they have the same messages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union

from shared_embeddings.utils.errors import UserError

T = TypeVar("T")

# Larger counts and deeper networks are mistakes.
LARGEST_COUNT = 2**31 - 1
MOST_LAYERS = 1000

# The value of an option that otherwise names a file: the content of the file is in the state_dict.
STORED = "stored"


# More names than this are left to --help; longer values are cut in messages.
_MOST_LISTED, _LONGEST = 30, 80


class OptionError(UserError):
    """An option is unknown, has the wrong type, is impossible, or would have no effect."""


def option(
    description: str | Callable[[], str],
    default: Any = dataclasses.MISSING,
    *,
    factory: Any = dataclasses.MISSING,
    repr: bool = True,
) -> Any:
    """A field of an options dataclass, with the description that ``shared-embeddings methods`` prints.

    Args:
        description: what the option does, in one or two sentences, or a function that describes it.
        default: the value when the option is omitted; an option without a default is required.
        factory: makes the default of an option whose values are mutable.
        repr: whether the value is part of the options' ``repr``.
    """
    return dataclasses.field(  # type: ignore[call-overload]
        default=default, default_factory=factory, repr=repr, metadata={"description": description}
    )


def parse_options(where: str, options_class: type[T], given: object) -> T:
    """Build a dataclass of options from plain values, as Python, YAML, JSON or a command line provide them.

    Annotations define the type of each option, which may be another dataclass.

    Args:
        where: what the options are of, such as a method or a file; the prefix of messages.

    Raises:
        OptionError: `given` is not a mapping; an option is unknown, missing or of the wrong type; or the
            class itself rejects it.
    """
    if not isinstance(given, Mapping):
        raise OptionError(f"{where}: {quote(given)} is not a mapping; write option: value")
    fields = {field.name: field for field in dataclasses.fields(options_class)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(options_class)
    try:
        for name in given:
            check_known("option", name, fields)
        values = {}
        for name, field in fields.items():
            if name in given:
                try:
                    values[name] = _matched(name, given[name], hints[name])
                except TypeError:
                    raise OptionError(
                        f"option '{name}' is {quote(given[name])}, but it must be "
                        f"{describe_type(hints[name])}; change the value"
                    ) from None
            else:
                required = field.default is field.default_factory is dataclasses.MISSING
                require(not required, f"option '{name}' is missing; give it a value")
        return options_class(**values)
    except UserError as error:
        raise OptionError(f"{where}: {error}") from None


def check_known(kind: str, name: object, valid: Iterable[str]) -> None:
    """Raise `OptionError`, which names the closest of the `valid` names, unless `name` is one of them.

    The kind is what is named, such as "option"; configurations may hold names of other types.
    """
    names = list(valid)
    if name not in names:
        close = difflib.get_close_matches(str(name)[:_LONGEST], names, 1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        listed = ", ".join(names) if len(names) <= _MOST_LISTED else "see --help"
        raise OptionError(f"unknown {kind} {quote(name)}.{hint} Valid {kind}s: {listed or 'none'}")


def parse_words(words: Iterable[str], parse_value: Callable[[str, str], object]) -> dict[str, object]:
    """Options from ``--name value``, ``-name value`` and ``--name=value``; dashes in names are underscores.

    Args:
        parse_value: returns the value of a text; its second argument is ``--name``, for messages.

    Raises:
        OptionError: a word is not an option, or an option has no value or is repeated.
    """
    given: dict[str, object] = {}
    rest = iter(words)
    for word in rest:
        if not re.match(r"--?[a-zA-Z]", word):
            raise OptionError(f"unexpected argument {quote(word)}; write --option value, see --help")
        option, separator, text = word.partition("=")
        value = text if separator else next(rest, None)
        if value is None:
            raise OptionError(f"option '{option}' has no value; write {option} value")
        name = option.lstrip("-").replace("-", "_")
        if name in given:
            raise OptionError(f"option '{option}' is repeated; remove one")
        given[name] = parse_value(value, option)
    return given


def quote(value: object) -> str:
    """The ``repr`` of a value for a message, cut to a length that can be read."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def plain_options(options: Any) -> dict[str, object]:
    """The options that differ from their defaults, as types that YAML and JSON support."""
    plain = dataclasses.asdict(options)
    return {
        field.name: list(plain[field.name]) if isinstance(plain[field.name], tuple) else plain[field.name]
        for field in dataclasses.fields(options)
        if getattr(options, field.name)
        != (field.default if field.default_factory is dataclasses.MISSING else field.default_factory())
    }


def require(condition: bool, message: str) -> None:
    """Raise `OptionError` with `message` unless `condition` holds."""
    if not condition:
        raise OptionError(message)


def require_at_least(name: str, value: float | None, minimum: float) -> None:
    """Raise `OptionError` unless option `name` is None or between `minimum` and `LARGEST_COUNT`."""
    require(
        value is None or value >= minimum,
        f"option '{name}' is {value}, but it must be at least {minimum}; raise it",
    )
    require(
        not isinstance(value, int) or value <= LARGEST_COUNT,
        f"option '{name}' is {value}, but it must be at most {LARGEST_COUNT:,}; lower it",
    )


def require_effect(options: Any, names: Iterable[str], condition: str) -> None:
    """Raise `OptionError` if one of the named options differs from its default, but has no effect.

    Args:
        options: an options dataclass.
        condition: when they have none, such as "with output 'none'".
    """
    for name, value in plain_options(options).items():
        require(
            name not in names,
            f"option '{name}' is {quote(value)}, which has no effect {condition}; remove it",
        )


def require_layers(name: str, value: int) -> None:
    """Raise `OptionError` unless 1 <= `value` <= `MOST_LAYERS`."""
    require_at_least(name, value, 1)
    require(
        value <= MOST_LAYERS, f"option '{name}' is {value}, but it must be at most {MOST_LAYERS}; lower it"
    )


def require_seed(seed: int) -> None:
    """Raise `OptionError` unless option 'seed' is a valid seed for torch's random number generators."""
    require(
        0 <= seed < 2**64,
        f"option 'seed' is {seed}, but it must be at least 0 and below 2**64; choose another number",
    )


def require_probability(name: str, value: float) -> None:
    """Raise `OptionError` unless 0 <= `value` < 1."""
    require(
        0.0 <= value < 1.0,
        f"option '{name}' is {value}, but it is a probability: choose a value from 0 up to, not including, 1",
    )


def describe_type(hint: Any) -> str:
    """The values that an option with annotation `hint` accepts, in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(str(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(argument) for argument in arguments)
    if origin is tuple:
        return f"a list whose items are each {describe_type(arguments[0])}"
    if hint is types.NoneType:
        return "nothing (null)"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(hint, "a mapping of names to values")


def _matched(name: str, value: object, hint: Any) -> object:
    """The value of option `name` as the type `hint`; TypeError if it does not match."""
    wanted, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if wanted in (Union, types.UnionType):
        for alternative in arguments:
            with contextlib.suppress(TypeError):
                return _matched(name, value, alternative)
    # `True == 1`, so equality alone would accept a bool as a number.
    elif wanted is Literal and any(value == each and type(value) is type(each) for each in arguments):
        return value
    elif wanted is tuple and isinstance(value, (list, tuple)):
        return tuple(_matched(f"{name} {at}", item, arguments[0]) for at, item in enumerate(value, start=1))
    elif wanted in (Mapping, dict) and isinstance(value, Mapping):
        of_items = arguments[1] if arguments else Any
        return {key: _matched(f"{name} {key}", item, of_items) for key, item in value.items()}
    elif isinstance(wanted, type) and dataclasses.is_dataclass(wanted):
        return parse_options(name, wanted, value)
    # NumPy numbers are converted to plain ones, which checkpoints and JSON can hold.
    elif wanted is float and isinstance(value, Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            if math.isfinite(float(value)):
                return float(value)
    elif wanted is int and isinstance(value, Integral) and not isinstance(value, bool):
        if -(2**63) <= int(value) < 2**64:
            return int(value)
    elif wanted is Any or (wanted in (bool, str, types.NoneType) and isinstance(value, wanted)):
        return value
    raise TypeError
