"""Patch of the log file."""

from __future__ import annotations

import logging
import sys
from typing import Any, NoReturn


def with_failing_log(original: Any) -> Any:
    """Raise errors of writing the log file; OpenNMT-py only prints them."""

    def init_logger(*args: Any, **kwargs: Any) -> Any:
        logger = original(*args, **kwargs)
        for handler in logger.handlers:
            if isinstance(handler, logging.FileHandler):
                handler.handleError = _raise_again  # type: ignore[method-assign]
        return logger

    return init_logger


def _raise_again(record: logging.LogRecord) -> NoReturn:
    """Raise the error that a log handler has caught."""
    error = sys.exc_info()[1]
    assert error is not None
    raise error
