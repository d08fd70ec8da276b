"""The error message of a training process when another process of its group exited."""

from __future__ import annotations

import re

from shared_embeddings.utils.files import first_line
from shared_embeddings.utils.interrupts import RESUME

# Errors of gloo and NCCL in a process that waits for an exited one.
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process exited|socket ?(timeout|error)|"
    r"gloo/transport|timed out waiting|wait timeout|NCCL error|recvValue failed|sendBytes failed",
    re.IGNORECASE,
)


def lost_group(error: BaseException) -> str | None:
    """The message for an error caused by another process of the group exiting; None for other errors.

    Args:
        error: raised by a collective operation of ``torch.distributed``.
    """
    if not isinstance(error, RuntimeError) or _LOST.search(str(error)) is None:
        return None
    reason = first_line(error).split("] ")[-1]
    return (
        f"another process of this training exited ({reason}); see its output, perhaps on another machine; "
        f"{RESUME} from the last checkpoint"
    )
