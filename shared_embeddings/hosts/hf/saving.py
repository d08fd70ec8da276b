"""Write the folder of a model atomically."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from shared_embeddings.checkpoints.checksums import stamp_safetensors
from shared_embeddings.hosts.hf.entry import find_entry
from shared_embeddings.quant.standalone import METHODS, check_decoder, program
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import first_line, remove_leftovers, replacing
from shared_embeddings.utils.reading import read_json

# The old and new ids of a trimmed model.
IDS = "ids.tsv"
# Files next to the weights and the configuration, such as tokenizers and generation settings. No code.
_COPIED = (
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
    IDS,
)
# All files that may be in the folder of a model that is replaced.
# Names code in settings.
CODE = "auto_map"
# Loads compressed embeddings where this library is not installed; written by it, and never read.
_REMOTE_CODE = "modeling_shared_embeddings.py"
_REPLACED = (*_COPIED, "*.safetensors", "*.tsv", "*.md", _REMOTE_CODE)
_TEMPLATES = "additional_chat_templates"
_CARD = "README.md"
# Names the folders of the layers after the model in sentence encoders, such as 1_Pooling.
_MODULES = "modules.json"
# Files that describe the old weights or their training.
_NOT_COPIED = (
    "config.json",
    "trainer_state.json",
    "all_results.json",
    "train_results.json",
    "eval_results.json",
)


def save(model: Any, folder: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write a transformers model, with shared embeddings or without, atomically.

    Args:
        model: a model with ``save_pretrained``.
        folder: the output folder.
        force: replace an existing folder of a model.

    Raises:
        UserError: the folder exists and cannot be replaced.
        OSError: it cannot be written.
    """
    path = Path(folder)
    check_output(path, force)
    with replacing_folder(path) as temporary:
        save_pretrained(model, temporary)


def save_pretrained(model: Any, folder: Path, **settings: Any) -> None:
    """Write a model with ``save_pretrained`` and add the checksums of its tensors to the weight files.

    Args:
        model: a transformers model.
        folder: an existing folder.
        settings: further arguments of ``save_pretrained``.

    Raises:
        OSError: it cannot be written.
    """
    model.save_pretrained(folder, **settings)
    add_remote_code(folder)
    for file in folder.glob("*.safetensors"):
        stamp_safetensors(file)


def add_remote_code(folder: Path) -> None:
    """Add the file that loads a folder with ``trust_remote_code``, if it can decode its embeddings.

    ``config.json`` then names the classes of transformers that the file provides.

    Raises:
        UserError: nothing but the library decodes the codec of an embedding.
        OSError: it cannot be written.
    """
    config = folder / "config.json"
    content = read_json(config)
    entry = find_entry(content)
    tables = [] if entry is None else list(entry["tables"].values())
    for table in tables:
        check_decoder(table["method"], table["options"])
    if not tables or any(table["method"] not in METHODS for table in tables):
        return
    (folder / _REMOTE_CODE).write_text(program(Path(__file__).with_name("remote_code.py")), encoding="utf-8")
    classes, module = _auto_classes(content["model_type"]), Path(_REMOTE_CODE).stem
    content[CODE] = {auto: f"{module}.{kind}" for auto, kind in classes.items()}
    config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _auto_classes(model_type: str) -> dict[str, str]:
    """The automatic classes of transformers that load a type of model, with the name of its own class."""
    mappings = require("transformers.models.auto.modeling_auto")
    classes = {
        name: getattr(mappings, name)._model_mapping._model_mapping.get(model_type)
        for name in dir(mappings)
        if name.startswith("AutoModel") and hasattr(getattr(mappings, name)._model_mapping, "_model_mapping")
    }
    return {auto: kind for auto, kind in classes.items() if isinstance(kind, str)}


def check_output(folder: Path, force: bool) -> None:
    """Raise UserError if a folder exists without `force`, or contains anything other than a model."""
    if not folder.exists() and not folder.is_symlink():
        return
    if not force:
        raise UserError(f"output {folder}: already exists; add --force, or name another folder")
    if not folder.is_dir() or not (folder / "config.json").is_file() and any(folder.iterdir()):
        raise UserError(f"output {folder}: exists but is not a model, so it is not replaced; name another")
    for entry in sorted(folder.iterdir()):
        is_own = any(map(entry.match, _REPLACED)) if entry.is_file() else entry in folders_of(folder)
        if not is_own:
            raise UserError(
                f"output {folder}: contains {entry.name}, which is not part of a model and would be lost; "
                "name another folder"
            )


def copy_rest(source: Path, target: Path) -> None:
    """Copy the files of a model's folder other than weights and configuration, such as the tokenizer's."""
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.is_file() and file.name not in _NOT_COPIED and not file.name.endswith(".index.json"):
                copy_settings(file, target / file.name)
    copy_folders(source, target)


def copy_settings(file: Path, target: Path) -> None:
    """Copy a file without the names of code, which stays behind."""
    content = _naming_code(file)
    if content is None:
        shutil.copyfile(file, target)
    else:
        del content[CODE]
        target.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def notes_on_code(source: Path, kind: str) -> list[str]:
    """What happened to code that the files of a model name.

    Args:
        source: the folder of the model.
        kind: its class.
    """
    config = read_json(source / "config.json")
    if find_entry(config) is not None:  # written by this library
        return []
    notes = []
    naming = [file.name for file in sorted(source.glob("*_config.json")) if _naming_code(file)]
    if naming:
        notes.append(f"{CODE} of {', '.join(naming)} is dropped: it names code, which is not copied")
    if CODE in config:
        notes.append(f"the code that config.json names ({CODE}) was not run: the model was read as {kind}")
    known = getattr(require("transformers"), kind).config_class.model_type
    if config.get("model_type") != known:
        notes.append(f"model type {config.get('model_type')!r}: the model was read as {kind} ({known})")
    return notes


def _naming_code(file: Path) -> dict[str, Any] | None:
    """The content of a JSON file that names code for ``trust_remote_code``, maybe of another repository."""
    if not file.name.endswith("_config.json") or not file.is_file():
        return None
    content = read_json(file)
    return content if isinstance(content, dict) and CODE in content else None


def write_card(source: Path, target: Path, done: str, kind: str, summary: str) -> None:
    """Write a model card, above that of the original, whose license and language it inherits.

    Args:
        source: the folder of the original.
        target: the folder of the model, with its configuration.
        done: the start of the title, such as "Vocabulary trimmed".
        kind: the class of the model.
        summary: sizes and quality, in Markdown.
    """
    original = source / _CARD
    text = original.read_text(encoding="utf-8", errors="replace") if original.is_file() else ""
    parts = re.fullmatch(r"(---\n.*?\n---\n)?(.*)", text, flags=re.DOTALL)
    header, body = parts.groups(default="") if parts else ("", text)
    needed = (
        "" if find_entry(read_json(target / "config.json")) is None else "import shared_embeddings.hosts.hf\n"
    )
    loading = f'{needed}from transformers import {kind}\nmodel = {kind}.from_pretrained("DIR")'
    own = f"# {done} with shared-embeddings\n\n{summary}\n```python\n{loading}  # DIR: this folder\n```\n"
    if (target / _REMOTE_CODE).is_file():
        own += "\nWithout that library, `trust_remote_code=True` decodes the embeddings while loading.\n"
    body = _with_earlier_steps(body.lstrip())
    (target / _CARD).write_text("\n".join(filter(None, (header, own, body))), encoding="utf-8")


def _with_earlier_steps(card: str) -> str:
    """The body of a card in which sections of `write_card` are marked as steps before the last one."""
    marked = re.sub(r"^# (.* with shared-embeddings)$", r"## Earlier step: \1", card, flags=re.MULTILINE)
    return re.sub(r"\n```python\n[^`]*# DIR: this folder\n```\n", "", marked)


def folders_of(source: Path) -> list[Path]:
    """The folders inside a model's folder that belong to it: chat templates, and layers after the model."""
    names = {_TEMPLATES}
    if (source / _MODULES).is_file():
        content = read_json(source / _MODULES)
        modules = content if isinstance(content, list) else []
        names.update(str(module.get("path")) for module in modules if isinstance(module, dict))
    return [folder for folder in sorted(source.iterdir()) if folder.is_dir() and folder.name in names]


def copy_folders(source: Path, target: Path) -> None:
    """Copy the folders of a model, without code."""
    for folder in folders_of(source):
        shutil.copytree(folder, target / folder.name, ignore=shutil.ignore_patterns("*.py"))


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder; rename it to `path` on success, delete it on errors.

    Files are flushed to disk before the rename. An existing folder, or the target of a symbolic link, is
    replaced. Leftovers of killed processes are deleted.
    """
    remove_leftovers(path)
    with replacing(path) as temporary:
        temporary.mkdir()
        try:
            yield temporary
        except SafetensorError as error:  # for example on a full disk
            raise _as_os_error(error) from error
        for file in temporary.rglob("*"):
            if file.is_file():
                # safetensors makes files readable by the owner only.
                shutil.copymode(temporary / "config.json", file)


def _as_os_error(error: SafetensorError) -> OSError:
    """The `OSError` behind an error of safetensors, which reports only its text."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(first_line(error))
