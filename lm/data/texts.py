"""Reads texts of any size as words, in bounded memory."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from pathlib import Path

from lm.data.vocabulary import EOS
from shared_embeddings.errors import UserError

BLOCK_BYTES = 1 << 18


def word_blocks(
    path: Path, lower: bool = False, progress: Callable[[int], object] | None = None
) -> Iterator[list[str]]:
    """Yield blocks of the words of a UTF-8 text, with ``<eos>`` after each line.

    Unicode whitespace separates words, and line feeds end lines. Byte order marks are dropped. Lines may be
    longer than memory, words may not.

    Args:
        path: the text.
        lower: whether to lowercase the text.
        progress: called with the number of bytes of each block.

    Raises:
        UserError: the text cannot be read or is not UTF-8.
    """
    rest, line_ended = "", True
    for text in _decoded_blocks(path, progress):
        rest += text
        line_ended = text.endswith("\n")
        end = max(rest.rfind(" "), rest.rfind("\n")) + 1
        yield _words(rest[:end], lower)
        rest = rest[end:]
    if not line_ended:
        yield _words(rest + "\n", lower)


def _words(text: str, lower: bool) -> list[str]:
    """Split a text into words, with ``<eos>`` for each line feed."""
    return (text.lower() if lower else text).replace("\n", f" {EOS} ").split()


def _decoded_blocks(path: Path, progress: Callable[[int], object] | None) -> Iterator[str]:
    """Yield non-empty blocks of the characters of a file."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    consumed = 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                consumed += len(block)
                if text := decoder.decode(block):
                    yield text
                if progress:
                    progress(len(block))
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        place = consumed - len(error.object) + error.start
        raise UserError(f"{path}: not UTF-8 at byte {place}; convert it") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; check the path") from error
