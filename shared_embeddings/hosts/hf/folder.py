"""Read the folder of a Hugging Face model, and load a compressed one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import shared_embeddings.utils.reading as documents
from shared_embeddings.checkpoints.checksums import load_safetensors, recorded_checksum
from shared_embeddings.checkpoints.tensors import building, check_finite
from shared_embeddings.hosts.hf.entry import KEY, find_entry, from_entry
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import first_line

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
_ADAPTER = "adapter_config.json"
_LONGEST_REASON = 300  # characters of a library's error message
# Weight files that transformers would unpickle.
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Layers that a configuration may claim beyond the number of tensors: unused settings keep their defaults.
_MORE_LAYERS = 1000
# Arguments of ``from_pretrained``: nothing is downloaded, unpickled or run.
_SAFE = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}


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


def read_config(folder: Path) -> dict[str, Any]:
    """The content of ``config.json`` of a model all of whose files lie in its folder.

    Raises:
        UserError: the file is missing or not a JSON object, or a link or a setting leads out of the folder.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"model {folder}: has no config.json; name the folder of a Hugging Face model")
    _check_links(folder)
    config = read_json(path)
    # transformers would load other files than those that are checked here.
    if config.get("transformers_weights") is not None:
        raise UserError(
            f"model {folder}: names its weights (transformers_weights); rename them to {WEIGHTS}, and remove "
            "the setting"
        )
    if (folder / _ADAPTER).is_file():
        raise UserError(
            f"model {folder}: has an adapter of PEFT ({_ADAPTER}); merge it into the model, or remove it"
        )
    return config


def _check_links(folder: Path) -> None:
    """Raise UserError if a link in the folder of a model leads out of it.

    In the Hugging Face cache, links may lead into the files of the same model:
    ``models--NAME/snapshots/REVISION/config.json -> ../../blobs/HASH``.
    """
    own = folder.resolve()
    places = [own, *([own.parent.parent / "blobs"] if own.parent.name == "snapshots" else [])]
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not any(map(path.resolve().is_relative_to, places)):
            raise UserError(
                f"model {folder}: {path.relative_to(folder)} is a link out of the folder, which is not "
                "followed; copy the file into the folder, or remove the link"
            )


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file.

    Raises:
        UserError: it is not a JSON object.
        OSError: it cannot be read.
    """
    content = documents.read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: is not a JSON object; copy it again")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files with a model's weights.

    Raises:
        UserError: a file is missing, or the weights are pickled.
    """
    names = [WEIGHTS]
    if (folder / INDEX).is_file() and not (folder / WEIGHTS).is_file():  # the order of transformers
        try:
            names = sorted({str(name) for name in read_json(folder / INDEX)["weight_map"].values()})
        except (LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{folder / INDEX}: is not an index of weights; copy it again") from error
    else:
        _check_not_pickled(folder)
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(
                f"model {folder}: {INDEX} names {name}, which is not a safetensors file in the folder; copy "
                "it again"
            )
        if not (folder / name).is_file():
            raise UserError(f"model {folder}: has no {name}; name a complete folder")
    return [folder / name for name in names]


def _check_not_pickled(folder: Path) -> None:
    """Raise UserError for a folder with pickled weights instead of safetensors."""
    if (folder / WEIGHTS).is_file():
        return
    pickled = next((file.name for pattern in _PICKLED for file in sorted(folder.glob(pattern))), None)
    if pickled is not None:
        raise UserError(
            f"model {folder}: {pickled} is not loaded because unpickling could run code; convert it to "
            "safetensors with save_pretrained"
        )


def model_class(folder: Path, config: dict[str, Any]) -> Any:
    """The first transformers class that the configuration names.

    Raises:
        UserError: it names none, or a class that is not in transformers; code in the folder is never run.
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


def read_model(folder: Path, chosen: Any, **settings: Any) -> tuple[Any, list[str]]:
    """Read a model on the CPU, in the dtype of its weights.

    Args:
        folder: the folder of the model.
        chosen: its class.
        settings: further arguments of ``from_pretrained``.

    Returns:
        The model, and the names of tensors in the folder that the model does not use, such as layers for
        another task.

    Raises:
        UserError: weights cannot be read, are missing or have wrong shapes.
    """
    check_sizes(folder, chosen)
    # torch_dtype is the old name.
    dtype = {} if "torch_dtype" in settings else {"dtype": "auto"}
    settings = {**dtype, **settings, **_SAFE, "output_loading_info": True}
    with reading(folder), quiet():
        check_weights(weight_files(folder))
        model, found = chosen.from_pretrained(folder, **settings)
    check_none(folder, "missing_keys", found["missing_keys"])
    check_finite(dict(model.named_parameters()), f"model {folder}")
    return model, sorted(map(str, found["unexpected_keys"]))


def check_sizes(folder: Path, chosen: Any) -> None:
    """Check that the files of a model hold the tensors that its configuration claims; reads no values.

    Args:
        folder: the folder of the model.
        chosen: its class.

    Raises:
        UserError: a tensor is missing or has another shape, or the configuration is invalid.
    """
    files = weight_files(folder)
    with reading(folder), quiet():
        tensors = sum(len(tensor_names(file)) for file in files)
        _check_layers(read_json(folder / CONFIG), tensors + _MORE_LAYERS)
        size = sum(file.stat().st_size for file in files)
        with building(tensors, size), warnings.catch_warnings():
            logging = require("transformers").utils.logging
            settings = {**_SAFE, "device_map": "meta", "ignore_mismatched_sizes": True}
            has_bars = logging.is_progress_bar_enabled()
            logging.disable_progress_bar()
            try:
                warnings.simplefilter("ignore")  # torch warns of empty tensors
                _, found = chosen.from_pretrained(folder, output_loading_info=True, **settings)
            finally:
                if has_bars:
                    logging.enable_progress_bar()
    check_none(folder, "missing_keys", found["missing_keys"])
    wrong = [
        f"{name} is {tuple(own)}, expected {tuple(wanted)}" for name, own, wanted in found["mismatched_keys"]
    ]
    check_none(folder, "sizes", wrong)


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


def check_weights(files: Iterable[Path]) -> None:
    """Verify the weight files that have a checksum in their metadata.

    Raises:
        UserError: the tensors of a file do not match its checksum.
        safetensors.SafetensorError: a file is truncated.
    """
    for file in files:
        if recorded_checksum(file) is not None:
            load_safetensors(file, f"weights {file}")


def check_none(folder: Path, kind: str, names: Iterable[object]) -> None:
    """Raise UserError if there are any names: tensors of a `kind` that do not match the configuration."""
    first = min(map(str, names), default=None)
    if first is not None:
        raise UserError(
            f"model {folder}: its weights do not match its config.json ({kind.replace('_', ' ')}: {first}); "
            "copy it again"
        )


def tensor_names(file: Path) -> list[str]:
    """The names of the tensors in a safetensors file; UserError if it is damaged."""
    try:
        with safe_open(file, "pt") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        raise UserError(
            f"weights {file}: cannot be read ({first_line(error)}); it is truncated or damaged, copy it again"
        ) from error


def tensor_files(folder: Path) -> dict[str, Path]:
    """The names of all tensors of a model, with their files.

    Raises:
        UserError: a file is missing or damaged.
    """
    files = weight_files(folder)
    with reading(folder):
        check_weights(files)
        return {name: file for file in files for name in tensor_names(file)}


def read_tensor(file: Path, name: str) -> Tensor:
    """A tensor of a safetensors file, mapped into memory."""
    with safe_open(file, "pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
    return tensor


def stored_names(model: Any, files: Mapping[str, Path]) -> dict[str, str]:
    """For the name of each tensor of a model, that of its values in the files, which may be tied to it.

    Args:
        model: a transformers model, possibly on the meta device.
        files: tensor name -> file.

    Raises:
        NotImplementedError: the files have other names or shapes.
    """
    names: dict[int, list[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    computed = model._keys_to_ignore_on_save or ()
    found = {}
    for same in names.values():
        stored = [name for name in same if name in files]
        if not stored and all(name in computed for name in same):
            continue
        # Several names may be for values that are not tied, whatever the configuration says.
        if len(stored) != 1 or read_tensor(files[stored[0]], stored[0]).shape != state[stored[0]].shape:
            raise NotImplementedError(f"the files have {len(stored)} tensors for {', '.join(same)}")
        found.update(dict.fromkeys(same, stored[0]))
    return found


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
    check_none(path, "unexpected_keys", unexpected)
    if trainable and getattr(model, "hf_quantizer", None) is not None:
        model.dequantize()
    return model
