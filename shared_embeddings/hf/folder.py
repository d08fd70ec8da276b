"""The folder of a Hugging Face model: read without running its code, and written as a whole."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from shared_embeddings.checkpoints import check_sizes, load_tensors, save_safetensors, stamp_safetensors
from shared_embeddings.hf.sentences import SENTENCE_LAYERS, has_pooling
from shared_embeddings.hf.word_layers import KEY, find_entry
from shared_embeddings.quant.codec import DECODED_METHODS, check_decoder, program
from shared_embeddings.utils.errors import UserError, first_line, require
from shared_embeddings.utils.files import replacing, write_json
from shared_embeddings.utils.reading import read_json

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
# Names code in settings.
CODE = "auto_map"
_LONGEST_REASON = 300  # characters of a library's error message
# Arguments of ``from_pretrained``: nothing is downloaded, unpickled or run.
_SAFE = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
# The names of sizes of layers and their numbers, with a prefix.
_SIZES = re.compile(r"(^|_)(vocab_size|hidden_size|intermediate_size|d_model|d_ff|n_embd|layers?)$")
# Files next to the weights and the configuration, such as tokenizers and generation settings. No code.
_COPIED = (
    *("*.json", "*.txt", "*.model", "*.spm", "*.jinja", "*.vocab", "*.bpe", "*.codes", "*.tiktoken"),
    *("LICENSE*", "ids.tsv"),
)
# Of these, files that describe the old weights or their training.
_NOT_COPIED = (CONFIG, "trainer_state.json", "all_results.json", "train_results.json", "eval_results.json")
# Loads compressed embeddings where this library is not installed; written by it, and never read.
REMOTE_CODE = "modeling_shared_embeddings.py"


# Reading.


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Convert the errors of libraries for a damaged model to a `UserError` that names the model."""
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


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of ``config.json`` of a model that is whole, in safetensors, in its folder.

    Raises:
        UserError: the file is missing, or the model is quantized by another program, an adapter of PEFT, or
            names its weights itself.
    """
    if not (folder / CONFIG).is_file():
        raise UserError(f"model {folder}: has no config.json; name the folder of a Hugging Face model")
    config: dict[str, Any] = read_json(folder / CONFIG)
    if config.get(KEY) is not None and find_entry(config) is None:
        raise UserError(f"model {folder}: is quantized; use the original model")
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"model {folder}: has an adapter of PEFT (adapter_config.json); merge it into the model, or "
            "remove it"
        )
    if config.get("transformers_weights") is not None:  # maybe outside the folder
        raise UserError(
            f"model {folder}: names its weights (transformers_weights); rename them to {WEIGHTS}, and remove "
            "the setting"
        )
    sizes = {name: value for name, value in _flat(config) if _SIZES.search(name)}
    tables = (find_entry(config) or {"tables": {}})["tables"]
    weights = [load_tensors(file, f"weights {file}") for file in weight_files(folder)]
    tensors = {name: tensor for state in weights for name, tensor in state.items()}
    check_sizes(f"model {folder}", {**sizes, **tables}, tensors)
    return config


def _flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values in settings, and in those of parts of a model, such as ``text_config``."""
    for name, value in settings.items():
        yield name, value
        if isinstance(value, Mapping) and name.endswith("_config"):
            yield from _flat(value)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model; UserError if one is missing or not in the folder."""
    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        missing = {"metadata", "weight_map"} - index.keys()  # transformers reads both
        if missing:
            raise UserError(
                f"model {folder}: {INDEX} has no '{missing.pop()}'; copy it again, or write the model again "
                "with save_pretrained"
            )
        names = sorted(set(index["weight_map"].values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(
                f"model {folder}: {INDEX} names {name}, which is not a safetensors file in the folder; copy "
                "it again"
            )
        if not (folder / name).is_file():
            raise UserError(
                f"model {folder}: has no {name}; name a complete folder, and convert weights in pickles, "
                "which could run code, with save_pretrained"
            )
    return [folder / name for name in names]


def named_class(folder: Path, config: dict[str, Any]) -> Any:
    """Return the first class that a configuration names; UserError unless transformers has it."""
    library = require("transformers")
    name = (config.get("architectures") or [None])[0]
    architecture = getattr(library, str(name), None)
    if not isinstance(architecture, type) or not issubclass(architecture, library.PreTrainedModel):
        raise UserError(
            f"model {folder}: its class {name} is not in transformers {library.__version__}, and code "
            "in the folder is not run; use a model whose class is in the library"
        )
    return architecture


def model_class(folder: Path, config: dict[str, Any]) -> Any:
    """Return the class with which a model is read: the one that its configuration names, without the output
    layer of a language model that is an encoder of sentences, whose files often lack it.
    """
    architecture = named_class(folder, config)
    if not architecture.can_generate() or not has_pooling(folder):
        return architecture
    classes = auto_classes(architecture.config_class.model_type)
    base = "AutoModelForTextEncoding" if config.get("is_encoder_decoder") else "AutoModel"
    return getattr(require("transformers"), classes.get(base, architecture.__name__))


def read_model(
    folder: Path, architecture: Any, is_whole: bool = False, **settings: Any
) -> tuple[Any, list[str]]:
    """Read a model of a class on the CPU, in the dtype of its weights; settings are for ``from_pretrained``.

    Returns it, and the names of tensors that it does not use, such as layers for another task. UserError if
    weights cannot be read, are missing or have wrong shapes, or a model that `is_whole` does not use all.
    """
    weight_files(folder)
    # torch_dtype is the old name.
    dtype = {} if "torch_dtype" in settings else {"dtype": "auto"}
    with reading(folder), quiet():
        model, info = architecture.from_pretrained(
            folder, **{**dtype, **settings, **_SAFE, "output_loading_info": True}
        )
    unexpected = sorted(map(str, info["unexpected_keys"]))
    faults = {"missing": sorted(info["missing_keys"]), "unexpected": unexpected if is_whole else []}
    for fault, names in faults.items():
        for name in names:
            raise UserError(
                f"model {folder}: its weights do not match its config.json ({fault}: {name}); copy it again"
            )
    return model, unexpected


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
    if find_entry(config) is None:
        raise UserError(
            f"model {path}: its config.json has no entry '{KEY}' of a compressed model: it is a plain model; "
            "load it with from_pretrained of transformers"
        )
    model, _ = read_model(path, model_class(path, config), is_whole=True, **settings)
    if trainable and getattr(model, "hf_quantizer", None) is not None:
        model.dequantize()
    return model


# Writing.


def save(model: Any, folder: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write a transformers model, with shared embeddings or without, as a whole.

    Args:
        model: a transformers model.
        folder: the output.
        force: replace an existing folder of a model.

    Raises:
        UserError: the folder exists and `force` is False, or it is not that of a model.
        OSError: it cannot be written.
    """
    path = Path(folder)
    check_output(path, force)
    with replacing(path) as temporary:
        save_pretrained(model, temporary)


def save_pretrained(model: Any, folder: Path, **settings: Any) -> None:
    """Write a model with ``save_pretrained`` and its `settings`, with checksums; OSError if that fails."""
    model.save_pretrained(folder, **settings)
    add_remote_code(folder)
    for file in folder.glob("*.safetensors"):
        stamp_safetensors(file)


def replace_tensors(
    folder: Path, weights: Sequence[str], tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> None:
    """Replace weights of a folder by other tensors in one file, and add settings to its configuration."""
    files = weight_files(folder)
    state = {name: part for file in files for name, part in load_tensors(file, f"weights {file}").items()}
    # transformers writes some tables in shards.
    whole = {name: re.sub(r"\.shard_\d+\.weight$", ".weight", name) for name in state}
    state = {name: part for name, part in state.items() if whole[name] not in weights} | dict(tensors)
    for file in [*files, folder / INDEX]:
        file.unlink(missing_ok=True)
    save_safetensors(state, folder / WEIGHTS, {"format": "pt"})
    write_json(folder / CONFIG, {**read_json(folder / CONFIG), **settings})


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
    (folder / REMOTE_CODE).write_text(program(Path(__file__).with_name("remote_code.py")), encoding="utf-8")
    classes = auto_classes(content["model_type"])
    content[CODE] = {name: f"{Path(REMOTE_CODE).stem}.{kind}" for name, kind in classes.items()}
    write_json(folder / CONFIG, dict(sorted(content.items())))


def auto_classes(model_type: str) -> dict[str, str]:
    """Return the ``AutoModel`` classes for a type of model, and the class that each one loads."""
    auto = require("transformers.models.auto.modeling_auto")
    mappings = {
        name: getattr(auto, name)._model_mapping for name in dir(auto) if name.startswith("AutoModel")
    }
    kinds = {
        name: getattr(mapping, "_model_mapping", {}).get(model_type) for name, mapping in mappings.items()
    }
    return {name: kind for name, kind in kinds.items() if isinstance(kind, str)}


def check_output(folder: Path, force: bool) -> None:
    """Raise UserError if a folder exists without `force`, or is not that of a model."""
    if not folder.exists():
        return
    if not force:
        raise UserError(f"output {folder}: already exists; replace it (force), or name another folder")
    if not folder.is_dir() or not (folder / CONFIG).is_file() and any(folder.iterdir()):
        raise UserError(f"output {folder}: exists but is not a model, so it is not replaced; name another")


def other_files(source: Path) -> list[Path]:
    """Return what belongs to a model beside weights and configuration, such as its tokenizer's files.

    Folders have chat templates, or layers after the model, as those of sentence encoders.
    """
    files = {file for pattern in _COPIED for file in source.glob(pattern) if file.is_file()}
    names = ["additional_chat_templates"]
    if (source / SENTENCE_LAYERS).is_file():
        names += [layer["path"] for layer in read_json(source / SENTENCE_LAYERS)]
    return [
        *(file for file in sorted(files) if file.name not in _NOT_COPIED and not file.match("*.index.json")),
        *(folder for folder in sorted(source.iterdir()) if folder.is_dir() and folder.name in names),
    ]


def copy_files(files: Iterable[Path], target: Path) -> None:
    """Copy files and folders of a model into another folder, without code and its names."""
    for file in files:
        if file.is_dir():
            shutil.copytree(file, target / file.name, ignore=shutil.ignore_patterns("*.py"))
        elif file.name.endswith("config.json") and CODE in (content := read_json(file)):
            del content[CODE]
            write_json(target / file.name, content)
        else:
            shutil.copyfile(file, target / file.name)


def notes_on_code(source: Path, kind: str) -> list[str]:
    """Return notes about code that a folder names, and a model that was read as another class `kind`."""
    config = read_json(source / CONFIG)
    if find_entry(config) is not None:  # written by this library
        return []
    notes = []
    if naming := [file.name for file in sorted(source.glob("*config.json")) if CODE in read_json(file)]:
        notes.append(f"the code that {', '.join(naming)} name ({CODE}) was neither run nor copied")
    model_type = getattr(require("transformers"), kind).config_class.model_type
    if CODE in config or config.get("model_type") != model_type:
        notes.append(f"model type {config.get('model_type')!r}: the model was read as {kind} ({model_type})")
    return notes
