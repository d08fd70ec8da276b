"""Load a compressed Hugging Face model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from shared_embeddings.hf.entry import KEY, find_entry, from_entry
from shared_embeddings.hf.folder import check_none, model_class, read_config, read_model, reading


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
        ValueError: the folder is incomplete or contains a plain model.
        ImportError: transformers is not installed.
    """
    path = Path(folder)
    config = read_config(path)
    entry = find_entry(config)
    if entry is None:
        raise ValueError(
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
