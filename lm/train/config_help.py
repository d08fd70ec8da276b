"""Help text of ``lm_train --help``, generated from the option classes."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from typing import Any

import yaml

from lm.train.config import all_groups, plain


def help_text() -> str:
    """All keys by group with their defaults and descriptions."""
    lines = [
        "usage: lm_train -config FILE [-key value ...]",
        "",
        "Trains a language model, or resumes the run in 'output_dir'. FILE is YAML with one key per line;",
        "values on the command line are YAML, too, and override those of FILE.",
    ]
    for title, options in all_groups().items():
        meanings = _meanings(options)
        lines += ["", f"{title}:"]
        for field in dataclasses.fields(options):
            entry = f"  {field.name} ({_default(field)}): {meanings.get(field.name, '')}".rstrip(": ")
            lines += textwrap.wrap(entry, 100, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _default(field: dataclasses.Field[Any]) -> str:
    """The default of a key in YAML."""
    if field.default is dataclasses.MISSING:
        return "required"
    return yaml.safe_dump(plain(field.default), default_flow_style=True).removesuffix("...\n").strip()


def _meanings(options: type) -> dict[str, str]:
    """The description of each key, from the Attributes sections of the class and its bases."""
    meanings: dict[str, str] = {}
    for owner in options.__mro__:
        section = (owner.__doc__ or "").partition("Attributes:")[2]
        entries = re.findall(r"^ {8}(\w+): (.*(?:\n {9,}.*)*)", section, re.MULTILINE)
        meanings |= {name: " ".join(text.split()) for name, text in entries}
    return meanings
