"""What the commands of this package have in common: text line by line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from nmt.data.batches import clean_line
from shared_embeddings.errors import UserError


def clean_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text with each run of whitespace as one space; a bar shows how far it is.

    Raises:
        UserError: there is no such file, or a line is not UTF-8 (its number is named).
    """
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    with path.open("rb") as file, tqdm(desc=path.name, unit=" lines", mininterval=1, disable=None) as bar:
        for number, line in enumerate(file, 1):
            try:
                yield clean_line(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}: line {number} is not UTF-8 ({error.reason}); convert the file"
                ) from error
            bar.update()
