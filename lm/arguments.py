"""What the command lines of language models have in common."""

from __future__ import annotations

import argparse

import torch

from shared_embeddings.errors import UserError


def chosen_device(name: str) -> str:
    """The device that ``auto``, ``cpu`` or ``cuda`` stands for.

    Raises:
        UserError: there is no such device.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch sees none; use cpu")
    return name


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option that `chosen_device` reads."""
    parser.add_argument(
        "-device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (default: auto)"
    )
