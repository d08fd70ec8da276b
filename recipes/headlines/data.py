"""Headline data: subwords of the source, characters of the target, and a joint vocabulary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nmt.summarization.characters import (
    convert_file,
    count_characters,
    count_tokens,
    split_text,
    vocabulary_text,
)
from recipes.common.corpus import check_pairs, read_lines, write_lines
from recipes.common.tools import run_step
from recipes.translation import subwords
from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import sha256, write_text
from shared_embeddings.utils.reading import read_yaml

SOURCE, TARGET = "source", "target"
SPLITS = ("train", "valid", "test")


def read_settings(path: Path, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Read ``data.yaml``, including ``lengths``, the desired lengths of headlines in characters.

    Args:
        path: the file.
        kinds: types of the settings; integers must be positive.

    Raises:
        UserError: it is missing, not YAML, or has a missing, unknown or invalid setting.
    """
    content = read_yaml(path)
    if not isinstance(content, dict) or content.keys() != kinds.keys():
        raise UserError(f"{path}: it must contain {', '.join(kinds)}, and nothing else")
    for name, kind in kinds.items():
        if type(content[name]) is not kind or (kind is int and content[name] < 1):
            above = " above 0" if kind is int else ""
            raise UserError(f"{path}: {name} is {content[name]!r}; it must be of type {kind.__name__}{above}")
    lengths = content["lengths"]
    if not lengths or any(type(each) is not int or each < 1 for each in lengths):
        raise UserError(f"{path}: lengths is {lengths}; it must be a list of numbers of characters above 0")
    return content


def write_split(folder: Path, split: str, sources: list[str], targets: list[str]) -> None:
    """Write the text of one split.

    Args:
        folder: folder of the prepared data; files are written to its folder ``text``.
        split: one of `SPLITS`.
        sources: texts as space-separated tokens.
        targets: headlines.

    Raises:
        UserError: the sides are empty or differ in length.
    """
    check_pairs({f"{split}.{SOURCE}": sources, f"{split}.{TARGET}": targets})
    write_lines(folder / "text" / f"{split}.{SOURCE}", sources)
    write_lines(folder / "text" / f"{split}.{TARGET}", targets)


def text_files(folder: Path) -> list[Path]:
    """Return the inputs of `encode`: both sides of training and validation, and the test source."""
    names = [f"{split}.{side}" for split in ("train", "valid") for side in (SOURCE, TARGET)]
    return [folder / "text" / name for name in (*names, f"test.{SOURCE}")]


def encode(folder: Path, operations: int) -> None:
    """Create subwords, characters and the vocabulary unless they are up to date.

    Args:
        folder: folder of the prepared data, with the `text_files`.
        operations: number of BPE merges, which are learned on the training source.
    """
    stamps, codes = folder / "steps", folder / "bpe.codes"
    texts = text_files(folder)
    training = folder / "text" / f"train.{SOURCE}"
    run_step(
        "learn-bpe",
        stamps,
        partial(subwords.learn_bpe, [training], codes, operations),
        inputs=[training],
        outputs=[codes],
        settings={"operations": operations, "min_frequency": subwords.MIN_PAIR_FREQUENCY},
    )
    sources = [path for path in texts if path.name.endswith(SOURCE)]
    run_step(
        "apply-bpe",
        stamps,
        partial(subwords.apply_bpe, codes, sources, folder),
        inputs=[codes, *sources],
        outputs=[folder / path.name for path in sources],
        settings={},
    )
    targets = [path for path in texts if path.name.endswith(TARGET)]
    run_step(
        "characters",
        stamps,
        lambda: _split_into_characters(targets, folder),
        inputs=targets,
        outputs=[folder / path.name for path in targets],
        settings={},
    )
    pieces, vocabulary = [folder / f"train.{side}" for side in (SOURCE, TARGET)], folder / "vocabulary"
    run_step(
        "vocabulary",
        stamps,
        lambda: write_text(
            vocabulary, vocabulary_text(count_tokens(pieces[:1]) + count_characters(pieces[1:]))
        ),
        inputs=pieces,
        outputs=[vocabulary],
        settings={},
    )


def describe(folder: Path, references: Sequence[Path], **settings: Any) -> None:
    """Write ``data.json``: sizes, checksums, and `settings` for evaluation.

    ``checksum`` is the SHA-256 of the checksums of all files.
    """
    files = [*(folder / path.name for path in text_files(folder)), folder / "vocabulary", *references]
    checksums = {str(path.relative_to(folder)): sha256(path) for path in files}
    listing = json.dumps(checksums, sort_keys=True).encode()
    description = {
        "source": SOURCE,
        "target": TARGET,
        "pairs": {split: len(read_lines(folder / f"{split}.{SOURCE}")) for split in SPLITS},
        "vocabulary": len(read_lines(folder / "vocabulary")),
        "references": [str(path.relative_to(folder)) for path in references],
        **settings,
        "checksum": hashlib.sha256(listing).hexdigest(),
        "files": checksums,
    }
    write_text(folder / "data.json", json.dumps(description, indent=2) + "\n")


def _split_into_characters(texts: Sequence[Path], folder: Path) -> None:
    """Write each text as characters to a file of the same name in `folder`."""
    for path in texts:
        convert_file(path, folder / path.name, split_text)
