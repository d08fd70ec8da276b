"""Writing a folder with a model, completely or not at all."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from shared_embeddings.checkpoints.checksums import stamp_safetensors
from shared_embeddings.utils.files import first_line, remove_leftovers, replacing

# What stands beside the weights and the configuration: tokenizers, and how to generate. No code.
_KEPT = (
    "*.json",
    "*.txt",
    "*.model",
    "*.spm",
    "*.jinja",
    "*.vocab",
    "*.bpe",
    "*.codes",
    "*.tiktoken",
    "LICENSE*",
)
# Beside those, what may stand in the folder of a model that is replaced.
_REPLACED = (*_KEPT, "*.safetensors", "*.tsv", "*.md")
_TEMPLATES = "additional_chat_templates"
# What describes weights, or a run that made them.
_LEFT = ("config.json", "trainer_state.json", "all_results.json", "train_results.json", "eval_results.json")


def save(model: Any, folder: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write a model of transformers, with shared embeddings or without, completely or not at all.

    Args:
        model: its ``save_pretrained`` writes ``config.json``, ``model.safetensors`` and how to generate.
        folder: the one to make.
        force: replace a folder with a model that is there.

    Raises:
        ValueError: the folder is there already.
        OSError: it cannot be written.
    """
    path = Path(folder)
    check_output(path, force)
    with replacing_folder(path) as temporary:
        save_pretrained(model, temporary)


def save_pretrained(model: Any, folder: Path, **settings: Any) -> None:
    """Let transformers write a model into a folder, and put the checksums of its tensors into its weights.

    Args:
        model: of transformers.
        folder: that is there.
        settings: of ``save_pretrained``.

    Raises:
        OSError: it cannot be written.
    """
    model.save_pretrained(folder, **settings)
    for file in folder.glob("*.safetensors"):
        stamp_safetensors(file)


def check_output(folder: Path, force: bool) -> None:
    """Raise ValueError where a folder cannot be written, or something else would be lost."""
    if not folder.exists() and not folder.is_symlink():
        return
    if not force:
        raise ValueError(f"output {folder}: already exists; add --force, or name another folder")
    if not folder.is_dir() or not (folder / "config.json").is_file() and any(folder.iterdir()):
        raise ValueError(f"output {folder}: is there and holds no model, so it is not replaced; name another")
    for entry in sorted(folder.iterdir()):
        is_own = any(map(entry.match, _REPLACED)) if entry.is_file() else entry.name == _TEMPLATES
        if not is_own:
            raise ValueError(
                f"output {folder}: holds {entry.name}, which is no part of a model and would be lost; name "
                "another folder"
            )


def copy_rest(source: Path, target: Path) -> None:
    """Copy the files of a model's folder that are no weights or configuration, such as the tokenizer's."""
    for pattern in _KEPT:
        for file in source.glob(pattern):
            if file.is_file() and file.name not in _LEFT and not file.name.endswith(".index.json"):
                shutil.copyfile(file, target / file.name)
    templates = source / _TEMPLATES
    if templates.is_dir():
        shutil.copytree(templates, target / templates.name)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Give a temporary folder beside `path`; rename it to `path` on success, delete it on any error.

    The files are on the disk before the rename. A folder that was there is replaced; where `path` is a link,
    the folder that it leads to. What processes that were killed meanwhile have left is taken away.
    """
    remove_leftovers(path)
    with replacing(path) as temporary:
        temporary.mkdir()
        try:
            yield temporary
        except SafetensorError as error:  # such as a full disk
            raise _refused(error) from error
        for file in temporary.rglob("*"):
            if file.is_file():
                # safetensors writes for the owner alone.
                shutil.copymode(temporary / "config.json", file)


def _refused(error: SafetensorError) -> OSError:
    """What the operating system refused when safetensors wrote, which that reports as text of its own."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(first_line(error))
