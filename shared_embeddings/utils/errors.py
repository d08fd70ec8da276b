"""The exception that every command turns into a single line and exit status 2, and helpers of messages."""

from __future__ import annotations

import pickle
import struct
import zipfile


class UserError(ValueError):
    """Something the user can fix; the message names what was wrong, what was expected and what to do."""


# Errors of torch.load(weights_only=True), and of indexing its result, for files that are truncated or not
# checkpoints.
UNREADABLE = (
    zipfile.BadZipFile,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    struct.error,
    AssertionError,
    LookupError,
    TypeError,
    ValueError,
    OSError,
)


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, truncated; the error's class name if it is empty."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]
