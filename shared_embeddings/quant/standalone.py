"""Programs that decode embeddings without this library: a module, `decoder`, and the codecs' decoders."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared_embeddings.quant import decoder
from shared_embeddings.quant.codec import codecs
from shared_embeddings.utils.errors import UserError

# The methods that `decoder` knows.
METHODS = ("standard", "projective", "quantized")
_FUTURE = "from __future__ import annotations\n"
_IMPORT = re.compile(rf"^from {re.escape(decoder.__name__)} import (\([^)]*\)|.*)\n", re.MULTILINE)


def program(file: Path) -> str:
    """The text of a module in which an import from `decoder` is replaced by that module and all decoders."""
    parts = [inspect.getsource(decoder).partition(_FUTURE)[2]]
    found = {name: codec.standalone for name, codec in codecs().items() if codec.standalone}
    functions = {function: inspect.getsource(function) for own in found.values() for function in own}
    parts += functions.values()
    parts += [f'DECODERS["{name}"] = {own[-1].__name__}\n' for name, own in found.items()]
    text, count = _IMPORT.subn(lambda _: "\n\n".join(parts), file.read_text(encoding="utf-8"))
    assert count == 1, file
    return text


def check_decoder(method: str, options: Mapping[str, Any]) -> None:
    """Raise UserError if an embedding has a codec that no program decodes; the default codec has one."""
    codec = codecs().get(str(options.get("codec")))
    if method == "quantized" and codec is not None and not codec.standalone:
        raise UserError(
            f"codec {codec.name} has no stand-alone decoder, so programs without this library could not load "
            "the model; choose another"
        )
