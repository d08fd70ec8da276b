"""The quickstart's data: sentences, words, a joint vocabulary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from recipes.common.corpus import write_lines
from recipes.common.tools import run_step, write_yaml
from recipes.quickstart.corpus import make_corpus, write_corpus
from recipes.quickstart.jobs import Job, run_jobs
from recipes.quickstart.languages import Tokenizer
from shared_embeddings.utils.files import sha256

RECIPE = Path(__file__).parent
# What decides about the text, beside the settings.
SOURCES = ("corpus.py", "languages.py", "templates.yaml")
PACKAGES = ("babel", "num2words", "sacremoses")


@dataclass(frozen=True)
class CorpusSettings:
    """What the corpus is made from: CLDR names of the languages, seed, and sentence pairs per part."""

    source: str
    target: str
    seed: int
    sizes: dict[str, int]


@dataclass(frozen=True)
class Data:
    """The prepared files, in one folder.

    ``text/PART.LANGUAGE`` holds sentences, ``PART.LANGUAGE`` their words, ``vocabulary`` the words of both.
    """

    folder: Path
    settings: CorpusSettings

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target language."""
        return self.settings.source, self.settings.target

    @property
    def vocabulary(self) -> Path:
        """The joint vocabulary."""
        return self.folder / "vocabulary"

    def text(self, part: str, language: str) -> Path:
        """The sentences of one side of a part."""
        return self.folder / "text" / f"{part}.{language}"

    def words(self, part: str, language: str) -> Path:
        """The tokenized sentences of one side of a part."""
        return self.folder / f"{part}.{language}"

    def files(self) -> list[Path]:
        """All files that the results depend on."""
        sides = [(part, language) for part in self.settings.sizes for language in self.languages]
        return [
            *(self.text(*side) for side in sides),
            *(self.words(*side) for side in sides),
            self.vocabulary,
        ]

    def checksum(self) -> str:
        """SHA-256 over the checksums of all files."""
        listing = {str(path.relative_to(self.folder)): sha256(path) for path in self.files()}
        return hashlib.sha256(json.dumps(listing, sort_keys=True).encode()).hexdigest()

    def training_options(self) -> dict[str, Any]:
        """Options of ``onmt_train`` that say where data and vocabulary are."""
        corpora = {
            part: {
                f"path_{side}": str(self.words(part, language))
                for side, language in zip(("src", "tgt"), self.languages)
            }
            for part in ("train", "valid")
        }
        return {"data": corpora, "src_vocab": str(self.vocabulary), "tgt_vocab": str(self.vocabulary)}


def prepare(
    settings: CorpusSettings,
    folder: Path,
    command: str,
    environment: dict[str, str],
    keep_open: Sequence[int],
) -> Data:
    """Make the data in `folder`, as far as they are not there already.

    Args:
        settings: what to make.
        folder: gets the files.
        command: path of ``onmt_build_vocab``.
        environment: environment variables of the command.
        keep_open: file descriptors that the command inherits.

    Raises:
        UserError: a language that is not covered, sizes that are impossible, or a failure of the command.
    """
    data = Data(folder, settings)
    *texts, vocabulary = data.files()
    versions = {package: metadata.version(package) for package in PACKAGES}
    run_step(
        "corpus",
        folder / "steps",
        lambda: _write_text(data),
        inputs=[RECIPE / name for name in SOURCES],
        outputs=texts,
        settings={**asdict(settings), "versions": versions},
    )
    run_step(
        "vocabulary",
        folder / "steps",
        lambda: _build_vocabulary(data, command, environment, keep_open),
        inputs=[data.words("train", language) for language in data.languages],
        outputs=[vocabulary],
        settings={},
    )
    return data


def _write_text(data: Data) -> None:
    """Write sentences and their words."""
    settings = data.settings
    parts = make_corpus(settings.source, settings.target, settings.sizes, settings.seed)
    write_corpus(parts, data.folder / "text", settings.source, settings.target)
    for side, language in enumerate(data.languages):
        tokenizer = Tokenizer(language)
        for part, pairs in parts.items():
            write_lines(data.words(part, language), (" ".join(tokenizer.split(pair[side])) for pair in pairs))


def _build_vocabulary(
    data: Data, command: str, environment: dict[str, str], keep_open: Sequence[int]
) -> None:
    """Count the words of both sides of the training part with ``onmt_build_vocab``."""
    config = data.folder / "vocabulary.yaml"
    options = data.training_options()
    options["data"].pop("valid")
    save_data = str(data.folder / "samples")
    write_yaml(config, {**options, "share_vocab": True, "n_sample": -1, "save_data": save_data})
    job = Job("vocabulary", [command, "-config", str(config), "-overwrite"], data.folder / "vocabulary.log")
    run_jobs([job], 1, environment, keep_open)
