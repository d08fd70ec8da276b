"""The folder of a Hugging Face model: read without trust in its content, and written atomically."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import shared_embeddings.utils.reading as documents
from shared_embeddings.checkpoints import (
    building,
    check_finite,
    load_safetensors,
    recorded_checksum,
    stamp_safetensors,
)
from shared_embeddings.hf.word_layers import KEY, find_entry, from_entry
from shared_embeddings.quant.codec import DECODED_METHODS, check_decoder, program
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import first_line, remove_leftovers, replacing

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
# Names code in settings.
CODE = "auto_map"
_LONGEST_REASON = 300  # characters of a library's error message
# Weight files that transformers would unpickle.
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Layers that a configuration may claim beyond the number of tensors: unused settings keep their defaults.
_MORE_LAYERS = 1000
# Arguments of ``from_pretrained``: nothing is downloaded, unpickled or run.
_SAFE = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
# Files next to the weights and the configuration, such as tokenizers and generation settings. No code.
_COPIED = (
    *("*.json", "*.txt", "*.model", "*.spm", "*.jinja", "*.vocab", "*.bpe", "*.codes", "*.tiktoken"),
    *("LICENSE*", "ids.tsv"),
)
# Of these, files that describe the old weights or their training.
_NOT_COPIED = (CONFIG, "trainer_state.json", "all_results.json", "train_results.json", "eval_results.json")
# Loads compressed embeddings where this library is not installed; written by it, and never read.
_REMOTE_CODE = "modeling_shared_embeddings.py"
# All files that may be in the folder of a model that is replaced.
_REPLACED = (*_COPIED, "*.safetensors", "*.tsv", "*.md", _REMOTE_CODE)
_CARD = "README.md"


# Reading.


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn any library error caused by a damaged model into a UserError that names the model."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # each model class raises its own errors
        if isinstance(error, UserError) and str(folder) in str(error):
            raise
        reason = f"cannot be read ({first_line(error)})"
        if isinstance(error, ValueError):
            reason = " ".join(str(error).split())[:_LONGEST_REASON]
        raise UserError(f"model {folder}: {reason}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from printing tables of tensors, which errors and notes of ours replace."""
    logging = require("transformers").utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file; UserError if it is not an object, OSError if it cannot be read."""
    content = documents.read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: is not a JSON object; copy it again")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """The content of ``config.json`` of a model all of whose files lie in its folder.

    In the Hugging Face cache, links may lead into the files of the same model:
    ``models--NAME/snapshots/REVISION/config.json -> ../../blobs/HASH``.

    Raises:
        UserError: the file is missing or not a JSON object, a link or a setting leads out of the folder, or
            the model is quantized by another program.
    """
    if not (folder / CONFIG).is_file():
        raise UserError(f"model {folder}: has no config.json; name the folder of a Hugging Face model")
    own = folder.resolve()
    places = [own, *([own.parent.parent / "blobs"] if own.parent.name == "snapshots" else [])]
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not any(map(path.resolve().is_relative_to, places)):
            raise UserError(
                f"model {folder}: {path.relative_to(folder)} is a link out of the folder, which is not "
                "followed; copy the file into the folder, or remove the link"
            )
    config = read_json(folder / CONFIG)
    if config.get(KEY) is not None and find_entry(config) is None:
        raise UserError(f"model {folder}: is quantized; use the original model")
    # transformers would load other files than those that are checked here.
    if config.get("transformers_weights") is not None:
        raise UserError(
            f"model {folder}: names its weights (transformers_weights); rename them to {WEIGHTS}, and remove "
            "the setting"
        )
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"model {folder}: has an adapter of PEFT (adapter_config.json); merge it into the model, or "
            "remove it"
        )
    return config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model; UserError if one is missing, not in the folder, or pickled."""
    names = [WEIGHTS]
    has_whole = (folder / WEIGHTS).is_file()  # which transformers prefers
    if not has_whole and (folder / INDEX).is_file():
        try:
            names = sorted({str(name) for name in read_json(folder / INDEX)["weight_map"].values()})
        except (LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{folder / INDEX}: is not an index of weights; copy it again") from error
    elif not has_whole:
        pickled = [file.name for pattern in _PICKLED for file in sorted(folder.glob(pattern))]
        if pickled:
            raise UserError(
                f"model {folder}: {pickled[0]} is not loaded because unpickling could run code; convert it "
                "to safetensors with save_pretrained"
            )
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(
                f"model {folder}: {INDEX} names {name}, which is not a safetensors file in the folder; copy "
                "it again"
            )
        if not (folder / name).is_file():
            raise UserError(f"model {folder}: has no {name}; name a complete folder")
    return [folder / name for name in names]


def check_weights(files: Iterable[Path]) -> None:
    """Verify the weight files that have a checksum in their metadata; UserError for a damaged one."""
    for file in files:
        if recorded_checksum(file) is not None:
            load_safetensors(file, f"weights {file}")


def mapped_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped into memory; UserError if it is damaged."""
    try:
        with safe_open(file, "pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}
    except SafetensorError as error:
        raise UserError(
            f"weights {file}: cannot be read ({first_line(error)}); it is truncated or damaged, copy it again"
        ) from error


def model_class(folder: Path, config: dict[str, Any]) -> Any:
    """The first transformers class that the configuration names; UserError for none or another class.

    Code in the folder is never run.
    """
    library = require("transformers")
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    found = getattr(library, str(name), None)
    if not isinstance(found, type) or not issubclass(found, library.PreTrainedModel):
        raise UserError(
            f"model {folder}: its class {name} is not in transformers {library.__version__}, and code "
            "in the folder is not run; use a model whose class is in the library"
        )
    return found


def check_sizes(folder: Path, chosen: Any) -> None:
    """Check that the files of a model of a class hold the tensors that its configuration claims.

    Reads no values.

    Raises:
        UserError: a tensor is missing or has another shape, or the configuration is invalid.
    """
    files = weight_files(folder)
    logging = require("transformers").utils.logging
    with reading(folder), quiet(), warnings.catch_warnings():
        tensors = sum(len(mapped_tensors(file)) for file in files)
        _check_layers(read_json(folder / CONFIG), tensors + _MORE_LAYERS)
        warnings.simplefilter("ignore")  # torch warns of empty tensors
        has_bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            with building(tensors, sum(file.stat().st_size for file in files)):
                settings = {**_SAFE, "device_map": "meta", "ignore_mismatched_sizes": True}
                _, found = chosen.from_pretrained(folder, output_loading_info=True, **settings)
        finally:
            if has_bars:
                logging.enable_progress_bar()
    wrong = [
        f"{name} is {tuple(own)}, expected {tuple(wanted)}" for name, own, wanted in found["mismatched_keys"]
    ]
    _check_none(folder, missing_keys=found["missing_keys"], sizes=wrong)


def _check_layers(settings: Any, most: int, is_count: bool = False) -> None:
    """Raise UserError if settings claim more than `most` layers, which transformers lists one by one."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            counts = name.endswith("layers") or name in ("n_layer", "attention_types")
            if counts and type(value) is int and value < 0:
                raise UserError(f"{CONFIG}: {name} is {value}, which is negative; copy it again")
            _check_layers(value, most, is_count or counts)
    elif isinstance(settings, list):
        for value in settings:
            _check_layers(value, most, is_count)
    elif is_count and type(settings) is int and settings > most:
        raise UserError(f"{CONFIG}: claims {settings:,} layers, more than there are tensors; copy it again")


def _check_none(folder: Path, **wrong: Iterable[object]) -> None:
    """Raise UserError for the first of the tensors that do not match the configuration, by kind of fault."""
    for kind, names in wrong.items():
        first = min(map(str, names), default=None)
        if first is not None:
            raise UserError(
                f"model {folder}: its weights do not match its config.json "
                f"({kind.replace('_', ' ')}: {first}); copy it again"
            )


def read_model(folder: Path, chosen: Any, **settings: Any) -> tuple[Any, list[str]]:
    """Read a model of a class on the CPU, in the dtype of its weights; settings are for ``from_pretrained``.

    Returns:
        The model, and the names of tensors that it does not use, such as layers for another task.

    Raises:
        UserError: weights cannot be read, are missing or have wrong shapes.
    """
    check_sizes(folder, chosen)
    # torch_dtype is the old name.
    dtype = {} if "torch_dtype" in settings else {"dtype": "auto"}
    with reading(folder), quiet():
        check_weights(weight_files(folder))
        model, found = chosen.from_pretrained(
            folder, **{**dtype, **settings, **_SAFE, "output_loading_info": True}
        )
    _check_none(folder, missing_keys=found["missing_keys"])
    check_finite(dict(model.named_parameters()), f"model {folder}")
    return model, sorted(map(str, found["unexpected_keys"]))


def load(folder: str | os.PathLike[str], *, trainable: bool = False, **settings: Any) -> Any:
    """Load a model that `shared-embeddings compress`, `save` or ``save_pretrained`` wrote.

    Like ``from_pretrained`` of the class that the configuration names, but downloads nothing, runs no code
    from the folder, and fails where ``from_pretrained`` warns that weights are missing or unused.

    Args:
        folder: a folder with ``config.json`` and ``model.safetensors``.
        trainable: whether embeddings in few bits become parameters in the dtype of the model. By default
            they stay in few bits and are not trained.
        settings: further arguments of ``from_pretrained``, such as ``dtype`` or ``attn_implementation``.

    Returns:
        A model in evaluation mode, in the dtype of its weights unless `settings` have another.

    Raises:
        UserError: the folder is incomplete or contains a plain model.
        ImportError: transformers is not installed.
    """
    path = Path(folder)
    config = read_config(path)
    entry = find_entry(config)
    if entry is None:
        raise UserError(
            f"model {path}: its config.json has no entry '{KEY}' of a compressed model: it is a plain model; "
            "load it with from_pretrained of transformers"
        )
    # Report an unreadable entry before transformers builds the model.
    with reading(path), torch.device("meta"):
        from_entry(entry)
    model, unexpected = read_model(path, model_class(path, config), **settings)
    _check_none(path, unexpected_keys=unexpected)
    if trainable and getattr(model, "hf_quantizer", None) is not None:
        model.dequantize()
    return model


# Writing.


def save(model: Any, folder: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write a transformers model, with shared embeddings or without, atomically.

    Args:
        model: a transformers model.
        folder: the output.
        force: replace an existing folder of a model.

    Raises:
        UserError: the folder exists and `force` is False, or it holds other files than a model.
        OSError: it cannot be written.
    """
    path = Path(folder)
    check_output(path, force)
    with replacing_folder(path) as temporary:
        save_pretrained(model, temporary)


def save_pretrained(model: Any, folder: Path, **settings: Any) -> None:
    """Write a model with ``save_pretrained`` and its `settings`, with checksums; OSError if that fails."""
    model.save_pretrained(folder, **settings)
    add_remote_code(folder)
    for file in folder.glob("*.safetensors"):
        stamp_safetensors(file)


def add_remote_code(folder: Path) -> None:
    """Add the file that loads a folder with ``trust_remote_code``, if it can decode its embeddings.

    ``config.json`` then names the classes of transformers that the file provides.

    Raises:
        UserError: nothing but the library decodes the codec of an embedding.
    """
    content = read_json(folder / CONFIG)
    tables = list((find_entry(content) or {"tables": {}})["tables"].values())
    for table in tables:
        check_decoder(table["method"], table["options"])
    if not tables or any(table["method"] not in DECODED_METHODS for table in tables):
        return
    (folder / _REMOTE_CODE).write_text(program(Path(__file__).with_name("remote_code.py")), encoding="utf-8")
    auto = require("transformers.models.auto.modeling_auto")
    content[CODE] = {}
    for name in (name for name in dir(auto) if name.startswith("AutoModel")):
        mapping = getattr(auto, name)._model_mapping
        kind = getattr(mapping, "_model_mapping", {}).get(content["model_type"])
        if isinstance(kind, str):
            content[CODE][name] = f"{Path(_REMOTE_CODE).stem}.{kind}"
    (folder / CONFIG).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_output(folder: Path, force: bool) -> None:
    """Raise UserError if a folder exists without `force`, or contains anything other than a model."""
    if not folder.exists() and not folder.is_symlink():
        return
    if not force:
        raise UserError(f"output {folder}: already exists; add --force, or name another folder")
    if not folder.is_dir() or not (folder / CONFIG).is_file() and any(folder.iterdir()):
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


def folders_of(source: Path) -> list[Path]:
    """The folders inside a model's folder that belong to it: chat templates, and layers after the model."""
    names = {"additional_chat_templates"}
    modules = source / "modules.json"  # of sentence encoders, names folders such as 1_Pooling
    if modules.is_file():
        content = documents.read_json(modules)
        layers = content if isinstance(content, list) else []
        names.update(str(layer.get("path")) for layer in layers if isinstance(layer, dict))
    return [folder for folder in sorted(source.iterdir()) if folder.is_dir() and folder.name in names]


def copy_folders(source: Path, target: Path) -> None:
    """Copy the folders of a model, without code."""
    for folder in folders_of(source):
        shutil.copytree(folder, target / folder.name, ignore=shutil.ignore_patterns("*.py"))


def _read_naming_code(file: Path) -> dict[str, Any] | None:
    """The content of a JSON file that names code for ``trust_remote_code``, maybe of another repository."""
    if not file.name.endswith("_config.json") or not file.is_file():
        return None
    content = documents.read_json(file)
    return content if isinstance(content, dict) and CODE in content else None


def copy_settings(file: Path, target: Path) -> None:
    """Copy a file without the names of code, which stays behind."""
    content = _read_naming_code(file)
    if content is None:
        shutil.copyfile(file, target)
    else:
        del content[CODE]
        target.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def notes_on_code(source: Path, kind: str) -> list[str]:
    """What happened to code that the files of a model in the folder `source` name, read as class `kind`."""
    config = read_json(source / CONFIG)
    if find_entry(config) is not None:  # written by this library
        return []
    notes = []
    naming = [file.name for file in sorted(source.glob("*_config.json")) if _read_naming_code(file)]
    if naming:
        notes.append(f"{CODE} of {', '.join(naming)} is dropped: it names code, which is not copied")
    if CODE in config:
        notes.append(f"the code that config.json names ({CODE}) was not run: the model was read as {kind}")
    known = getattr(require("transformers"), kind).config_class.model_type
    if config.get("model_type") != known:
        notes.append(f"model type {config.get('model_type')!r}: the model was read as {kind} ({known})")
    return notes


def write_card(source: Path, target: Path, done: str, kind: str, summary: str) -> None:
    """Write a model card, above that of the original, whose license and language it inherits.

    The title is what was `done` with the model of class `kind`, the summary Markdown with sizes and quality.
    """
    original = source / _CARD
    text = original.read_text(encoding="utf-8", errors="replace") if original.is_file() else ""
    parts = re.fullmatch(r"(---\n.*?\n---\n)?(.*)", text, flags=re.DOTALL)
    header, body = parts.groups(default="") if parts else ("", text)
    is_compressed = find_entry(read_json(target / CONFIG)) is not None
    loading = "import shared_embeddings.hf\n" if is_compressed else ""
    loading += f'from transformers import {kind}\nmodel = {kind}.from_pretrained("DIR")  # DIR: this folder\n'
    own = f"# {done} with shared-embeddings\n\n{summary}\n```python\n{loading}```\n"
    if (target / _REMOTE_CODE).is_file():
        own += "\nWithout that library, `trust_remote_code=True` decodes the embeddings while loading.\n"
    # Mark what this function wrote before as earlier steps.
    heading = re.compile(r"^# (.* with shared-embeddings)$", flags=re.MULTILINE)
    body = heading.sub(r"## Earlier step: \1", body.lstrip())
    body = re.sub(r"\n```python\n[^`]*# DIR: this folder\n```\n", "", body)
    (target / _CARD).write_text("\n".join(filter(None, (header, own, body))), encoding="utf-8")


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
        except SafetensorError as error:  # for example on a full disk; it reports the system's error as text
            number = re.search(r"os error (\d+)", str(error))
            found = (int(number[1]), os.strerror(int(number[1]))) if number else (first_line(error),)
            raise OSError(*found) from error
        for file in temporary.rglob("*"):
            if file.is_file():
                # safetensors makes files readable by the owner only.
                shutil.copymode(temporary / CONFIG, file)
