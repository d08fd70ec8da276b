"""Reading texts of any size in bounded memory, as words."""

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
    """The words of a UTF-8 text in blocks, each line closed by ``<eos>``.

    White space (Unicode's) separates words, line feeds alone end lines; the last line needs none. A byte
    order mark is dropped. A line may be longer than memory, a word may not.

    Args:
        path: the text.
        lower: whether to put it into lower case.
        progress: told the number of bytes after each block.

    Raises:
        UserError: the text cannot be read, or is not UTF-8.
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
    """The words of some text, ``<eos>`` for every line feed."""
    return (text.lower() if lower else text).replace("\n", f" {EOS} ").split()


def _decoded_blocks(path: Path, progress: Callable[[int], object] | None) -> Iterator[str]:
    """The characters of the file, some at a time and never none."""
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
