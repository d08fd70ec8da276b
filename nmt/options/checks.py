"""Checks of options and model sizes that OpenNMT-py lacks."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nmt.options.ranges import check_ranges
from shared_embeddings.errors import UserError

SUBWORD_FILES = ("src_subword_model", "tgt_subword_model", "src_subword_vocab", "tgt_subword_vocab")
WARMED_UP = ("noam", "noamwd", "rsqrt")
# Files that transforms require; with a shared vocabulary, the target uses those of the source.
NEEDED_FILES = {
    "bpe": ("src_subword_model", "tgt_subword_model"),
    "sentencepiece": ("src_subword_model", "tgt_subword_model"),
    "terminology": ("termbase_path",),
    "fuzzymatch": ("tm_path",),
    "inlinetags": ("tags_dictionary_path",),
}
# Translation options that need attention to a source, and the values that disable them.
ATTENDING = {"replace_unk": False, "attn_debug": False, "coverage_penalty": "none", "report_align": False}


def check_features(opt: Namespace, vocabs: Mapping[str, Any]) -> None:
    """Check that a translation has as many word features as the model.

    Args:
        opt: options of ``onmt_translate``.
        vocabs: vocabularies of the model.

    Raises:
        UserError: the numbers differ.
    """
    trained = len(vocabs.get("src_feats") or ())
    if opt.n_src_feats != trained:
        raise UserError(
            f"n_src_feats: is {opt.n_src_feats}, but the model was trained with {trained}; set it to "
            f"{trained}, "
            "and src_feats_defaults and transforms as in training"
        )


def check_training_numbers(opt: Namespace) -> None:
    """Check the numbers, names and schedules of ``onmt_train``.

    Raises:
        UserError: a value is out of range, or a schedule does not start at step 0 or is not increasing.
    """
    check_ranges(opt)
    if opt.decay_method in WARMED_UP and opt.warmup_steps < 1:
        raise UserError(f"warmup_steps: {opt.warmup_steps} is too small; decay_method needs at least 1")
    for name in ("accum_steps", "dropout_steps"):
        steps = getattr(opt, name)
        if steps[0] != 0 or sorted(set(steps)) != steps:
            raise UserError(
                f"{name}: {steps} is not an increasing list of steps from 0; write it like [0, 5000]"
            )


def check_translation(opt: Namespace) -> None:
    """Check the numbers and names of ``onmt_translate``.

    Raises:
        UserError: a value is out of range, or two options contradict each other.
    """
    check_ranges(opt)
    if opt.n_best > opt.beam_size:
        raise UserError(
            f"n_best: {opt.n_best} is more than beam_size {opt.beam_size}; lower n_best or raise beam_size"
        )
    if opt.min_length > opt.max_length:
        raise UserError(
            f"min_length: {opt.min_length} is more than max_length {opt.max_length}; lower "
            "min_length or raise max_length"
        )
    if opt.phrase_table and not opt.replace_unk:
        raise UserError("phrase_table: has no effect without replace_unk; set replace_unk, or remove it")


def check_counting(opt: Namespace) -> None:
    """Check the numbers and names of ``onmt_build_vocab``.

    Raises:
        UserError: a value is out of range, or the subword type is missing.
    """
    check_ranges(opt)
    if opt.n_sample in (0, 1):
        raise UserError(f"n_sample: {opt.n_sample} is too small; expected at least 2, or -1 for all lines")
    if opt.learn_subwords and opt.src_subword_type == "none":
        raise UserError("learn_subwords: needs src_subword_type: bpe or sentencepiece; set it")


def check_vocabulary_limits(opt: Namespace, words: int) -> None:
    """Check that a search does not consider more words than the vocabulary has.

    Args:
        opt: options of ``onmt_translate``.
        words: size of the target vocabulary.

    Raises:
        UserError: an option is too large.
    """
    for name in ("random_sampling_topk", "beam_size"):
        if getattr(opt, name) > words:
            raise UserError(
                f"{name}: {getattr(opt, name)} is more than the {words} words of the vocabulary; lower it"
            )


def check_transforms(opt: Namespace, corpora: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that transforms have the files that they need.

    Args:
        opt: options of a command.
        corpora: the option ``data``.

    Raises:
        UserError: a file is not set or missing.
    """
    prior = getattr(opt, "lm_prior_model", None)
    if prior and not Path(prior).exists():
        raise UserError(f"lm_prior_model: no such file or folder: {prior}; check the path")
    if getattr(opt, "learn_subwords", False):
        return
    asked = {
        *opt.transforms,
        *(name for corpus in corpora.values() for name in corpus.get("transforms") or ()),
    }
    for transform, files in NEEDED_FILES.items():
        for name in files if transform in asked else ():
            if not getattr(opt, name) and not (name.startswith("tgt_") and opt.share_vocab):
                raise UserError(f"transforms: {transform} needs {name}, which is not set; name the file")
    for side in ("src", "tgt") if "onmt_tokenize" in asked else ():
        kind = getattr(opt, f"{side}_subword_type")
        if kind != "none" and not getattr(opt, f"{side}_subword_model"):
            raise UserError(
                f"{side}_subword_type: {kind} needs {side}_subword_model, which is not set; set it"
            )


def check_processes(opt: Namespace) -> None:
    """Check that the processes of ``onmt_train`` have devices.

    Raises:
        UserError: there are several processes, but none on this machine, or too few GPUs.
    """
    import torch

    if opt.world_size > 1 and not opt.gpu_ranks:
        raise UserError(
            f"world_size: {opt.world_size}, but gpu_ranks is empty; set the ranks of this machine, such as "
            "gpu_ranks: [0, 1], or remove world_size"
        )
    if opt.gpu_ranks and not torch.cuda.is_available() and opt.gpu_backend != "gloo":
        raise UserError(
            f"gpu_ranks: {opt.gpu_ranks}, but torch finds no CUDA device; remove gpu_ranks and "
            "world_size, or set gpu_backend: gloo to train several processes on the CPU"
        )
    if torch.cuda.is_available() and len(opt.gpu_ranks) > torch.cuda.device_count():
        raise UserError(
            f"gpu_ranks: {opt.gpu_ranks}, but torch finds {torch.cuda.device_count()} CUDA devices; set one "
            "rank per device"
        )


def check_copying(opt: Namespace) -> None:
    """Check that a model with copy attention has a source; raises `UserError` otherwise."""
    if opt.copy_attn and opt.model_task == "lm":
        raise UserError("copy_attn: true needs a source to copy from, which model_task: lm lacks; remove it")


def check_generator(opt: Namespace) -> None:
    """Check the function of the output layer.

    Raises:
        UserError: OpenNMT-py 3.5 does not support it.
    """
    if opt.generator_function != "softmax":
        raise UserError(
            f"generator_function: {opt.generator_function} does not work in OpenNMT-py 3.5, whose search "
            "needs a softmax; use softmax"
        )


def check_attention(opt: Namespace, model: Any) -> None:
    """Check that a language model is not translated with options that need attention to a source.

    Raises:
        UserError: one is set.
    """
    if hasattr(model, "encoder"):
        return
    for name, unset in ATTENDING.items():
        if getattr(opt, name) != unset:
            raise UserError(
                f"{name}: needs attention to a source, which a language model does not have; remove it"
            )


def check_reports(opt: Namespace, decoder: Any) -> None:
    """Check that a translation can report beams and alignments; raises `UserError` otherwise."""
    if opt.dump_beam:
        raise UserError("dump_beam: is not supported by OpenNMT-py 3; remove it")
    if opt.align_debug and not opt.report_align:
        raise UserError("align_debug: needs report_align; set it")
    if not opt.report_align:
        return
    for part in getattr(decoder, "model_decoders", [decoder]):
        layers, wanted = len(getattr(part, "transformer_layers", ())), getattr(part, "alignment_layer", 0)
        if not -layers <= wanted < layers:
            raise UserError(
                f"report_align: uses the attention of decoder layer {wanted} (alignment_layer), but this "
                f"model has {layers} Transformer layers; remove it, or use attn_debug"
            )


def check_gpu(opt: Namespace) -> None:
    """Check that the GPU of a translation exists; raises `UserError` otherwise."""
    import torch

    if opt.gpu >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise UserError(f"gpu: {opt.gpu}, but torch finds {found} CUDA devices; remove it, or set it to -1")


def check_one_process(opt: Namespace) -> None:
    """Check that a translation uses one process; raises `UserError` otherwise."""
    if opt.world_size > 1:
        raise UserError(f"world_size: {opt.world_size}, but a translation runs in one process; remove it")


def check_prefix(opt: Namespace) -> None:
    """Check that ``tgt_file_prefix`` has prefixes; raises `UserError` otherwise."""
    if opt.tgt_file_prefix and not opt.tgt and not ("prefix" in opt.transforms and opt.tgt_prefix):
        raise UserError("tgt_file_prefix: needs a file of target prefixes; name it with -tgt")


# Layers that need word vectors as wide as their hidden states.
NEED_EQUAL_WIDTHS = ("transformer", "transformer_lm", "mean")
TRANSFORMERS = ("transformer", "transformer_lm")
# A parameter and its gradient, in single precision.
BYTES_IN_TRAINING = 8
DECAYS_BY_WIDTH = ("noam", "noamwd")


def check_model_sizes(opt: Namespace) -> None:
    """Check that the sizes of a new model are consistent.

    Args:
        opt: options of ``onmt_train``, after upstream's ``update_model_opts``.

    Raises:
        UserError: they are not.
    """
    parts = [opt.decoder_type] if opt.model_task == "lm" else [opt.encoder_type, opt.decoder_type]
    _check_widths(opt)
    if any(part in TRANSFORMERS for part in parts):
        _check_heads(opt)
    if "brnn" in parts and opt.enc_hid_size % 2:
        raise UserError(
            f"hidden_size: {opt.enc_hid_size} is odd, but encoder_type: brnn splits it between two "
            "directions; choose an even number"
        )
    if opt.encoder_type == "cnn" and "cnn" in parts and opt.cnn_kernel_width % 2 == 0:
        raise UserError(
            f"cnn_kernel_width: {opt.cnn_kernel_width} is even, but encoder_type: cnn needs an odd one; "
            "choose an odd number"
        )
    if opt.decay_method in DECAYS_BY_WIDTH and opt.hidden_size < 1:
        raise UserError(
            f"decay_method: {opt.decay_method} depends on hidden_size, which is not set; set it instead of "
            "enc_hid_size and dec_hid_size"
        )


def _check_widths(opt: Namespace) -> None:
    """Check the widths of word vectors against those of hidden states."""
    sides = {
        "src": (opt.encoder_type, opt.src_word_vec_size, opt.enc_hid_size, opt.n_src_feats),
        "tgt": (opt.decoder_type, opt.tgt_word_vec_size, opt.dec_hid_size, 0),
    }
    if opt.model_task == "lm":
        del sides["src"]
    for side, (kind, width, hidden, features) in sides.items():
        if kind in NEED_EQUAL_WIDTHS and width != hidden and not features:
            raise UserError(
                f"{side}_word_vec_size: {width} differs from hidden_size {hidden}, which a {kind} does not "
                "support; set word_vec_size equal to hidden_size"
            )
    if opt.share_embeddings and opt.src_word_vec_size != opt.tgt_word_vec_size:
        raise UserError(
            f"share_embeddings: true needs one width, but src_word_vec_size is {opt.src_word_vec_size} and "
            f"tgt_word_vec_size {opt.tgt_word_vec_size}; set word_vec_size"
        )


def _check_heads(opt: Namespace) -> None:
    """Check the number of heads and experts of a Transformer."""
    hidden, heads = opt.dec_hid_size, opt.heads
    if hidden % heads:
        raise UserError(f"heads: {heads} does not divide hidden_size {hidden}; change one of them")
    if opt.num_kv and heads % opt.num_kv:
        raise UserError(f"num_kv: {opt.num_kv} does not divide heads {heads}; change one of them")
    if opt.alignment_heads > heads:
        raise UserError(f"alignment_heads: {opt.alignment_heads} is more than heads {heads}; lower it")
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
            "relative_positions_buckets: needs max_relative_positions, the largest distance; set it"
        )


def check_memory(opt: Namespace, vocabs: dict[str, Any]) -> None:
    """Check that memory suffices for the parameters of a new model and their gradients.

    Args:
        opt: options of ``onmt_train``, after upstream's ``update_model_opts``.
        vocabs: vocabularies of the model.

    Raises:
        UserError: it does not.
    """
    from onmt.model_builder import build_base_model

    room = _room(opt)
    try:
        with torch.device("meta"):
            model = build_base_model(opt, vocabs)
    except RuntimeError as error:
        # OpenNMT-py allocates some tensors on the CPU regardless of the default device.
        if "allocate memory" not in str(error):
            raise
        raise UserError(_too_large("too many parameters to count", room)) from error
    count = sum(parameter.numel() for parameter in model.parameters())
    if count * BYTES_IN_TRAINING > room:
        needed = f"{count:,} parameters, which need {_gigabytes(count * BYTES_IN_TRAINING)} with gradients"
        raise UserError(_too_large(needed, room))


def _too_large(model: str, room: int) -> str:
    """Return the message about a model that is too large."""
    return (
        f"the model has {model}, but memory is {_gigabytes(room)}; reduce hidden_size, "
        "transformer_ff, layers "
        "or the vocabulary"
    )


def _gigabytes(number: int) -> str:
    """Format a number of bytes."""
    return f"{number / 2**30:,.1f} GiB"


def _room(opt: Namespace) -> int:
    """Return the memory of the model's device in bytes."""
    if opt.gpu_ranks and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
