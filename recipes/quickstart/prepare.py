"""The quickstart's data: sentences, words, and a joint vocabulary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from recipes.common.tools import run_step, write_lines, write_yaml
from recipes.quickstart.corpus import make_corpus, write_corpus
from recipes.quickstart.jobs import Job, run_jobs
from recipes.quickstart.languages import Tokenizer
from shared_embeddings.utils.files import sha256

RECIPE = Path(__file__).parent
# Files that determine the text, in addition to the settings.
SOURCES = ("corpus.py", "languages.py", "templates.yaml")
PACKAGES = ("babel", "num2words", "sacremoses")


@dataclass(frozen=True)
class CorpusSettings:
    """Settings of the corpus: CLDR names of the languages, seed, and sentence pairs per split."""

    source: str
    target: str
    seed: int
    sizes: dict[str, int]


@dataclass(frozen=True)
class Data:
    """The prepared files in a folder.

    ``text/SPLIT.LANGUAGE`` has sentences, ``SPLIT.LANGUAGE`` tokenized ones, ``vocabulary`` the joint
    vocabulary.
    """

    folder: Path
    settings: CorpusSettings

    @property
    def languages(self) -> tuple[str, str]:
        """The source and target language."""
        return self.settings.source, self.settings.target

    @property
    def vocabulary(self) -> Path:
        """The file of the joint vocabulary."""
        return self.folder / "vocabulary"

    def text(self, part: str, language: str) -> Path:
        """Return the file with the sentences of one side of a split."""
        return self.folder / "text" / f"{part}.{language}"

    def words(self, part: str, language: str) -> Path:
        """Return the file with the tokenized sentences of one side of a split."""
        return self.folder / f"{part}.{language}"

    def files(self) -> list[Path]:
        """Return all files that results depend on."""
        sides = [(part, language) for part in self.settings.sizes for language in self.languages]
        return [
            *(self.text(*side) for side in sides),
            *(self.words(*side) for side in sides),
            self.vocabulary,
        ]

    def checksum(self) -> str:
        """Return the SHA-256 of the checksums of all files."""
        listing = {str(path.relative_to(self.folder)): sha256(path) for path in self.files()}
        return hashlib.sha256(json.dumps(listing, sort_keys=True).encode()).hexdigest()

    def training_options(self) -> dict[str, Any]:
        """Return the options of ``onmt_train`` for data and vocabulary."""
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
    """Create the data in `folder` unless they are up to date.

    Args:
        settings: settings of the corpus.
        folder: output folder.
        command: path of ``onmt_build_vocab``.
        environment: environment variables of the command.
        keep_open: file descriptors to inherit.

    Raises:
        UserError: a language is not supported, a size is invalid, or the command failed.
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
    """Write raw and tokenized sentences."""
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
    """Build the joint vocabulary of the training data with ``onmt_build_vocab``."""
    config = data.folder / "vocabulary.yaml"
    options = data.training_options()
    options["data"].pop("valid")
    save_data = str(data.folder / "samples")
    write_yaml(config, {**options, "share_vocab": True, "n_sample": -1, "save_data": save_data})
    job = Job("vocabulary", [command, "-config", str(config), "-overwrite"], data.folder / "vocabulary.log")
    run_jobs([job], 1, environment, keep_open)
