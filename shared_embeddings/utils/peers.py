"""What a training process reports when another one of its group has gone."""

from __future__ import annotations

import re

from shared_embeddings.utils.files import first_line
from shared_embeddings.utils.interrupts import RESUME

# What gloo and NCCL raise in a process that waits for one that has gone.
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process exited|socket ?(timeout|error)|"
    r"gloo/transport|timed out waiting|wait timeout|NCCL error|recvValue failed|sendBytes failed",
    re.IGNORECASE,
)


def lost_group(error: BaseException) -> str | None:
    """The line about an error that comes of another process of the group having gone; None for others.

    Args:
        error: raised by a collective operation of ``torch.distributed``.
    """
    if not isinstance(error, RuntimeError) or _LOST.search(str(error)) is None:
        return None
    reason = first_line(error).split("] ")[-1]
    return (
        f"another process of this training has gone ({reason}); see what it and the other machines have "
        f"printed; {RESUME} from the last checkpoint"
    )
