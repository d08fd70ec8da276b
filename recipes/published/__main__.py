"""Write the configurations of all published translation rows."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.common.errors import UserError, run_main
from recipes.published.generate import config_files
from shared_embeddings.utils.files import write_text


def main(arguments: Sequence[str]) -> None:
    """Write every file that tables.yaml describes, and remove rows that it no longer holds."""
    if arguments:
        raise UserError(f"{arguments[0]}: there are no options")
    files = config_files()
    for path, text in files.items():
        write_text(path, text)
    for folder in {path.parent for path in files}:
        for path in set(folder.glob("*.yaml")) - set(files):
            path.unlink()
    print(f"{len(files)} files")


if __name__ == "__main__":
    raise SystemExit(run_main("published", main))
