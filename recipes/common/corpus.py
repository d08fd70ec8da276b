"""Parallel text files: reading, writing, and refusing what does not fit together."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from recipes.common.errors import UserError
from shared_embeddings.files import replacing

BYTE_ORDER_MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 text, gzipped when its name ends in ``.gz``.

    Lines end at line feeds only; a carriage return before it and a byte order mark at the start are dropped,
    and each run of Unicode white space becomes one space.

    Raises:
        UserError: absent, truncated, not gzip, or not UTF-8.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            text = file.read().decode("utf-8")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: truncated or not gzip ({error}); replace it") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; convert it") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    lines = text.removeprefix(BYTE_ORDER_MARK).split("\n")
    if not lines[-1]:
        lines.pop()
    return [" ".join(line.split()) for line in lines]


def check_pairs(sides: dict[str, list[str]]) -> None:
    """Refuse sides of unequal length, and empty ones.

    Args:
        sides: the lines of each side, by the name to report.
    """
    counts = {name: len(lines) for name, lines in sides.items()}
    if len(set(counts.values())) != 1:
        told = ", ".join(f"{name} has {count} lines" for name, count in counts.items())
        raise UserError(f"the sides differ in length: {told}")
    if not all(counts.values()):
        raise UserError(f"no sentences in {' and '.join(counts)}")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write one line each, completely or not at all."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(line + "\n" for line in lines)


def with_progress(lines: list[str], what: str) -> Iterator[str]:
    """The same lines, under a progress bar."""
    return iter(tqdm(lines, desc=what, unit=" lines", unit_scale=True, mininterval=0.5))
