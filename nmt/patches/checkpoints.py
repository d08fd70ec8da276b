"""Patches of checkpoints: tied tensors stored once, atomic writing, reading without running code."""

from __future__ import annotations

from typing import Any

import torch
from onmt.models.model_saver import vocabs_to_dict
from onmt.modules.copy_generator import CopyGenerator
from onmt.utils.logging import logger
from torch import nn

from nmt.checkpoint.checkpoint import load_weights, read_safetensors, write_step
from nmt.checkpoint.files import (
    checkpoint_errors,
    reading_checkpoint,
    split_generator,
    verify_checkpoint,
    with_unpacked_tensors,
)
from nmt.data.transforms import stored_files
from nmt.model.embeddings import fill_aliases, options_without_files, shared_embeddings_of
from nmt.train.progress import check_finite
from shared_embeddings.errors import UserError
from shared_embeddings.quant.storage import hold
from shared_embeddings.utils.interrupts import RESUME, signals_delayed


def with_unique_tensors(original: Any) -> Any:
    """Load models with shared embeddings, whose checkpoints have each tensor once.

    Also models with copy generators, whose tensors OpenNMT-py saves under other names than it loads.
    """

    def load_state_dict(
        self: nn.Module,
        checkpoint: dict[str, Any],
        precision: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        strict: bool = True,
        offset: int = 0,
    ) -> None:
        if not (shared_embeddings_of(self) or isinstance(self.generator, CopyGenerator)):
            original(self, checkpoint, precision, torch.device(device), strict, offset)
            return
        load_weights(self, checkpoint["model"], checkpoint.get("generator"))
        if precision != torch.int8:
            self.to(precision)
        self.to(device)

    return load_state_dict


def load_safe_state_dict(
    self: Any,
    model_path: str,
    precision: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    strict: bool = True,
    offset: int = 0,
) -> None:
    """Load weights from one safetensors file or several; OpenNMT-py finds numbered ones only."""
    body, head = split_generator(fill_aliases(self, read_safetensors(f"{model_path}.pt", hold)))
    parts = {"model": body, "generator": head}
    self.load_state_dict(
        parts, precision=precision, device=torch.device(device), strict=strict, offset=offset
    )


def with_verification(original: Any) -> Any:
    """Verify checkpoints, and turn errors while reading them into one line."""

    def load_checkpoint(ckpt_path: str | None) -> dict[str, Any] | None:
        if not ckpt_path:
            return None
        verify_checkpoint(ckpt_path)
        with reading_checkpoint(ckpt_path):
            return with_unpacked_tensors(ckpt_path, original(ckpt_path), hold)

    return load_checkpoint


def with_safe_vectors(original: Any) -> Any:
    """Read pretrained vectors without running code, and turn errors into one line."""

    def load_pretrained_vectors(self: Any, emb_file: str | None) -> None:
        if emb_file:
            with reading_checkpoint(emb_file):
                torch.load(emb_file, map_location="cpu", weights_only=True)
                original(self, emb_file)

    return load_pretrained_vectors


def with_model_errors(original: Any) -> Any:
    """Turn the errors of a checkpoint that does not match its own options into one line."""

    def load_test_model(opt: Any, device_id: int = 0, model_path: str | None = None) -> Any:
        path = opt.models[0] if model_path is None else model_path
        with checkpoint_errors(path):
            return original(opt, device_id, path)

    return load_test_model


def with_atomic_saving(original: Any) -> Any:
    """Write checkpoints atomically, with the state for exact resumption."""

    def save(self: Any, step: int, model: nn.Module) -> tuple[str | None, str | None]:
        partial = getattr(self.model_opt, "lora_layers", None) or getattr(
            self.model_opt, "lora_embedding", False
        )
        if partial or getattr(self.model_opt, "parallel_mode", "") == "tensor_parallel":
            return original(self, step, model)  # type: ignore[no-any-return]
        resume_state = getattr(self, "resume_state", None)
        saved = {
            "vocab": vocabs_to_dict(self.vocabs),
            "opt": options_without_files(self.model_opt, model),
            "optim": self.optim.state_dict(),
            "resume": resume_state() if resume_state else None,
            "run": getattr(self, "run", None),
            **stored_files(self.model_opt),
        }
        check_finite(model, step)
        distributed = torch.distributed.is_initialized()
        files: tuple[str | None, str | None] = (None, None)
        if not distributed or torch.distributed.get_rank() == 0:
            logger.info(f"Saving checkpoint {self.base_path}_step_{step}.pt")
            files = _written(model, saved, f"{self.base_path}_step_{step}", self.save_format)
        if distributed:
            torch.distributed.barrier()
        return files

    return save


def _written(model: nn.Module, saved: dict[str, Any], base: str, save_format: str) -> tuple[str, str | None]:
    """Write the checkpoint of one step without interruption by signals, and return its files."""
    try:
        with signals_delayed():
            return write_step(model, saved, base, save_format)
    except OSError as error:
        raise UserError(
            f"save_model: {base} cannot be written ({error.strerror or error}); earlier checkpoints are "
            f"unchanged; make room on the disk and {RESUME}"
        ) from error
