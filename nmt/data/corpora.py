"""The settings of one corpus under ``data``: each known by name and of the right type."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from nmt.options.ranges import check_ranges
from shared_embeddings.options import parse_options, require, require_at_least


@dataclasses.dataclass(frozen=True)
class CorpusOptions:
    """What one corpus may have: its files, and settings of transforms in place of the global ones.

    Attributes:
        path_src: file of the sources, one a line.
        path_tgt: file of the targets.
        path_txt: a text without line structure, for a language model.
        path_align: file of word alignments.
        weight: lines that are taken in turn with those of other corpora.
        transforms: names of the transforms.
    """

    path_src: str | None = None
    path_tgt: str | None = None
    path_txt: str | None = None
    path_align: str | None = None
    weight: int | None = None
    transforms: tuple[str, ...] | None = None
    src_prefix: str = ""
    tgt_prefix: str = ""
    src_suffix: str = ""
    tgt_suffix: str = ""
    src_lang: str = ""
    tgt_lang: str = ""
    penn: bool = True
    norm_quote_commas: bool = True
    norm_numbers: bool = True
    pre_replace_unicode_punct: bool = False
    post_remove_control_chars: bool = False
    src_eq_tgt: bool = True
    same_char: bool = True
    same_word: bool = True
    scripts_ok: tuple[str, ...] = ()
    scripts_nok: tuple[str, ...] = ()
    src_tgt_ratio: float = 2
    avg_tok_min: float = 3
    avg_tok_max: float = 20
    langid: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise `OptionError` for a name that is not a transform, `UserError` for a number out of range."""
        from onmt.transforms import AVAILABLE_TRANSFORMS

        require_at_least("weight", self.weight, 0)

        for name in self.transforms or ():
            require(
                name in AVAILABLE_TRANSFORMS,
                f"transform {name!r} is unknown; expected one of {', '.join(sorted(AVAILABLE_TRANSFORMS))}",
            )
        check_ranges(Namespace(**dataclasses.asdict(self)))


def parse_corpus(name: str, settings: Mapping[str, Any]) -> CorpusOptions:
    """Check the settings of one corpus.

    Args:
        name: of the corpus, for messages.
        settings: as under ``data``.

    Raises:
        shared_embeddings.OptionError: a setting is unknown, of the wrong type, or out of range.
    """
    return parse_options(f"data: {name}", CorpusOptions, settings)
