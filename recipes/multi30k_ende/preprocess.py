"""Prepare Multi30k: subwords and a joint vocabulary; steps that are up to date are skipped."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from recipes.common.corpus import check_pairs, read_lines, with_progress, write_lines
from recipes.common.recipe import Recipe, preprocess_options
from recipes.common.smoke import (
    CLASSES,
    LINES,
    MERGES,
    TEST_LINES,
    generated_pairs,
)
from recipes.common.tools import print_result, run_step
from recipes.translation import subwords
from recipes.translation.subwords import Tokenizer
from shared_embeddings.classes import make_classes
from shared_embeddings.errors import UserError
from shared_embeddings.utils.download import download, verify
from shared_embeddings.utils.files import replacing, sha256, write_text
from shared_embeddings.utils.reading import read_yaml


@dataclass(frozen=True)
class Settings:
    """Content of ``data.yaml``, which explains each setting."""

    source: str
    target: str
    splits: dict[str, str]
    bpe_operations: int
    num_classes: int
    split_dashes: bool
    url: str
    sha256: dict[str, str | None]

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target language."""
        return self.source, self.target

    def raw_name(self, split: str, language: str) -> str:
        """Return the name of the raw file of one side of a split."""
        return f"{self.splits[split]}.{language}.gz"


def read_settings(path: Path) -> Settings:
    """Read ``data.yaml``.

    Raises:
        UserError: it is missing, not YAML, or has a missing, unknown or invalid setting.
    """
    content = read_yaml(path)
    wanted = {field.name for field in fields(Settings)}
    if not isinstance(content, dict) or set(content) != wanted:
        given = set(content) if isinstance(content, dict) else set()
        raise UserError(
            f"{path}: missing settings {sorted(wanted - given)}, unknown settings {sorted(given - wanted)}"
        )
    operations = content["bpe_operations"]
    if type(operations) is not int or operations < 1:
        raise UserError(f"{path}: bpe_operations is {operations!r}; it must be an integer of at least 1")
    classes = content["num_classes"]
    if type(classes) is not int or classes < 1:
        raise UserError(f"{path}: num_classes is {classes!r}; it must be an integer of at least 1")
    if set(content["splits"]) != {"train", "valid", "test"}:
        raise UserError(f"{path}: splits must be train, valid and test, not {sorted(content['splits'])}")
    return Settings(**content)


def locate_raw(settings: Settings, data_dir: Path | None, download_dir: Path) -> dict[str, Path]:
    """Find each raw file in `data_dir` or download it to `download_dir`; return verified paths by name."""
    paths = {}
    for split in settings.splits:
        for language in settings.languages:
            name = settings.raw_name(split, language)
            checksum = settings.sha256.get(name)
            path = data_dir / name if data_dir and (data_dir / name).is_file() else download_dir / name
            if path.is_file():
                verify(path, checksum)
            else:
                advice = f"when offline, put {name} into $DATA_DIR/multi30k and run again"
                download(f"{settings.url}/{name}", path, checksum, advice)
            paths[name] = path
    return paths


def tokenize_split(settings: Settings, split: str, raw: dict[str, Path], folder: Path) -> None:
    """Write both sides of a split, tokenized, and the raw reference of the test set."""
    names = [settings.raw_name(split, language) for language in settings.languages]
    sides = {name: read_lines(raw[name]) for name in names}
    check_pairs(sides)
    for language, lines in zip(settings.languages, sides.values(), strict=True):
        tokenizer = Tokenizer(language, settings.split_dashes)
        tokens = (tokenizer.tokenize(line) for line in with_progress(lines, f"{split}.{language}"))
        write_lines(folder / "tokens" / f"{split}.{language}", tokens)
    if split == "test":
        write_lines(folder / "test.reference", sides[names[1]])


def file_names(settings: Settings) -> list[str]:
    """Return the names of the prepared files, both sides of all splits."""
    return [f"{split}.{language}" for split in settings.splits for language in settings.languages]


def prepare(settings: Settings, raw: dict[str, Path], folder: Path) -> None:
    """Run all steps from the raw files to ``data.json``."""
    stamps = folder / "steps"
    for split in settings.splits:
        files = [raw[settings.raw_name(split, language)] for language in settings.languages]
        outputs = [folder / "tokens" / f"{split}.{language}" for language in settings.languages]
        run_step(
            f"tokenize-{split}",
            stamps,
            partial(tokenize_split, settings, split, raw, folder),
            inputs=files,
            outputs=[*outputs, folder / "test.reference"] if split == "test" else outputs,
            settings={"languages": settings.languages, "split_dashes": settings.split_dashes},
        )
    training = [folder / "tokens" / f"train.{language}" for language in settings.languages]
    codes = folder / "bpe.codes"
    run_step(
        "learn-bpe",
        stamps,
        lambda: subwords.learn_bpe(training, codes, settings.bpe_operations),
        inputs=training,
        outputs=[codes],
        settings={"operations": settings.bpe_operations, "min_frequency": subwords.MIN_PAIR_FREQUENCY},
    )
    tokens = [folder / "tokens" / name for name in file_names(settings)]
    pieces = [folder / path.name for path in tokens]
    run_step(
        "apply-bpe",
        stamps,
        lambda: subwords.apply_bpe(codes, tokens, folder),
        inputs=[codes, *tokens],
        outputs=pieces,
        settings={},
    )
    vocabulary = folder / "vocabulary"
    run_step(
        "vocabulary",
        stamps,
        lambda: subwords.write_vocabulary([folder / path.name for path in training], vocabulary),
        inputs=[folder / path.name for path in training],
        outputs=[vocabulary],
        settings={},
    )
    texts, classes = [folder / path.name for path in training], folder / "classes.npz"
    run_step(
        "classes",
        stamps,
        partial(
            print_result, partial(make_classes, texts, vocabulary, settings.num_classes, classes, force=True)
        ),
        inputs=[*texts, vocabulary],
        outputs=[classes],
        settings={"num_classes": settings.num_classes},
    )
    write_text(folder / "data.json", json.dumps(describe(settings, folder), indent=2) + "\n")


def describe(settings: Settings, folder: Path) -> dict[str, Any]:
    """Describe the prepared data: sizes and checksums.

    ``checksum`` is the SHA-256 of the checksums of all files.
    """
    names = [*file_names(settings), "test.reference", "vocabulary"]
    checksums = {name: sha256(folder / name) for name in names}
    sizes = {name: len(read_lines(folder / name)) for name in names}
    listing = json.dumps(checksums, sort_keys=True).encode()
    return {
        "source": settings.source,
        "target": settings.target,
        "pairs": {split: sizes[f"{split}.{settings.source}"] for split in settings.splits},
        "vocabulary": sizes["vocabulary"],
        "bpe_operations": settings.bpe_operations,
        "checksum": hashlib.sha256(listing).hexdigest(),
        "files": checksums,
    }


def smoke_settings(settings: Settings) -> Settings:
    """Return settings for a small generated text without checksums."""
    return replace(settings, bpe_operations=MERGES, num_classes=CLASSES, sha256={})


def write_smoke_texts(settings: Settings, folder: Path) -> None:
    """Write generated pairs as raw files of all splits."""
    for seed, split in enumerate(settings.splits):
        pairs = list(generated_pairs(LINES if split == "train" else TEST_LINES, seed))
        for side, language in enumerate(settings.languages):
            text = "".join(f"{pair[side]}\n" for pair in pairs)
            with replacing(folder / settings.raw_name(split, language)) as temporary:
                temporary.write_bytes(gzip.compress(text.encode(), mtime=0))


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare Multi30k in $RUNS/multi30k_ende/data, from $DATA_DIR/multi30k or the network."""
    options = preprocess_options(recipe, main.__doc__, arguments)
    settings = read_settings(options.settings)
    data_dir = os.environ.get("DATA_DIR")
    own = Path(data_dir) / "multi30k" if data_dir else None
    if options.smoke:
        recipe, settings = recipe.smoke(), smoke_settings(settings)
        own = recipe.home / "raw"
        write_smoke_texts(settings, own)
    prepare(settings, locate_raw(settings, own, recipe.home / "raw"), recipe.data)
    print(f"prepared {recipe.data}")
