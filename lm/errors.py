"""The exception that the command line turns into a single line and exit status 2."""

from shared_embeddings.errors import UserError

__all__ = ["UserError"]
