"""The corpora of the option ``data``: settings, checks, reading, counting (``onmt_build_vocab``)."""

from __future__ import annotations

import dataclasses
import os
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from onmt.constants import CorpusName
from onmt.inputters.text_corpus import ParallelCorpus
from onmt.utils.logging import logger

from nmt.checkpoints import check_output
from nmt.options import parse_mapping
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import followed, staged
from shared_embeddings.utils.options import parse_options, require, require_at_least


@dataclasses.dataclass(frozen=True)
class CorpusOptions:
    """Settings of one corpus: its files, and options of transforms that override the global ones."""

    path_src: str | None = None
    path_tgt: str | None = None
    path_txt: str | None = None  # a text without line structure, for a language model
    path_align: str | None = None  # word alignments
    weight: int | None = None  # number of examples to read before switching to the next corpus
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
        from onmt.transforms import AVAILABLE_TRANSFORMS

        require_at_least("weight", self.weight, 0)

        for name in self.transforms or ():
            require(
                name in AVAILABLE_TRANSFORMS,
                f"transform {name!r} is unknown; expected one of {', '.join(sorted(AVAILABLE_TRANSFORMS))}",
            )


BYTE_ORDER_MARK = "\ufeff"


def clean_line(line: str) -> str:
    """Collapse whitespace of any kind to single spaces, and remove a byte order mark."""
    return " ".join(line.removeprefix(BYTE_ORDER_MARK).split())


def read_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the lines of a UTF-8 file with normalized whitespace."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield clean_line(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise UserError(f"{path}: line {number} is not UTF-8 ({error.reason}); convert it") from error


def count_lines(path: str) -> int:
    """Count the lines of a file, including a last line without a line end."""
    count, last = 0, b"\n"
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")


def check_parallel(name: str, paths: dict[str, str]) -> int:
    """Check that the files of a corpus by side exist and are not empty, and return their number of lines."""
    counts = {}
    for side, path in paths.items():
        if not os.path.isfile(path):
            raise UserError(f"data: {name}: {side}: no such file: {path}")
        counts[side] = count_lines(path)
        if counts[side] == 0:
            raise UserError(f"data: {name}: {side}: {path} is empty")
    if len(set(counts.values())) > 1:
        sizes = ", ".join(f"{paths[side]} has {number} lines" for side, number in counts.items())
        raise UserError(f"data: {name}: the files are not parallel: {sizes}; use equal numbers")
    return next(iter(counts.values()))


def read_corpora(opt: Namespace) -> dict[str, dict[str, Any]]:
    """Parse and check the option ``data``: the settings and files of every corpus."""
    corpora = parse_mapping("data", opt.data, "{corpus: {path_src: train.en, path_tgt: train.de}}") or {}
    for name, corpus in corpora.items():
        parse_options(f"data: {name}", CorpusOptions, corpus)
        paths = {side: corpus[side] for side in ("path_src", "path_tgt", "path_align") if corpus.get(side)}
        if not paths and not corpus.get("path_txt"):
            raise UserError(f"data: {name}: has no path_src; name the files of each corpus")
        check_parallel(name, paths) if paths else None
    weights = {name: corpus.get("weight", 1) for name, corpus in corpora.items()}
    if not any(weight != 0 for name, weight in weights.items() if name != CorpusName.VALID):
        raise UserError(
            "data: there is no training corpus; add one with a weight of at least 1 in addition to "
            f"`{CorpusName.VALID}`"
        )
    return corpora


def check_targets(corpora: dict[str, dict[str, Any]], task: str) -> None:
    """Check that every corpus has a target, or none for a language model; the source is the default."""
    for name, corpus in corpora.items():
        if task == "seq2seq" and not corpus.get("path_tgt"):
            raise UserError(f"data: {name}: has no path_tgt; name the file of its targets")
        if task == "lm" and corpus.get("path_tgt") not in (None, corpus.get("path_src")):
            raise UserError(f"data: {name}: has a path_tgt, which model_task: lm does not use; remove it")


class CleanCorpus(ParallelCorpus):  # type: ignore[misc]
    """Parallel text with normalized whitespace; pairs with an empty side are skipped."""

    def load(self, offset: int = 0, stride: int = 1) -> Iterator[dict[str, Any]]:
        """Yield the examples of every ``stride``-th block of lines starting at ``offset``."""
        empty = 0
        try:
            for example in super().load(offset=offset, stride=stride):
                for key in ("src", "tgt", "src_original", "tgt_original"):
                    if isinstance(example[key], str):
                        example[key] = clean_line(example[key])
                if example["tgt"] is not None and not (example["src"] and example["tgt"]):
                    empty += 1
                    continue
                yield example
        except UnicodeDecodeError:
            for path in filter(None, (self.src, self.tgt, self.align)):
                try:
                    deque(read_lines(path), 0)  # finds the line
                except UserError as error:
                    raise UserError(f"data: {self.id}: {error}") from error
            raise
        if empty:
            logger.warning(f"{self.id}: skipped {empty} pairs with an empty side")


def build_vocabularies(opt: Namespace, count: Callable[[Namespace], None]) -> None:
    """Count the tokens of corpora with OpenNMT-py's `count`, and write the vocabularies atomically."""
    for side, (path, *_) in _outputs(opt).items():
        setattr(opt, side, str(followed(Path(path))))
    outputs = _outputs(opt)  # features are named after the target of a link
    paths = [Path(path) for paths in outputs.values() for path in paths]
    with staged(paths) as places:
        for side, (path, *_) in outputs.items():
            setattr(opt, side, str(places[paths.index(Path(path))]))
        count(opt)
        for side in outputs:
            if not os.path.getsize(getattr(opt, side)):
                raise UserError(f"{side}: would be empty; data has no pair with text on both sides")


def _outputs(opt: Namespace) -> dict[str, list[str]]:
    """Return the files of each side, words before features; none is an input or exists."""
    sides = ["src_vocab"] if opt.share_vocab else ["src_vocab", "tgt_vocab"]
    for side in sides:
        if not getattr(opt, side):
            raise UserError(f"{side}: is not set; name the file to write")
        check_output(side, getattr(opt, side))
    outputs = {side: [getattr(opt, side)] for side in sides}
    if len(sides) > 1 and os.path.realpath(opt.src_vocab) == os.path.realpath(opt.tgt_vocab):
        raise UserError(
            f"tgt_vocab: {opt.tgt_vocab} is also src_vocab; choose another, or set share_vocab: true"
        )
    outputs["src_vocab"] += [f"{opt.src_vocab}_feat{number}" for number in range(opt.n_src_feats)]
    for side, paths in outputs.items():
        taken = next(filter(os.path.lexists, paths), None)  # also a link to nothing
        if taken is not None and not opt.overwrite:
            raise UserError(f"{side}: {taken} already exists; add -overwrite, or name another file")
    return outputs
