"""Models of checkpoints: building, description, and export to CTranslate2."""

from __future__ import annotations

import io
import os
import sys
from argparse import Namespace
from collections.abc import Container
from pathlib import Path
from typing import Any

import onmt.model_builder
import torch
from onmt.inputters.inputter import dict_to_vocabs
from onmt.utils.parse import ArgumentParser
from torch import nn

import shared_embeddings as se
from nmt.checkpoints import safetensors_of
from nmt.embeddings import count_model, shared_embeddings_of, words_module
from nmt.hooks import apply_patches
from nmt.length_control import has_length_control
from nmt.plan import OPTION_NAMES
from shared_embeddings.checkpoints import check_sizes, load_tensors
from shared_embeddings.utils.command_line import error_line
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import replacing

# Values of options that CTranslate2 supports; others end in a traceback or another model.
_EXPORTABLE: dict[str, Container[Any]] = {
    "copy_attn": (False,),
    "parallel_residual": (False,),
    "relative_positions_buckets": (0,),
    "sliding_window": (0,),
}
_EXPORTABLE_IN_TRANSLATION: dict[str, Container[Any]] = {
    "layer_norm": ("standard",),
    "max_relative_positions": range(sys.maxsize),  # -1 are rotary positions, -2 is ALiBi
    "norm_eps": (1e-5, 1e-6),
    "pos_ffn_activation_fn": ("relu", "gelu"),
}


# Options that set the sizes of a model.
_SIZES = (
    *("enc_layers", "dec_layers", "hidden_size", "enc_hid_size", "dec_hid_size", "transformer_ff"),
    *("word_vec_size", "src_word_vec_size", "tgt_word_vec_size", *OPTION_NAMES),
)


def build_from_checkpoint(path: str) -> tuple[nn.Module, dict[str, Any], Namespace, dict[str, Any]]:
    """Build the model of a checkpoint on the CPU; return it, its vocabularies, options and the checkpoint."""
    apply_patches()
    checkpoint = onmt.model_builder.load_checkpoint(path)
    options = ArgumentParser.ckpt_model_opts(checkpoint["opt"])
    ArgumentParser.update_model_opts(options)
    parts = {name: dict(checkpoint.get(name) or {}) for name in ("model", "generator")}
    tensors = {f"{part}.{name}": tensor for part, state in parts.items() for name, tensor in state.items()}
    if "model" not in checkpoint:
        for file in safetensors_of(path):
            tensors |= load_tensors(file, f"checkpoint {file}")
    sizes = {name: value for name, value in vars(options).items() if name in _SIZES}
    check_sizes(f"checkpoint {path}", sizes, tensors)
    vocabs = dict_to_vocabs(checkpoint["vocab"])
    model = onmt.model_builder.build_base_model(options, vocabs)
    if "model" in checkpoint:
        model.load_state_dict(parts)
    else:
        model.load_safe_state_dict(path.removesuffix(".pt"))
    return model.eval(), vocabs, options, checkpoint


def describe_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the step, parameter counts (see `nmt.embeddings.count_model`) and options of a checkpoint."""
    model, _, options, checkpoint = build_from_checkpoint(os.fspath(path))
    config = {name: value for name, value in vars(options).items() if not name.startswith("_")}
    optimizer = checkpoint.get("optim") or {}
    step = optimizer.get("training_step")
    return {"step": None if step is None else step - 1, **count_model(model), "config": config}


@torch.no_grad()
def dense_checkpoint(path: str) -> dict[str, Any]:
    """Return an equivalent checkpoint of a plain OpenNMT-py model."""
    model: Any
    model, _, options, checkpoint = build_from_checkpoint(path)
    shared = shared_embeddings_of(model)
    inner = {id(tensor) for embedding in shared for tensor in embedding.state_dict(keep_vars=True).values()}
    state = model.state_dict(keep_vars=True)
    body = {
        name: tensor.detach()
        for name, tensor in state.items()
        if id(tensor) not in inner and not name.startswith("generator.")
    }
    for side, stack in (("source", "encoder"), ("target", "decoder")):
        lookup = words_module(model, side)
        if isinstance(lookup, se.SharedEmbedding):
            body[f"{stack}.embeddings.make_embedding.emb_luts.0.weight"] = lookup.table().clone()
    scoring = words_module(model, "output")
    if isinstance(scoring, se.SharedEmbedding):
        if not scoring.has_linear_scores:
            raise UserError(
                f"format: ctranslate2 needs a linear output layer, but '{scoring.method}' has a two-step "
                "softmax; use format: pytorch with onmt_translate or onmt_server"
            )
        table, bias = scoring.output_table().clone(), scoring.output_bias()
        head = {"weight": table, "bias": table.new_zeros(len(table)) if bias is None else bias.clone()}
    else:
        head = {name: tensor.detach() for name, tensor in model.generator.state_dict().items()}
    for name in OPTION_NAMES:
        setattr(options, name, None)
    return {"model": body, "generator": head, "vocab": checkpoint["vocab"], "opt": options, "optim": None}


def export_ctranslate2(path: str, output: str, quantization: str | None) -> None:
    """Write a CTranslate2 model directory, or replace one, once it is complete."""
    import ctranslate2

    checkpoint = dense_checkpoint(path)
    opt = checkpoint["opt"]
    supported: dict[str, Container[Any]] = {**_EXPORTABLE}
    if opt.decoder_type != "transformer_lm":
        supported |= {**_EXPORTABLE_IN_TRANSLATION, "num_kv": (0, 1) if opt.multiquery else (0,)}
    if has_length_control(opt):
        supported["decoder_positions"] = ()
    for name, values in supported.items():
        if getattr(opt, name) not in values:
            raise UserError(
                f"format: ctranslate2 does not support {name}: {getattr(opt, name)}, which {path} has; use "
                "format: pytorch with onmt_translate or onmt_server"
            )
    # Two names of the same attention; CTranslate2 supports the older one.
    if opt.self_attn_type == "scaled-dot-flash":
        opt.self_attn_type = "scaled-dot"
    # The dense model is not written to disk. Tables in int8 get their codes and scales back.
    content = io.BytesIO()
    torch.save(checkpoint, content)
    content.seek(0)
    try:
        with replacing(Path(output)) as temporary:
            converter = ctranslate2.converters.OpenNMTPyConverter(content)
            converter.convert(str(temporary), force=True, quantization=quantization)
    except (ValueError, NotImplementedError) as error:
        reason = error_line(error)
        raise UserError(f"{path}: CTranslate2 does not support this model: {reason}") from error
