"""Where a recipe that trains with ``onmt_train`` keeps its rows, its data and its runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recipes.common.config import Row, read_row, row_names
from recipes.common.errors import UserError
from recipes.common.results import REPOSITORY
from recipes.common.training import Data, read_json


class Recipe(NamedTuple):
    """A recipe by the name of its folder."""

    name: str

    @property
    def folder(self) -> Path:
        """Folder of its scripts and settings."""
        return REPOSITORY / "recipes" / self.name

    @property
    def home(self) -> Path:
        """Folder of everything that it writes: ``$RUNS/NAME``."""
        return Path(os.environ.get("RUNS") or REPOSITORY / "runs").absolute() / self.name

    @property
    def data(self) -> Path:
        """Folder of the prepared data."""
        return self.home / "data"

    def command(self, script: str, *arguments: str) -> str:
        """The command line of one of its scripts, for a message that tells somebody to run it."""
        return " ".join([f"recipes/{self.name}/{script}", *arguments])

    def parse(self, usage: str, arguments: Sequence[str]) -> tuple[Row, list[str]]:
        """Take the command line ``CONFIG [option ...]`` apart.

        ``--help`` prints `usage` and the configs and exits with 0. Without a CONFIG, that is status 2.

        Raises:
            UserError: no such CONFIG, or it is not as `recipes.common.config` says.
        """
        configs = self.folder / "configs"
        wants_help = any(argument in ("-h", "--help") for argument in arguments[:1])
        if wants_help or not arguments:
            text = f"{usage}\n\nCONFIG is one of: {', '.join(row_names(configs))}"
            print(text, file=sys.stdout if wants_help else sys.stderr)
            raise SystemExit(0 if wants_help else 2)
        return read_row(configs, arguments[0]), list(arguments[1:])

    def describe_data(self) -> dict[str, Any]:
        """The content of ``data.json``, which ends the preparation.

        Raises:
            UserError: the data are not prepared.
        """
        description = read_json(self.data / "data.json")
        if description is None:
            raise UserError(f"{self.data}: no prepared data; run {self.command('preprocess.sh')}")
        return dict(description)

    def training_data(self) -> Data:
        """The prepared data as options of ``onmt_train``.

        Raises:
            UserError: the data are not prepared.
        """
        description = self.describe_data()
        source, target = description["source"], description["target"]
        corpora = {
            part: {
                "path_src": str(self.data / f"{part}.{source}"),
                "path_tgt": str(self.data / f"{part}.{target}"),
            }
            for part in ("train", "valid")
        }
        vocabulary = str(self.data / "vocabulary")
        options = {"data": corpora, "src_vocab": vocabulary, "tgt_vocab": vocabulary}
        return Data(options, description["checksum"])
