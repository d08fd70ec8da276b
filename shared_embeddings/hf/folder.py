"""What a folder with a model of Hugging Face says of itself; no weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared_embeddings.files import first_line
from shared_embeddings.hf.library import transformers

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# Weights that transformers reads by unpickling.
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_config(folder: Path) -> dict[str, Any]:
    """The content of ``config.json``.

    Raises:
        ValueError: there is no such folder or file, or it is no JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"model {folder}: has no config.json; name the folder of a model of Hugging Face")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"model {path}: is no JSON ({first_line(error)}); copy it anew") from error
    if not isinstance(config, dict):
        raise ValueError(f"model {path}: is no JSON object; copy it anew")
    return config


def check_weights(folder: Path) -> None:
    """Raise ValueError unless the weights are safetensors, which hold no code."""
    if any((folder / name).is_file() for name in _WEIGHTS):
        return
    pickled = next((file.name for pattern in _PICKLED for file in sorted(folder.glob(pattern))), None)
    if pickled is not None:
        raise ValueError(
            f"model {folder}: {pickled} is not opened, because it could run code; convert it to safetensors "
            "with save_pretrained"
        )
    raise ValueError(f"model {folder}: has no {_WEIGHTS[0]}; name a complete folder")


def model_class(folder: Path, config: dict[str, Any]) -> Any:
    """The class of transformers that the configuration names first.

    Raises:
        ValueError: it names none, or one that transformers does not have; code in the folder is never run.
    """
    library = transformers()
    names = config.get("architectures") or [None]
    found = getattr(library, str(names[0]), None)
    if not isinstance(found, type) or not issubclass(found, library.PreTrainedModel):
        raise ValueError(
            f"model {folder}: its class {names[0]} is not in transformers {library.__version__}, and code "
            "that comes with a model is not run; name a model of the library"
        )
    return found


def read_model(folder: Path, chosen: Any, **settings: Any) -> Any:
    """The model of a folder, as the class `chosen` reads it, in the type of its weights, on the CPU.

    Args:
        settings: further ones of ``from_pretrained``.

    Raises:
        ValueError: the weights cannot be read, or are not those of the model.
    """
    check_weights(folder)
    safe = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    settings = {"dtype": "auto", **settings, **safe, "output_loading_info": True}
    try:
        model, found = chosen.from_pretrained(folder, **settings)
    except (RuntimeError, OSError, LookupError, TypeError) as error:
        raise ValueError(f"model {folder}: cannot be read ({first_line(error)})") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found[kind]:
            raise ValueError(
                f"model {folder}: its weights do not fit its config.json ({kind.replace('_', ' ')}: "
                f"{sorted(map(str, found[kind]))[0]}); copy it anew"
            )
    return model
