"""Models built from checkpoints, and their description."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

import onmt.model_builder
from onmt.inputters.inputter import dict_to_vocabs
from onmt.utils.parse import ArgumentParser
from torch import nn

from nmt.checkpoint.files import building_from
from nmt.model.embeddings import count_model
from nmt.patches.table import apply_patches


def build_from_checkpoint(path: str) -> tuple[nn.Module, dict[str, Any], Namespace, dict[str, Any]]:
    """Build the model of a checkpoint on the CPU.

    Returns:
        The model in evaluation mode, its vocabularies, its options, and the checkpoint.

    Raises:
        UserError: the checkpoint cannot be read or does not match its own options.
    """
    apply_patches()
    checkpoint = onmt.model_builder.load_checkpoint(path)
    with building_from(path):
        options = ArgumentParser.ckpt_model_opts(checkpoint["opt"])
        ArgumentParser.update_model_opts(options)
        vocabs = dict_to_vocabs(checkpoint["vocab"])
        model = onmt.model_builder.build_base_model(options, vocabs)
        if "model" in checkpoint:
            parts = {name: dict(checkpoint.get(name) or {}) for name in ("model", "generator")}
            model.load_state_dict(parts)
        else:
            model.load_safe_state_dict(path.removesuffix(".pt"))
    return model.eval(), vocabs, options, checkpoint


def describe_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the step, parameter counts (see `nmt.model.embeddings.count_model`) and options of a checkpoint.

    Raises:
        UserError: the checkpoint cannot be read or does not match its own options.
    """
    model, _, options, checkpoint = build_from_checkpoint(os.fspath(path))
    config = {name: value for name, value in vars(options).items() if not name.startswith("_")}
    optimizer = checkpoint.get("optim") or {}
    step = optimizer.get("training_step")
    return {"step": None if step is None else step - 1, **count_model(model), "config": config}
