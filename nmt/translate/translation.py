"""Translating a file line by line, including empty lines, and writing the output atomically."""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from nmt.checkpoint.files import check_output
from nmt.data.corpora import check_parallel, clean_line
from nmt.summarization.length_control import read_desired_lengths
from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import naming, write_text


def read_lines(path: str) -> list[str]:
    """Return the lines of a UTF-8 file with normalized whitespace.

    Raises:
        UserError: a line is not UTF-8.
    """
    lines = Path(path).read_bytes().split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    cleaned = []
    for number, line in enumerate(lines, 1):
        try:
            cleaned.append(clean_line(line.decode("utf-8")))
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}: line {number} is not UTF-8 ({error.reason}); convert the file"
            ) from error
    return cleaned


def translate_file(opt: Namespace, translate: Callable[[Namespace], None]) -> None:
    """Translate ``opt.src`` and write ``opt.output`` atomically.

    The translations of empty lines are empty.

    Args:
        opt: options of ``onmt_translate``.
        translate: translates the files of the options.

    Raises:
        UserError: a file is missing, not UTF-8 or cannot be written, source, target and desired lengths
            are not parallel, or a target is empty.
    """
    check_output("output", opt.output)
    if not os.path.isfile(opt.src):
        raise UserError(f"src: no such file: {opt.src}")
    sides = {"src": opt.src, **({"tgt": opt.tgt} if opt.tgt else {})}
    if os.path.getsize(opt.src):
        check_parallel("translation", sides)
    texts = {side: read_lines(path) for side, path in sides.items()}
    desired = read_desired_lengths(opt, len(texts["src"]))
    filled = [number for number, line in enumerate(texts["src"]) if line]
    for number in filled:
        if not texts.get("tgt", texts["src"])[number]:
            raise UserError(
                f"tgt: {opt.tgt}: line {number + 1} is empty, but that of src is not; add text, or "
                "translate without -tgt"
            )
    with tempfile.TemporaryDirectory() as folder, naming({Path(folder): Path(folder)}):
        changed = Namespace(**vars(opt))
        if isinstance(desired, list):
            changed.desired_lengths = [desired[number] for number in filled]
        for side, lines in texts.items():
            path = os.path.join(folder, side)
            Path(path).write_text("".join(f"{lines[number]}\n" for number in filled), encoding="utf-8")
            setattr(changed, side, path)
        changed.output = os.path.join(folder, "output")
        translations: list[str] = []
        if filled:
            translate(changed)
            translations = Path(changed.output).read_text(encoding="utf-8").split("\n")[:-1]
        per_line = opt.n_best
        if len(translations) != per_line * len(filled):
            raise RuntimeError(
                f"{len(filled)} lines gave {len(translations)} translations, not {per_line} each"
            )
        empty = ["\t0.0" if opt.with_score else ""] * per_line
        pieces = [empty] * len(texts["src"])
        for rank, number in enumerate(filled):
            pieces[number] = translations[rank * per_line : (rank + 1) * per_line]
    text = "".join(f"{line}\n" for piece in pieces for line in piece)
    write_text(Path(opt.output), text)
