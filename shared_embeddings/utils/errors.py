"""The one exception that every command turns into a single line and exit status 2."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can fix; the message names what was wrong, what was expected and what to do."""
