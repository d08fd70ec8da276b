"""Load a compressed Hugging Face model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from shared_embeddings.checkpoints.storage import hold, unpack
from shared_embeddings.hf.entry import ENTRY, from_entry, place
from shared_embeddings.hf.folder import check_none, model_class, read_config, read_model, reading
from shared_embeddings.hf.saving import keep_packed


def load(folder: str | os.PathLike[str], *, trainable: bool = False, **settings: Any) -> Any:
    """Load a model that `shared-embeddings compress`, `save` or ``save_pretrained`` wrote.

    Downloads nothing and runs no code from the folder.

    Args:
        folder: a folder with ``config.json`` and ``model.safetensors``.
        trainable: whether embeddings in few bits become parameters in the dtype of the model. By default
            they stay in few bits and are not trained.
        settings: further arguments of ``from_pretrained``, such as ``dtype`` or ``attn_implementation``.

    Returns:
        A model of the class that the configuration names, in evaluation mode, in the dtype of its weights.

    Raises:
        ValueError: the folder is incomplete or contains a plain model.
        ImportError: transformers is not installed.
    """
    path = Path(folder)
    config = read_config(path)
    if ENTRY not in config:
        raise ValueError(
            f"model {path}: its config.json has no entry '{ENTRY}': it is a plain model; load it with "
            "from_pretrained of transformers"
        )
    # Report an unreadable entry before transformers builds the model.
    with reading(path), torch.device("meta"):
        from_entry(config[ENTRY])
    plain = model_class(path, config)
    model, unexpected = read_model(path, _with_embeddings(plain), unpack if trainable else hold, **settings)
    check_none(path, "unexpected_keys", unexpected)
    model.__class__ = plain
    keep_packed(model)
    return model


def _with_embeddings(plain: Any) -> Any:
    """A subclass of a transformers class that is initialized with the embeddings of its configuration."""

    def init(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        plain.__init__(self, config, *arguments, **named)
        place(self, *from_entry(getattr(config, ENTRY)))

    # transformers chooses the loss, among other things, by the name of the class.
    return type(plain.__name__, (plain,), {"__init__": init, "__module__": plain.__module__})
