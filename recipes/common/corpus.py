"""Reading, writing and checking parallel text files."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import replacing

BYTE_ORDER_MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"


def read_lines(path: Path) -> list[str]:
    """Return the lines of `stream_lines` as a list.

    Raises:
        UserError: the file is missing, truncated, not gzip, or not UTF-8.
    """
    return list(stream_lines(path))


def stream_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 text, gzipped if its name ends in ``.gz``.

    Lines end at line feeds only. Unicode whitespace is collapsed, and a byte order mark is removed.

    Raises:
        UserError: the file is missing, truncated, not gzip, or not UTF-8.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield from decode_lines(file, str(path))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: truncated or not gzip ({error}); replace it") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


def decode_lines(file: Iterable[bytes], name: str) -> Iterator[str]:
    """Yield the lines of an open file, see `stream_lines`.

    Args:
        file: lines of bytes with line ends.
        name: name of the file, for messages.

    Raises:
        UserError: the file is not UTF-8.
    """
    start = 0
    for raw in file:
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{name}: not UTF-8 at byte {start + error.start}; convert it") from error
        yield " ".join((line if start else line.removeprefix(BYTE_ORDER_MARK)).split())
        start += len(raw)


def check_pairs(sides: dict[str, list[str]]) -> None:
    """Check that sides have equal lengths and are not empty.

    Args:
        sides: lines of each side by name.
    """
    counts = {name: len(lines) for name, lines in sides.items()}
    if len(set(counts.values())) != 1:
        listed = ", ".join(f"{name} has {count} lines" for name, count in counts.items())
        raise UserError(f"the sides differ in length: {listed}")
    if not all(counts.values()):
        raise UserError(f"no sentences in {' and '.join(counts)}")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines atomically."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(line + "\n" for line in lines)


def with_progress(lines: Iterable[str], what: str) -> Iterator[str]:
    """Yield lines with a progress bar."""
    return iter(tqdm(lines, desc=what, unit=" lines", unit_scale=True, mininterval=0.5))
