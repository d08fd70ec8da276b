"""The BLEU of a translation model that is compressed: by what ``onmt_translate`` writes, and sacreBLEU."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onmt.bin.translate
from onmt.inference_engine import InferenceEnginePY
from onmt.utils.misc import set_random_seed, use_gpu
from onmt.utils.parse import ArgumentParser
from sacrebleu.metrics import BLEU
from torch import nn

from nmt.data.batches import check_parallel
from nmt.patches.table import apply_patches
from nmt.translate.translation import read_lines, translate_file
from shared_embeddings.checkpoints.quality import Quality
from shared_embeddings.errors import UserError

BEAM_SIZE = 5
# The mark of a piece of a word, and how pieces that have it become words.
_MARKS = {"bpe": "@@", "sentencepiece": "\N{LOWER ONE EIGHTH BLOCK}"}


def bleu(checkpoint: Path, model: nn.Module, source: Path, target: Path, subwords: str) -> Quality:
    """Translate a text with beam 5, and compare it with the target.

    The source is in tokens: transforms of the checkpoint are neither applied to it, nor undone on the output.

    Args:
        checkpoint: whose vocabulary and options the model has.
        model: what translates, in place of the one in the checkpoint.
        source: in the tokens of the model, one sentence a line.
        target: what each line should read.
        subwords: see `shared_embeddings.checkpoints.quality.Validation`; with "none" sacreBLEU compares the
            tokens as they are, else it divides the joined text as usual.

    Raises:
        UserError: the files are not parallel or not UTF-8, the target has pieces of words where those of
            translations are joined, or the model cannot translate without more options.
    """
    check_parallel("validation", {"source": os.fspath(source), "target": os.fspath(target)})
    wanted = read_lines(os.fspath(target))
    _check_joined(target, wanted, subwords)
    apply_patches()
    with tempfile.TemporaryDirectory() as folder:
        output = os.path.join(folder, "translation")
        asked = ["-model", os.fspath(checkpoint), "-src", os.fspath(source), "-output", output]
        parser = onmt.bin.translate._get_parser()
        options = parser.parse_args([*asked, "-beam_size", str(BEAM_SIZE)])
        with _quiet():
            translate_file(options, lambda changed: _translate(changed, model))
        found = [joined(line, subwords) for line in read_lines(output)]
    metric = BLEU(tokenize="none", force=True) if subwords == "none" else BLEU(force=True)
    score = metric.corpus_score(found, [wanted]).score
    how = f"{target}: {len(wanted):,} lines, beam {BEAM_SIZE}, subwords {subwords}, {metric.get_signature()}"
    return Quality("BLEU", score, how)


def joined(line: str, subwords: str) -> str:
    """A line of tokens without the marks of pieces of words."""
    if subwords == "bpe":
        return re.sub(r"@@( |$)", "", line)
    if subwords == "sentencepiece":
        return line.replace(" ", "").replace(_MARKS[subwords], " ").strip()
    return line


def _check_joined(target: Path, lines: list[str], subwords: str) -> None:
    """Raise UserError for a target in pieces of words where translations are in words."""
    if subwords == "none":
        return
    mark = _MARKS[subwords]
    for number, line in enumerate(lines, 1):
        if any(token.endswith(mark) or token.startswith(mark) for token in line.split()):
            raise UserError(
                f"{target}: line {number} has pieces of words, marked {mark}, but --validation-subwords "
                f"{subwords} compares whole words; give the text as it reads, or leave the option out"
            )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what OpenNMT logs about every translation."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


def _translate(options: Namespace, model: nn.Module) -> None:
    """Translate ``options.src`` into ``options.output`` by a model in memory.

    Raises:
        UserError: the model does not translate.
    """
    ArgumentParser.validate_translate_opts(options)
    ArgumentParser._get_all_transform_translate(options)
    ArgumentParser._validate_transforms_opts(options)
    ArgumentParser.validate_translate_opts_dynamic(options)
    set_random_seed(options.seed, use_gpu(options))
    engine: Any = InferenceEnginePY(options)
    engine.translator.model = model.eval()
    engine.infer_file()
    engine.terminate()
