"""Prepare Multi30k: subwords and a joint vocabulary; steps that are up to date are skipped."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipes.common import tools
from recipes.common.recipe import Recipe, preprocess_options
from recipes.common.smoke import CLASSES, LINES, MERGES, TEST_LINES, generated_pairs
from recipes.common.tools import check_pairs, locate, read_lines, run_step, write_json, write_lines
from recipes.translation import subwords
from recipes.translation.subwords import Tokenizer
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import replacing, sha256
from shared_embeddings.words.classes import make_classes


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
    sha256: dict[str, Any]

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
    settings = tools.read_settings(path, Settings)
    if set(settings.splits) != {"train", "valid", "test"}:
        raise UserError(f"{path}: splits must be train, valid and test, not {sorted(settings.splits)}")
    return settings


def locate_raw(settings: Settings, downloads: Path) -> dict[str, Path]:
    """Find each raw file in $DATA_DIR/multi30k or download it; return verified paths by name."""
    names = [settings.raw_name(split, side) for split in settings.splits for side in settings.languages]
    return {
        name: locate(name, "multi30k", settings.url, downloads, settings.sha256.get(name)) for name in names
    }


def prepare(settings: Settings, raw: dict[str, Path], folder: Path) -> None:
    """Run all steps from the raw files to ``data.json``."""
    step, languages = partial(run_step, stamps=folder / "steps"), settings.languages

    def tokenize(split: str) -> None:
        names = [settings.raw_name(split, language) for language in languages]
        sides = {name: read_lines(raw[name]) for name in names}
        check_pairs(sides)
        for language, lines in zip(languages, sides.values(), strict=True):
            tokenizer = Tokenizer(language, settings.split_dashes)
            shown = tqdm(lines, f"{split}.{language}", unit=" lines", unit_scale=True, mininterval=0.5)
            write_lines(folder / "tokens" / f"{split}.{language}", map(tokenizer.tokenize, shown))
        if split == "test":
            write_lines(folder / "test.reference", sides[names[1]])

    for split in settings.splits:
        outputs = [folder / "tokens" / f"{split}.{language}" for language in languages]
        step(
            f"tokenize-{split}",
            action=partial(tokenize, split),
            inputs=[raw[settings.raw_name(split, language)] for language in languages],
            outputs=[*outputs, folder / "test.reference"] if split == "test" else outputs,
            settings={"languages": languages, "split_dashes": settings.split_dashes},
        )
    names = [f"{split}.{language}" for split in settings.splits for language in languages]
    tokens, codes = [folder / "tokens" / name for name in names], folder / "bpe.codes"
    subwords.run_bpe_steps(step, tokens[:2], tokens, codes, settings.bpe_operations)
    texts, vocabulary, classes = tokens[:2], folder / "vocabulary", folder / "classes.npz"
    texts = [folder / path.name for path in texts]
    write = partial(subwords.write_vocabulary, texts, vocabulary)
    step("vocabulary", action=write, inputs=texts, outputs=[vocabulary], settings={})
    step(
        "classes",
        action=partial(make_classes, texts, vocabulary, settings.num_classes, classes, force=True),
        inputs=[*texts, vocabulary],
        outputs=[classes],
        settings={"num_classes": settings.num_classes},
    )
    names += ["test.reference", "vocabulary"]
    checksums = {name: sha256(folder / name) for name in names}
    sizes = {name: len(read_lines(folder / name)) for name in names}
    description = {
        "source": settings.source,
        "target": settings.target,
        "pairs": {split: sizes[f"{split}.{settings.source}"] for split in settings.splits},
        "vocabulary": sizes["vocabulary"],
        "bpe_operations": settings.bpe_operations,
        # Of the checksums of all files.
        "checksum": hashlib.sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest(),
        "files": checksums,
    }
    write_json(folder / "data.json", description)


def write_smoke_texts(settings: Settings, folder: Path) -> dict[str, Path]:
    """Write generated pairs as raw files of all splits; return them by name."""
    paths = {}
    for seed, split in enumerate(settings.splits):
        pairs = list(generated_pairs(LINES if split == "train" else TEST_LINES, seed))
        for side, language in enumerate(settings.languages):
            text = "".join(f"{pair[side]}\n" for pair in pairs)
            name = settings.raw_name(split, language)
            paths[name] = folder / name
            with replacing(paths[name]) as temporary:
                temporary.write_bytes(gzip.compress(text.encode(), mtime=0))
    return paths


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare Multi30k in $RUNS/multi30k_ende/data, from $DATA_DIR/multi30k or the network."""
    options = preprocess_options(recipe, main.__doc__, arguments)
    settings = read_settings(options.settings)
    if options.smoke:
        recipe = recipe.smoke()
        settings = replace(settings, bpe_operations=MERGES, num_classes=CLASSES)
        raw = write_smoke_texts(settings, recipe.home / "raw")
    else:
        raw = locate_raw(settings, recipe.home / "raw")
    prepare(settings, raw, recipe.data)
    print(f"prepared {recipe.data}")
