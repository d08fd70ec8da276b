"""The example options of every registered method, as options and as arguments of a command line."""

from __future__ import annotations

import json

from shared_embeddings.method import Options
from shared_embeddings.registry import method_class


def example(method: str, num_embeddings: int, embedding_dim: int) -> Options:
    """The first example of a method for V words in D dimensions."""
    return next(iter(method_class(method).examples(num_embeddings, embedding_dim).values()))


def arguments(options: Options) -> list[str]:
    """Options of a method as arguments of `shared-embeddings compress`."""
    # The command has an option --output of its own.
    names = {"output": "embedding_output"}
    return [
        text
        for name, value in options.items()
        for text in (
            "--" + names.get(name, name).replace("_", "-"),
            value if isinstance(value, str) else json.dumps(value),
        )
    ]
