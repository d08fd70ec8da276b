"""Files generated from the registered methods: ``shared_embeddings/__init__.pyi`` and the table in README.md.

``make stubs`` runs this module. The stubs give editors and type checkers the options of every method.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import shared_embeddings as se
from shared_embeddings.cli.catalog import methods_table
from shared_embeddings.registry import method_class
from shared_embeddings.utils.files import write_text

FILE = Path(se.__file__).with_suffix(".pyi")
README = FILE.parents[1] / "README.md"
_BEGIN, _END = "<!-- BEGIN methods -->\n", "\n<!-- END methods -->"
_HEAD = """\
# Written by `make stubs`; do not edit.
# ruff: noqa
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from torch import Tensor
"""
_WIDTH = 105


def stub() -> str:
    """The content of the file."""
    lines = [_HEAD]
    for node in ast.parse(Path(se.__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names if alias.name not in ("build", "fit")]
            lines.append(f"from {node.module} import {', '.join(f'{name} as {name}' for name in names)}")
    for method in se.methods():
        found = method_class(method)
        options = se.options(method).__name__
        lines.append(f"from {found.__module__} import {found.__name__}")
        lines.append(f"from {se.options(method).__module__} import {options} as {options}")
    return "\n".join([*lines, "", "__version__: str", "", *_overloads(se.build), *_overloads(se.fit)])


def readme() -> str:
    """README.md with the current table of methods."""
    before, rest = README.read_text(encoding="utf-8").split(_BEGIN)
    return f"{before}{_BEGIN}{methods_table()}{_END}{rest.split(_END)[1]}"


def _overloads(function: Callable[..., Any]) -> list[str]:
    """The signatures of `build` or `fit`: one for each method, and one for a method that is not a literal."""
    lines = []
    for method in se.methods():
        found = method_class(method).__name__
        lines += _signature(function, f'Literal["{method}"]', found, _options(method))
    return [*lines, *_signature(function, "str", "SharedEmbedding", ["**options: object"]), ""]


def _signature(function: Callable[..., Any], method: str, embedding: str, options: list[str]) -> list[str]:
    """One signature in lines of limited width."""
    signature = inspect.signature(function)
    parameters = [f"method: {method}"]
    for name, parameter in list(signature.parameters.items())[1:-1]:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        default = "" if parameter.default is parameter.empty else " = ..."
        parameters.append(f"{name}: {parameter.annotation}{default}")
    returned = str(signature.return_annotation).replace("SharedEmbedding", embedding)
    options = [option for option in options if option.partition(":")[0] not in signature.parameters]
    lines = [""]
    for text in [*parameters, *options]:
        if len(f"{lines[-1]} {text},") > _WIDTH:
            lines.append("")
        lines[-1] += f" {text},"
    body = [f"   {line}" for line in lines]
    return ["@overload", f"def {function.__name__}(", *body, f") -> {returned}: ..."]


def _options(method: str) -> list[str]:
    """The options of a method as keyword parameters."""
    options = se.options(method)
    hints = typing.get_type_hints(options)
    return [
        f"{field.name}: {_annotation(hints[field.name])}{'' if _is_required(field) else ' = ...'}"
        for field in dataclasses.fields(options)
    ]


def _is_required(field: dataclasses.Field[Any]) -> bool:
    """Whether an option has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _annotation(hint: Any) -> str:
    """A type as source; lists are accepted where the options have tuples."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_annotation, arguments))
    if origin is tuple:
        return f"Sequence[{_annotation(arguments[0])}]"
    if origin in (Mapping, dict):
        return "Mapping[str, Any]"
    return "None" if hint is types.NoneType else str(hint.__name__)


if __name__ == "__main__":
    write_text(FILE, stub())
    write_text(README, readme())
