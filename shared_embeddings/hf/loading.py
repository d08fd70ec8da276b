"""Loading a model of Hugging Face whose embeddings were compressed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from shared_embeddings.hf.entry import ENTRY, from_entry, place
from shared_embeddings.hf.folder import check_none, model_class, read_config, read_model, reading


def load(folder: str | os.PathLike[str], **settings: Any) -> Any:
    """The model of a folder that `shared-embeddings compress`, `save` or ``save_pretrained`` wrote.

    Nothing is downloaded and no code of the folder is run.

    Args:
        folder: with ``config.json`` and ``model.safetensors``.
        settings: of ``from_pretrained`` of transformers, such as ``dtype`` or ``attn_implementation``.

    Returns:
        A model of the class that the configuration names, in evaluation mode, in the type of its weights.

    Raises:
        ValueError: the folder is incomplete, or holds a model without shared embeddings.
        ImportError: transformers is not installed.
    """
    path = Path(folder)
    config = read_config(path)
    if ENTRY not in config:
        raise ValueError(
            f"model {path}: its config.json has no entry '{ENTRY}': it is a plain model, which "
            "from_pretrained of transformers reads"
        )
    # An unreadable entry is reported before transformers builds the model.
    with reading(path), torch.device("meta"):
        from_entry(config[ENTRY])
    plain = model_class(path, config)
    model, unexpected = read_model(path, _with_embeddings(plain), **settings)
    check_none(path, "unexpected_keys", unexpected)
    model.__class__ = plain
    return model


def _with_embeddings(plain: Any) -> Any:
    """A class of transformers whose models begin with the embeddings that their configuration names."""

    def begin(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        plain.__init__(self, config, *arguments, **named)
        place(self, *from_entry(getattr(config, ENTRY)))

    # The name decides about the loss of the model, among other things.
    return type(plain.__name__, (plain,), {"__init__": begin, "__module__": plain.__module__})
