"""How text is read."""

from __future__ import annotations

import os
import urllib.error
from typing import Any

import onmt.transforms.clean

from nmt.errors import UserError


def only_with_features(original: Any) -> Any:
    """Take a line as it is where no features are asked for; upstream refuses the mark that separates them."""

    def parse_features(line: str, n_feats: int = 0, defaults: Any = None) -> tuple[str, list[str] | None]:
        if n_feats == 0:
            return line.strip("\n"), None
        return original(line, n_feats, defaults)  # type: ignore[no-any-return]

    return parse_features


def with_clear_needs(original: Any) -> Any:
    """Say what the transform `clean` lacks: fasttext, or the model of it that upstream downloads."""

    def warm_up(self: Any, vocabs: Any = None) -> None:
        needed = onmt.transforms.clean.fasttext
        if needed.__spec__.origin is None:
            needed.load_model()  # a stand-in, which refuses
        try:
            original(self, vocabs)
        except urllib.error.URLError as error:
            folder = os.path.dirname(onmt.transforms.clean.__file__)
            raise UserError(
                f"transforms: clean: its language model lid.176.ftz cannot be downloaded ({error.reason}); "
                f"put the file into {folder}, or leave the transform out"
            ) from error

    return warm_up
