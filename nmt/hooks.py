"""The seams of OpenNMT-py for shared embeddings: each function takes the place of one of OpenNMT-py.

`nmt.fixes` has the faults of OpenNMT-py that are fixed. `apply_patches` applies both.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from contextvars import ContextVar
from typing import Any

import onmt.model_builder
import onmt.opts
import onmt.utils.loss
import torch
from onmt.decoders.transformer import TransformerDecoderBase
from onmt.models import model_saver
from onmt.models.model import BaseModel, NMTModel
from onmt.modules.copy_generator import CopyGenerator
from onmt.trainer import Trainer
from onmt.translate import translator
from onmt.utils import Statistics
from onmt.utils.logging import logger
from onmt.utils.loss import LossCompute
from torch import Tensor, nn

import nmt.options  # noqa: F401  # registers the options of training
import shared_embeddings as se
from nmt import checkpoints, embeddings, length_control, transforms
from nmt import plan as plans
from nmt.fixes import apply_registered, replace, wrap
from shared_embeddings.accounting import distinct_state
from shared_embeddings.nn.layers import Dropout
from shared_embeddings.quant.packed_tensor import unfreeze
from shared_embeddings.quant.storage import hold
from shared_embeddings.utils.command_line import positive
from shared_embeddings.utils.paths import existing_file

# Applies all hooks and fixes; later calls do nothing
apply_patches = apply_registered


# Options; `nmt.options` has those of training


@wrap("translate_opts", onmt.opts)
def add_translation_options(original: Any, parser: Any) -> None:
    """Add the options for desired lengths; transforms default to the checkpoint's, and may be ``none``."""
    original(parser)
    add = parser.add_argument_group("Length control").add_mutually_exclusive_group().add_argument
    text = "Desired number of tokens per translation, for models with length control"
    add("--desired_length", "-desired_length", type=positive, default=None, metavar="N", help=text)
    text = "File with the desired length of each line of the source"
    add("--desired_lengths", "-desired_lengths", type=existing_file, metavar="FILE", help=text)
    (action,) = (action for action in parser._actions if action.dest == "transforms")
    action.choices = [name for name in action.choices if name not in transforms.NEEDING_TARGETS]
    action.choices.append(transforms.NONE)
    action.help = (
        "Transforms of the source, undone on the output (default: those of the training). "
        f"{transforms.NONE}: the text is tokenized."
    )


# Models


@wrap("build_base_model", onmt.model_builder)
def build_base_model(original: Any, model_opt: Namespace, vocabs: dict[str, Any]) -> nn.Module:
    """Build the model with plain, untied tables, then insert embeddings, positions and fast dropout."""
    length_control.check_positions(model_opt)
    plan, built_opt = plans.read_plan(model_opt), model_opt
    if plan is not None:
        built_opt = copy.copy(model_opt)
        built_opt.share_embeddings = False
        built_opt.share_decoder_embeddings = model_opt.share_decoder_embeddings and plan.target is None
    model: Any = original(built_opt, vocabs)
    if plan is not None:
        embeddings.place_embeddings(model, plan, plans.build_embeddings(plan, model_opt, vocabs))
    if length_control.has_length_control(model_opt):
        embedding = model.decoder.embeddings.make_embedding
        names, layout = getattr(model_opt, length_control.OPTION), model_opt.position_encoding_type
        embedding.pe = length_control.LengthControlledPositions(embedding.pe.dim, names, layout)
    # The masks of nn.Dropout take a sixth of the training time on CPUs.
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Dropout:
                setattr(module, name, Dropout(child.p))
    return model


@wrap("build_model", onmt.model_builder)
def build_model(
    original: Any, model_opt: Namespace, opt: Namespace, vocabs: Any, checkpoint: Any, device_id: int
) -> nn.Module:
    """Initialize the embeddings of a new model last; make those of a loaded one trainable."""
    model: nn.Module = original(model_opt, opt, vocabs, checkpoint, device_id)
    if checkpoint is None:
        for embedding in embeddings.shared_embeddings_of(model):
            embedding.reset_parameters()
    else:
        unfreeze(model)
    return model


# Checkpoints

# The models that `build_translator` reads.
_translated: ContextVar[list[transforms.Recorded] | None] = ContextVar("translated", default=None)


@wrap("load_state_dict", BaseModel)
def load_state_dict(
    original: Any,
    self: nn.Module,
    checkpoint: dict[str, Any],
    precision: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    strict: bool = True,
    offset: int = 0,
) -> None:
    """Load models with shared embeddings, whose checkpoints have each tensor once.

    Also models with copy generators, whose tensors OpenNMT-py saves under other names than it loads.
    """
    if not (embeddings.shared_embeddings_of(self) or isinstance(self.generator, CopyGenerator)):
        original(self, checkpoint, precision, torch.device(device), strict, offset)
        return
    embeddings.load_unique_state(
        self, checkpoints.join_generator(checkpoint["model"], checkpoint.get("generator"))
    )
    if precision != torch.int8:
        self.to(precision)
    self.to(device)


@replace("load_safe_state_dict", BaseModel)
def load_safe_state_dict(
    self: Any,
    model_path: str,
    precision: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    strict: bool = True,
    offset: int = 0,
) -> None:
    """Load weights from one safetensors file or several; OpenNMT-py finds numbered ones only."""
    stored = checkpoints.read_safetensors(f"{model_path}.pt", hold)
    body, head = checkpoints.split_generator(embeddings.fill_aliases(self, stored))
    parts = {"model": body, "generator": head}
    self.load_state_dict(parts, precision, torch.device(device), strict, offset)


@wrap("load_checkpoint", model_saver)
def load_checkpoint(original: Any, ckpt_path: str | None) -> dict[str, Any] | None:
    """Keep packed tables packed, and turn errors while reading into one line."""
    if not ckpt_path:
        return None
    with checkpoints.checkpoint_errors(ckpt_path):
        checkpoint = original(ckpt_path)
        checkpoints.check_weights(ckpt_path, checkpoint)
        checkpoint = checkpoints.open_weights(checkpoint, hold)
    if (models := _translated.get()) is not None:
        stored = checkpoint.get(checkpoints.SUBWORDS, {})
        files = {name: content.numpy().tobytes() for name, content in stored.items()}
        options = dict(vars(checkpoint["opt"]))
        models.append(transforms.Recorded(ckpt_path, options, checkpoint["vocab"], files))
    return checkpoint


@wrap("save", model_saver.ModelSaverBase)
def keep_trained(original: Any, self: Any, step: int, moving_average: list[Tensor] | None = None) -> Any:
    """Keep the parameters that OpenNMT-py replaces by their averages while it saves them."""
    named = dict(self.model.named_parameters()) if moving_average else {}
    # The first average is the parameter itself.
    pairs = zip(moving_average or [], named.values())
    is_first = all(mean.data_ptr() == parameter.data_ptr() for mean, parameter in pairs)
    self.trained = None if is_first else {name: parameter.detach() for name, parameter in named.items()}
    try:
        return original(self, step, moving_average)
    finally:
        self.trained = None


@wrap("_save", model_saver.ModelSaver)
@wrap("_st_save", model_saver.ModelSaver)
def save_checkpoint(original: Any, self: Any, step: int, model: nn.Module) -> Any:
    """Write tied tensors once, atomically, with the state for exact resumption."""
    partial = getattr(self.model_opt, "lora_layers", None) or getattr(self.model_opt, "lora_embedding", False)
    if partial or getattr(self.model_opt, "parallel_mode", "") == "tensor_parallel":
        return original(self, step, model)
    resume_state = getattr(self, "resume_state", None)
    saved = {
        "vocab": model_saver.vocabs_to_dict(self.vocabs),
        "opt": embeddings.options_without_files(self.model_opt, model),
        "optim": self.optim.state_dict(),
        "resume": resume_state() if resume_state else None,
        "run": getattr(self, "run", None),
        "trained": getattr(self, "trained", None),
        **transforms.stored_files(self.model_opt),
    }
    if not all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
        raise checkpoints.diverged(step, "a parameter is not finite")
    distributed, base = torch.distributed.is_initialized(), f"{self.base_path}_step_{step}"
    files: tuple[str | None, str | None] = (None, None)
    if not distributed or torch.distributed.get_rank() == 0:
        logger.info(f"Saving checkpoint {base}.pt")
        # Models with shared embeddings have each tied tensor once.
        is_shared = bool(embeddings.shared_embeddings_of(model))
        state = embeddings.without_positions(distinct_state(model)) if is_shared else model.state_dict()
        files = checkpoints.write_model(state, saved, f"{base}.pt", self.save_format)
    if distributed:
        torch.distributed.barrier()
    return files


# Training


@wrap("forward", LossCompute)
def compute_loss(
    original: Any,
    self: Any,
    batch: dict[str, Any],
    output: Tensor,
    attns: Any,
    trunc_start: int = 0,
    trunc_size: int | None = None,
) -> Any:
    """Compute the loss of a shared output layer without materializing all ``N x V`` scores.

    Losses that need the scores (language model priors, sparsemax, alignment, coverage) use OpenNMT-py's code.
    """
    plain = (
        isinstance(self.generator, embeddings.SharedGenerator)
        and isinstance(self.criterion, nn.CrossEntropyLoss)
        and self.lambda_align == 0.0
        and self.lambda_coverage == 0.0
        and self.lm_generator is None
        and self.lm_prior_model is None
    )
    if not plain:
        return original(self, batch, output, attns, trunc_start, trunc_size)
    size = batch["tgt"].size(1) - trunc_start if trunc_size is None else trunc_size
    first, last = trunc_start + self.tgt_shift_index, trunc_start + size
    targets = batch["tgt"][:, first:last, 0].reshape(-1)  # (N,)
    hidden = output.reshape(-1, output.size(-1))  # (N, D)
    loss, predictions = self.generator.embedding.cross_entropy_and_predictions(
        hidden,
        targets,
        ignore_index=self.criterion.ignore_index,
        label_smoothing=self.criterion.label_smoothing,
        reduction="sum",
    )
    real = targets.ne(self.criterion.ignore_index)
    sentences = len(batch["srclen"]) if trunc_start == 0 else 0
    statistics = Statistics(
        loss=loss.item(),
        n_batchs=1 if sentences else 0,
        n_sents=sentences,
        n_words=int(real.sum()),
        n_correct=int((predictions.eq(targets) & real).sum()),
    )
    return loss, statistics


@wrap("_maybe_update_dropout", Trainer)
def count_updates(original: Any, self: Any, step: int) -> None:
    """Set the number of optimizer updates in shared embeddings, whose dropout ends on schedule."""
    original(self, step)
    se.set_updates(self.model, step - 1)  # OpenNMT-py counts from 1


# Translation


@wrap("build_translator", translator)
def build_translator(original: Any, opt: Namespace, *args: Any, **kwargs: Any) -> Any:
    """Complete the transforms with those of the models, and pass desired lengths to the translator."""
    models: list[transforms.Recorded] = []
    token = _translated.set(models)
    try:
        built = original(opt, *args, **kwargs)
    finally:
        _translated.reset(token)
    transforms.complete(opt, models)
    built.tgt_file_prefix = opt.tgt_file_prefix
    length_control.prepare_translator(built, opt)
    return built


@wrap("translate_batch", translator.Translator)
def set_desired_lengths(original: Any, self: Any, batch: dict[str, Any], attn_debug: bool) -> Any:
    """Set the desired lengths of a batch before it is translated."""
    for positions in length_control.positions_of(self.model):
        desired = self.desired
        if isinstance(desired, int):
            desired = [desired] * len(batch["srclen"])
        else:
            desired = [desired[number] for number in batch["cid_line_number"]]
        positions.set_lengths(torch.tensor(desired, device=batch["srclen"].device))
    return original(self, batch, attn_debug)


@wrap("forward", NMTModel)
def set_target_lengths(original: Any, self: Any, src: Tensor, tgt: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Set the lengths of the targets ``(B, T, 1)`` as desired lengths before a training step."""
    for positions in length_control.positions_of(self):
        is_token = tgt[:, :, 0].ne(self.decoder.embeddings.word_padding_idx)
        positions.set_lengths(is_token.sum(dim=1) - 2)  # without start and end
    return original(self, src, tgt, *args, **kwargs)


@wrap("init_state", TransformerDecoderBase)
def start_lengths(original: Any, self: Any, src: Any, enc_out: Any, enc_final_hs: Any) -> None:
    """Start decoding with the desired lengths of the batch."""
    original(self, src, enc_out, enc_final_hs)
    for positions in length_control.positions_of(self):
        batch = positions.batch_lengths
        assert batch is not None, "set_lengths comes first"
        positions.lengths = batch.repeat_interleave(len(src) // len(batch))


@wrap("map_state", TransformerDecoderBase)
def map_lengths(original: Any, self: Any, change: Any) -> None:
    """Repeat, reorder and drop lengths like the other rows of the decoder state."""
    original(self, change)
    for positions in length_control.positions_of(self):
        if positions.lengths is not None:
            positions.lengths = change(positions.lengths, 0)
