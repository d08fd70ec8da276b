"""Options shared by the commands for language models."""

from __future__ import annotations

import argparse

import torch

from shared_embeddings.errors import UserError


def chosen_device(name: str) -> str:
    """Resolve ``auto``, ``cpu`` or ``cuda``.

    Raises:
        UserError: the device is not available.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch finds no CUDA device; use cpu")
    return name


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option -device, see `chosen_device`."""
    parser.add_argument(
        "-device", choices=("auto", "cpu", "cuda"), default="auto", help="device (default: auto)"
    )
