"""Options of a method: how they are declared, and how their names, types and sizes are checked."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union

from shared_embeddings.utils.errors import UserError

T = TypeVar("T")

# Larger counts and deeper networks are mistakes.
LARGEST_COUNT = 2**31 - 1
MOST_LAYERS = 1000

# The value of an option that otherwise names a file: the content of the file is in the state_dict.
STORED = "stored"


class OptionError(UserError):
    """An embedding option is unknown, has the wrong type, is impossible, or would have no effect."""


def option(
    description: str,
    default: Any = dataclasses.MISSING,
    *,
    factory: Any = dataclasses.MISSING,
    repr: bool = True,
) -> Any:
    """A field of an options dataclass, with the description that ``shared-embeddings methods`` prints.

    Args:
        description: what the option does, in one or two sentences.
        default: the value when the option is omitted; an option without a default is required.
        factory: makes the default of an option whose values are mutable.
        repr: whether the value is part of the options' ``repr``.
    """
    return dataclasses.field(  # type: ignore[call-overload]
        default=default, default_factory=factory, repr=repr, metadata={"description": description}
    )


def parse_options(method: str, options_class: type[T], given: Mapping[str, object]) -> T:
    """Build the frozen options of `method` from plain values, as Python, YAML or a command line provide them.

    Args:
        method: the method's name, for messages.
        options_class: the method's options dataclass; its annotations define the type of each option.
        given: option name -> value.

    Raises:
        OptionError: an option is unknown, missing or of the wrong type, or the class itself rejects it.
    """
    fields = {field.name: field for field in dataclasses.fields(options_class)}  # type: ignore[arg-type]
    for name in given:
        if name not in fields:
            raise OptionError(_unknown_option(method, name, list(fields)))
    for field in fields.values():
        has_default = (
            field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        )
        if field.name not in given and not has_default:
            raise OptionError(f"{method}: option '{field.name}' is missing; give it a value")
    hints = typing.get_type_hints(options_class)
    values = {name: _convert(method, name, value, hints[name]) for name, value in given.items()}
    try:
        return options_class(**values)
    except OptionError as error:
        raise OptionError(f"{method}: {error}") from None


def plain_options(options: Any) -> dict[str, object]:
    """The options that differ from their defaults, as types that YAML and JSON support."""
    plain = dataclasses.asdict(options)
    return {
        field.name: list(plain[field.name]) if isinstance(plain[field.name], tuple) else plain[field.name]
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != _default_of(field)
    }


def _default_of(field: dataclasses.Field[Any]) -> object:
    """The value of an option that is omitted."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


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


def require_rank(rank: int, embedding_dim: int) -> None:
    """Raise `OptionError` unless 1 <= `rank` <= D: a higher rank would only add parameters."""
    require_at_least("rank", rank, 1)
    require(
        rank <= embedding_dim,
        f"option 'rank' is {rank}, more than the dimension {embedding_dim}; choose at most {embedding_dim}",
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


def _convert(method: str, name: str, value: object, hint: Any) -> object:
    """`value` as the type `hint`, or an `OptionError` that names the expected type."""
    try:
        return _matched(value, hint)
    except TypeError:
        raise OptionError(
            f"{method}: option '{name}' is {value!r}, but it must be {describe_type(hint)}; change the value"
        ) from None


def _matched(value: object, hint: Any) -> object:
    """`value` as the type `hint`; TypeError if it does not match."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _matched_union(value, arguments)
    if origin is Literal:
        # `True == 1`, so equality alone would accept a bool as a number.
        if any(value == allowed and type(value) is type(allowed) for allowed in arguments):
            return value
        raise TypeError
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise TypeError
        return tuple(_matched(item, arguments[0]) for item in value)
    return _matched_plain(value, origin or hint)


def _matched_union(value: object, alternatives: tuple[Any, ...]) -> object:
    """`value` as the first of the `alternatives` that it matches; TypeError if it matches none."""
    for alternative in alternatives:
        try:
            return _matched(value, alternative)
        except TypeError:
            continue
    raise TypeError


def _matched_plain(value: object, wanted: type) -> object:
    """`value` as one of the plain types that options may have; TypeError otherwise."""
    if wanted is types.NoneType and value is None:
        return None
    # NumPy numbers are converted to plain ones, which checkpoints and JSON can hold.
    if wanted is float and isinstance(value, Real) and not isinstance(value, bool):
        return _finite(value)
    if wanted is int and isinstance(value, Integral) and not isinstance(value, bool):
        return _countable(value)
    if wanted in (bool, str) and isinstance(value, wanted):
        return value
    if wanted in (Mapping, dict) and isinstance(value, Mapping):
        return dict(value)
    raise TypeError


def _countable(value: Integral) -> int:
    """`value` as an int; TypeError if it has more than 64 bits."""
    if not -(2**63) <= int(value) < 2**64:
        raise TypeError
    return int(value)


def _finite(value: Real) -> float:
    """`value` as a float; TypeError if it is infinite, NaN or too large."""
    try:
        number = float(value)
    except OverflowError:
        raise TypeError from None
    if not math.isfinite(number):
        raise TypeError
    return number


def _unknown_option(method: str, name: str, valid: list[str]) -> str:
    """The message for an option that `method` does not have."""
    listed = ", ".join(valid) if valid else "none"
    return f"{method}: unknown option '{name}'.{did_you_mean(name, valid)} Valid options: {listed}"


def did_you_mean(name: object, valid: Sequence[str]) -> str:
    """The suggestion of the closest of the `valid` names, to append to a message; empty if none is close."""
    close = difflib.get_close_matches(str(name), valid, n=1)
    return f" Did you mean '{close[0]}'?" if close else ""
