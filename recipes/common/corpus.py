"""Parallel text files: downloading with checksums, reading, and refusing what does not fit together."""

from __future__ import annotations

import gzip
import http.client
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from recipes.common.errors import UserError
from shared_embeddings.files import replacing, sha256

ATTEMPTS = 3
TIMEOUT_SECONDS = 30
BYTE_ORDER_MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"


def verify(path: Path, checksum: str | None) -> None:
    """Refuse a file whose SHA-256 is another one; without a `checksum`, any content will do.

    Raises:
        UserError: the content is damaged or another version.
    """
    if checksum and (found := sha256(path)) != checksum:
        raise UserError(f"{path}: SHA-256 is {found}, expected {checksum}; replace the file")


def download(url: str, path: Path, checksum: str | None, wait_seconds: float = 2.0) -> None:
    """Fetch `url` to `path`, with a progress bar, a few attempts, and nothing left behind when it fails.

    Args:
        url: the address.
        path: appears only when it is complete and its checksum is right.
        checksum: SHA-256 in hexadecimal.
        wait_seconds: pause before the second attempt; twice as long before each further one.

    Raises:
        UserError: no connection, or an answer that is not the file.
    """
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(wait_seconds * 2 ** (attempt - 1))
        try:
            with replacing(path) as temporary:
                _fetch(url, temporary)
                verify(temporary, checksum)
            return
        except urllib.error.HTTPError as error:
            reason = f"the server answers {error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error))
    raise UserError(
        f"{url}: cannot be downloaded ({reason}) after {ATTEMPTS} attempts; "
        f"when offline, put {path.name} into $DATA_DIR and run again"
    )


def _fetch(url: str, path: Path) -> None:
    """One attempt of `download`."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer, path.open("wb") as file:
        size = int(answer.headers.get("Content-Length") or 0)
        name = url.rsplit("/", 1)[-1]
        with tqdm(total=size or None, desc=name, unit="B", unit_scale=True) as progress:
            while block := answer.read(1 << 16):
                file.write(block)
                progress.update(len(block))
    if size and path.stat().st_size != size:
        raise OSError(f"the connection broke after {path.stat().st_size} of {size} bytes")


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
