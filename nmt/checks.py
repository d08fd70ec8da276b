"""Checks of options before any work starts: numbers, files, devices, and the configuration of the server."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nmt.errors import UserError

# The least that a number may be; upstream divides by most of them, or goes on forever.
TRAINING = {
    "batch_size": 1,
    "valid_batch_size": 1,
    "accum_count": 1,
    "bucket_size": 1,
    "heads": 1,
    "valid_steps": 1,
    "report_every": 1,
    "save_checkpoint_steps": 0,
    "train_steps": 0,
}
TRANSLATION = {"beam_size": 1, "n_best": 1, "batch_size": 1, "max_length": 1}
SUBWORD_FILES = ("src_subword_model", "tgt_subword_model", "src_subword_vocab", "tgt_subword_vocab")
WARMED_UP = ("noam", "noamwd", "rsqrt")
# Options of translation that need attention to a source, and what they are set to where they do nothing.
ATTENDING = {"replace_unk": False, "attn_debug": False, "coverage_penalty": "none", "report_align": False}


def check_numbers(opt: Namespace, least: Mapping[str, int]) -> None:
    """Check numbers, and each of a list of them.

    Raises:
        UserError: names the first that is too small.
    """
    for name, limit in least.items():
        given = getattr(opt, name)
        for number in given if isinstance(given, list) else [given]:
            if number < limit:
                raise UserError(f"{name}: {number} is too small; wanted at least {limit}")


def check_features(opt: Namespace, vocabs: Mapping[str, Any]) -> None:
    """Check that words are translated with as many features as the model was trained with; without them they
    would be unknown.

    Args:
        opt: options of ``onmt_translate``.
        vocabs: of the model.

    Raises:
        UserError: names both numbers.
    """
    trained = len(vocabs.get("src_feats") or ())
    if opt.n_src_feats != trained:
        raise UserError(
            f"n_src_feats: is {opt.n_src_feats}, but the model was trained with {trained}; set it to that, "
            "and src_feats_defaults and transforms as in the training"
        )


def check_training_numbers(opt: Namespace) -> None:
    """Check the numbers of ``onmt_train``.

    Raises:
        UserError: names the first that is too small.
    """
    warmup = {"warmup_steps": 1} if opt.decay_method in WARMED_UP else {}
    check_numbers(opt, {**TRAINING, **warmup})


def check_subword_files(opt: Namespace) -> None:
    """Check that the files of the subword transforms are there.

    Raises:
        UserError: names the first that is not.
    """
    for name in SUBWORD_FILES:
        path = getattr(opt, name, None)
        if path and not Path(path).is_file():
            raise UserError(f"{name}: no such file: {path}; check the path")


def check_processes(opt: Namespace) -> None:
    """Check that the processes of ``onmt_train`` have what they run on.

    Raises:
        UserError: several processes, but none on this machine, or GPUs that torch does not find.
    """
    import torch

    if opt.world_size > 1 and not opt.gpu_ranks:
        raise UserError(
            f"world_size: {opt.world_size}, but gpu_ranks names no process of this machine; name them, such "
            "as gpu_ranks: [0, 1], or remove world_size"
        )
    if opt.gpu_ranks and not torch.cuda.is_available() and opt.gpu_backend != "gloo":
        raise UserError(
            f"gpu_ranks: {opt.gpu_ranks}, but torch finds no CUDA device; remove gpu_ranks and "
            "world_size, or set gpu_backend: gloo to train several processes on the CPU"
        )
    if torch.cuda.is_available() and len(opt.gpu_ranks) > torch.cuda.device_count():
        raise UserError(
            f"gpu_ranks: {opt.gpu_ranks}, but torch finds {torch.cuda.device_count()} CUDA devices; name one "
            "rank for each"
        )


def check_copying(opt: Namespace) -> None:
    """Check that a model that copies words has a source to copy them from.

    Raises:
        UserError: it has none.
    """
    if opt.copy_attn and opt.model_task == "lm":
        raise UserError("copy_attn: true needs a source to copy from, which model_task: lm lacks; remove it")


def check_generator(opt: Namespace) -> None:
    """Check the function of the output layer.

    Raises:
        UserError: it is one that OpenNMT-py 3.5 can neither train nor translate with.
    """
    if opt.generator_function != "softmax":
        raise UserError(
            f"generator_function: {opt.generator_function} does not work in OpenNMT-py 3.5, whose searches "
            "take a softmax; use softmax"
        )


def check_attention(opt: Namespace, model: Any) -> None:
    """Check that no language model is asked for its attention to a source.

    Raises:
        UserError: names the option.
    """
    if hasattr(model, "encoder"):
        return
    for name, unset in ATTENDING.items():
        if getattr(opt, name) != unset:
            raise UserError(
                f"{name}: needs attention to a source, which a language model does not have; remove it"
            )


def check_reports(opt: Namespace, decoder: Any) -> None:
    """Check that a translation can report what it is asked for.

    Raises:
        UserError: it cannot.
    """
    if opt.dump_beam:
        raise UserError("dump_beam: OpenNMT-py 3 does not write its beams any more; remove it")
    if opt.align_debug and not opt.report_align:
        raise UserError("align_debug: shows the alignments of report_align; set report_align, too")
    if not opt.report_align:
        return
    for part in getattr(decoder, "model_decoders", [decoder]):
        layers, wanted = len(getattr(part, "transformer_layers", ())), getattr(part, "alignment_layer", 0)
        if not -layers <= wanted < layers:
            raise UserError(
                f"report_align: takes the attention of layer {wanted} of a Transformer's decoder "
                f"(alignment_layer), of which this model has {layers}; remove it, or use attn_debug"
            )


def check_gpu(opt: Namespace) -> None:
    """Check that the GPU of a translation is there.

    Raises:
        UserError: it is not.
    """
    import torch

    if opt.gpu >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise UserError(f"gpu: {opt.gpu}, but torch finds {found} CUDA devices; remove it, or set it to -1")


def check_server_config(path: str) -> None:
    """Check the file that tells ``onmt_server`` its models, as far as upstream does not.

    Raises:
        UserError: it cannot be read, is not JSON, or names no models.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"model_config: {path}: {error.strerror}; check the path") from error
    except ValueError as error:
        raise UserError(f"model_config: {path}: is not JSON ({error}); correct it") from error
    models = content.get("models") if isinstance(content, dict) else None
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        raise UserError(
            f"model_config: {path}: has no list of models; write it like "
            '{"models": [{"id": 1, "model": "model.pt"}]}'
        )
