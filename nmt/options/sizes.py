"""Whether the sizes of a translation model fit each other, and this machine."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

import torch

from shared_embeddings.errors import UserError

# Their layers have no map from the width of the word vectors to that of the hidden states.
AS_WIDE_AS_WORDS = ("transformer", "transformer_lm", "mean")
TRANSFORMERS = ("transformer", "transformer_lm")
# A parameter and its gradient, in single precision.
BYTES_IN_TRAINING = 8
DECAYS_BY_WIDTH = ("noam", "noamwd")


def check_model_sizes(opt: Namespace) -> None:
    """Check that the sizes of a new model fit each other.

    Args:
        opt: options of ``onmt_train``, after upstream's ``update_model_opts``.

    Raises:
        UserError: names the options that do not fit, and what to set.
    """
    parts = [opt.decoder_type] if opt.model_task == "lm" else [opt.encoder_type, opt.decoder_type]
    _check_widths(opt)
    if any(part in TRANSFORMERS for part in parts):
        _check_heads(opt)
    if "brnn" in parts and opt.enc_hid_size % 2:
        raise UserError(
            f"hidden_size: {opt.enc_hid_size} is odd, but encoder_type: brnn has half of it in each "
            "direction; choose an even number"
        )
    if opt.encoder_type == "cnn" and "cnn" in parts and opt.cnn_kernel_width % 2 == 0:
        raise UserError(
            f"cnn_kernel_width: {opt.cnn_kernel_width} is even, which encoder_type: cnn cannot center; "
            "choose an odd number"
        )
    if opt.decay_method in DECAYS_BY_WIDTH and opt.hidden_size < 1:
        raise UserError(
            f"decay_method: {opt.decay_method} depends on hidden_size, which is not set; set it in place of "
            "enc_hid_size and dec_hid_size"
        )


def _check_widths(opt: Namespace) -> None:
    """Check the width of the word vectors against that of the hidden states."""
    sides = {
        "src": (opt.encoder_type, opt.src_word_vec_size, opt.enc_hid_size, opt.n_src_feats),
        "tgt": (opt.decoder_type, opt.tgt_word_vec_size, opt.dec_hid_size, 0),
    }
    if opt.model_task == "lm":
        del sides["src"]
    for side, (kind, width, hidden, features) in sides.items():
        if kind in AS_WIDE_AS_WORDS and width != hidden and not features:
            raise UserError(
                f"{side}_word_vec_size: {width} does not fit a {kind} of hidden_size {hidden}, which has no "
                "map between them; set word_vec_size equal to hidden_size"
            )
    if opt.share_embeddings and opt.src_word_vec_size != opt.tgt_word_vec_size:
        raise UserError(
            f"share_embeddings: true needs one width, but src_word_vec_size is {opt.src_word_vec_size} and "
            f"tgt_word_vec_size {opt.tgt_word_vec_size}; set word_vec_size"
        )


def _check_heads(opt: Namespace) -> None:
    """Check that the heads of a Transformer's attention divide what they share."""
    hidden, heads = opt.dec_hid_size, opt.heads
    if hidden % heads:
        raise UserError(f"heads: {heads} do not divide hidden_size {hidden}; change one of them")
    if opt.num_kv and heads % opt.num_kv:
        raise UserError(f"num_kv: {opt.num_kv} does not divide heads {heads}; change one of them")
    if opt.alignment_heads > heads:
        raise UserError(f"alignment_heads: {opt.alignment_heads} are more than heads {heads}; lower it")
    if opt.num_experts and opt.num_experts_per_tok > opt.num_experts:
        raise UserError(
            f"num_experts_per_tok: {opt.num_experts_per_tok} is more than num_experts {opt.num_experts}; "
            "lower it"
        )
    width = hidden // heads
    if opt.max_relative_positions == -1 and (opt.rotary_dim > width or (opt.rotary_dim or width) % 2):
        raise UserError(
            f"rotary_dim: {opt.rotary_dim or width} must be even and at most the {width} dimensions of a "
            "head (hidden_size / heads); change it, or heads"
        )
    if opt.relative_positions_buckets and opt.max_relative_positions < 1:
        raise UserError(
            "relative_positions_buckets: needs max_relative_positions, the largest distance; set it, too"
        )


def check_memory(opt: Namespace, vocabs: dict[str, Any]) -> None:
    """Check that this machine has room for the parameters of a new model and their gradients.

    Args:
        opt: options of ``onmt_train``, after upstream's ``update_model_opts``.
        vocabs: of the model.

    Raises:
        UserError: says how large both are.
    """
    from onmt.model_builder import build_base_model

    room = _room(opt)
    try:
        with torch.device("meta"):
            model = build_base_model(opt, vocabs)
    except RuntimeError as error:
        # Upstream gives some of its tensors a place on the CPU, whatever the default.
        if "allocate memory" not in str(error):
            raise
        raise UserError(_too_large("more parameters than can be counted here", room)) from error
    count = sum(parameter.numel() for parameter in model.parameters())
    if count * BYTES_IN_TRAINING > room:
        needed = f"{count:,} parameters, which take {_gigabytes(count * BYTES_IN_TRAINING)} with gradients"
        raise UserError(_too_large(needed, room))


def _too_large(model: str, room: int) -> str:
    """Return the message about a model without enough room."""
    return (
        f"the model of these sizes has {model}, and there are {_gigabytes(room)}; make hidden_size, "
        "transformer_ff, layers or the vocabulary smaller"
    )


def _gigabytes(number: int) -> str:
    """Return a number of bytes, for a message."""
    return f"{number / 2**30:,.1f} GiB"


def _room(opt: Namespace) -> int:
    """Return the bytes of memory where the model is to be: of a GPU, or of this machine."""
    if opt.gpu_ranks and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
