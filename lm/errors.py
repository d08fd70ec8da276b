"""The one exception that the command line turns into a single line and exit code 2."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can put right; the message says what was wrong, what was wanted and what to do."""
