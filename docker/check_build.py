"""Checks at the end of the build that torch and the base image have the same CUDA major version."""

from __future__ import annotations

import os
import sys

ADVICE = "choose a matching BASE_IMAGE and TORCH_BUILD, see docker/README.md"


def disagreement(built_for: str | None, base: str | None) -> str | None:
    """Describe a mismatch between torch and the base image.

    Args:
        built_for: ``torch.version.cuda``, such as "13.0"; None for a CPU build.
        base: ``CUDA_VERSION`` of the base image, such as "13.0.2"; None without CUDA.

    Returns:
        One line, or None if torch and the base image match.
    """
    if (built_for or "").split(".")[0] == (base or "").split(".")[0]:
        return None
    return f"torch is built for {cuda(built_for)}, the base image has {cuda(base)}; {ADVICE}"


def cuda(version: str | None) -> str:
    """Format a CUDA version."""
    return "no CUDA" if version is None else f"CUDA {version}"


if __name__ == "__main__":
    import torch

    problem = disagreement(torch.version.cuda, os.environ.get("CUDA_VERSION"))
    if problem is not None:
        print(f"check_build: {problem}", file=sys.stderr)
        sys.exit(2)
    print(f"torch {torch.__version__}, {cuda(torch.version.cuda)}")
