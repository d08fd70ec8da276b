"""torchrun, except that its end by a signal is one line, and the exit status that of a single process."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException

from shared_embeddings.utils.command_line import Terminated, run


def main(arguments: Sequence[str]) -> None:
    """Start processes with the arguments of torchrun, which stops them when it gets a signal."""
    # It warns of each signal.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    try:
        torchrun.main(list(arguments))
    except SignalException as error:
        is_terminated = error.sigval == signal.SIGTERM
        raise (Terminated if is_terminated else KeyboardInterrupt)("all processes were stopped") from None


if __name__ == "__main__":
    sys.exit(run("torchrun", main))
