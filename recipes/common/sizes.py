"""What the rows of a recipe weigh, from the papers' formulas and before any training.

``python -m recipes.common.sizes recipes/RECIPE/configs --vocabulary N`` prints the sizes; with ``--write`` it
puts each into the comment at the head of the row's file: do so after changing a row or the size of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import shared_embeddings as se
from recipes.common.config import Row, read_row, row_names
from recipes.common.errors import UserError, run_main
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.files import write_text
from shared_embeddings.utils.path_options import PathOption

SIZE_COMMENT = "# Size: "
# Unknown, padding, start and end of a sentence.
SPECIAL_TOKENS = 4


def padded_vocabulary(entries: int, multiple: int) -> int:
    """Rows of the table for a vocabulary file of `entries` lines, as OpenNMT-py pads them to a `multiple`."""
    return -(-(entries + SPECIAL_TOKENS) // multiple) * multiple


def describe_size(row: Row, entries: int) -> str:
    """One line: embedding parameters of `row`, input and output together, and the compression.

    Raises:
        UserError: the method refuses its options.
    """
    vocabulary = padded_vocabulary(entries, row.train.get("vocab_size_multiple", 8))
    size = row.train["hidden_size"]
    options = {key: value for key, value in row.embedding.items() if key != "method"}
    try:
        method = row.embedding["method"]
        # Files do not exist before preprocess.sh has run.
        options |= {name: se.STORED for name in se.file_options(method) if name in options}
        count = se.expected_count(method, num_embeddings=vocabulary, embedding_dim=size, **options)
    except (se.OptionError, KeyError) as error:
        raise UserError(f"{row.name}: {error}") from error
    dense = vocabulary * size
    return f"{count:,} embedding parameters, {dense / count:.1f} times fewer than {vocabulary:,} x {size}"


def write_comment(path: Path, size: str) -> None:
    """Put `size` on the comment line that starts with "Size:", the last of those that head the file."""
    lines = [
        line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith(SIZE_COMMENT)
    ]
    end = next((index for index, line in enumerate(lines) if not line.startswith("#")), len(lines))
    write_text(path, "\n".join([*lines[:end], f"{SIZE_COMMENT}{size}.", *lines[end:]]) + "\n")


def main(arguments: Sequence[str]) -> None:
    """Tell the size of every row's embedding, from the papers' formulas."""
    parser = Parser("python -m recipes.common.sizes", description=main.__doc__)
    parser.add_argument("configs", type=PathOption.SOURCE, help="folder of the rows")
    parser.add_argument("--vocabulary", type=int, required=True, help="lines of the vocabulary file")
    parser.add_argument("--write", action="store_true", help="also write them into the files")
    options = parser.parse_args(arguments)
    for name in row_names(options.configs):
        size = describe_size(read_row(options.configs, name), options.vocabulary)
        print(f"{name}: {size}")
        if options.write:
            write_comment(options.configs / f"{name}.yaml", size)


if __name__ == "__main__":
    raise SystemExit(run_main("sizes", main))
