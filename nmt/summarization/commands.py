"""What the commands of this package have in common: one line for a mistake, and text line by line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from nmt.data import clean_line
from nmt.errors import UserError
from shared_embeddings.command_line import USER_ERROR, complaint


@contextmanager
def reporting_mistakes(command: str) -> Iterator[None]:
    """Turn a mistake of the user into one line on stderr and exit code 2; ``NMT_TRACEBACK=1`` shows where."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        sys.exit(130)
    except (UserError, OSError) as error:
        if os.environ.get("NMT_TRACEBACK"):
            raise
        print(f"{command}: {complaint(error)}", file=sys.stderr)
        sys.exit(USER_ERROR)


def clean_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text with each run of white space as one space; a bar shows how far it is.

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
