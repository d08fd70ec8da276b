"""Word embeddings with few parameters, for the input and the output of a model, behind one interface.

The options dataclass of every method is here by its name, such as ``FunnelOptions``.
"""

import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared_embeddings.api import *  # noqa: F403


def __getattr__(name: str) -> object:
    """The public names and modules, imported when they are used: commands print their help without torch."""
    if name == "__version__":
        return importlib.metadata.version("shared-embeddings")
    if name == "__all__" or not name.startswith("_"):
        if importlib.util.find_spec(f"shared_embeddings.{name}") is not None:
            return importlib.import_module(f"shared_embeddings.{name}")
        api = importlib.import_module("shared_embeddings.api")
        if name == "__all__" or name in api.__all__:
            globals()[name] = getattr(api, name)
            return globals()[name]
    raise AttributeError(f"module 'shared_embeddings' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, without the modules that Python adds when they are imported."""
    return sorted([*importlib.import_module("shared_embeddings.api").__all__, "__version__"])
