"""Measurements of a compressed translation model: agreement with the original, and BLEU.

Axes: ``B`` sentences, ``S`` source words, ``T`` target words, ``D`` width of the decoder's states.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onmt.bin.translate
import torch
from onmt.constants import DefaultTokens
from onmt.inference_engine import InferenceEnginePY
from onmt.utils.misc import set_random_seed, use_gpu
from onmt.utils.parse import ArgumentParser
from sacrebleu.metrics import BLEU
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from nmt.data.corpora import check_parallel
from nmt.data.vocabulary import SENTENCE_MARKS, UNKNOWN
from nmt.model.embeddings import scoring_layer
from nmt.model.plan import padding_of
from nmt.patches.table import apply_patches
from nmt.translate.translation import read_lines, translate_file
from shared_embeddings.checkpoints.agreement import PREDICTIONS, Predictions, Probe, names_of, sampled_lines
from shared_embeddings.checkpoints.quality import Quality
from shared_embeddings.errors import UserError

# Words of a sentence that is read, at most, of a random source, and of a text that a language model writes.
_LONGEST, _RANDOM, _WRITTEN = 60, 4, 50
# A translation is cut at so many words for every one of the longest source, and more.
_RATIO, _MORE = 1.5, 5
_NO_WORDS = (UNKNOWN, DefaultTokens.PAD, *SENTENCE_MARKS)


def translation_probe(
    model: Any, vocabs: Mapping[str, Any], texts: Sequence[Path] | None, seed: int
) -> Probe:
    """What a translation model predicts after every word of the greedy translations that it has now.

    Args:
        model: is changed later.
        vocabs: of the model.
        texts: in its tokens, see `_known`; None for sources of random words.
        seed: of the choice of sentences, or of words.

    Raises:
        UserError: the model does not read sentences, or knows too few words of the texts.
    """
    if type(model.encoder).__name__ == "GGNNEncoder":
        raise UserError("this model reads graphs, not sentences")
    model.eval()
    sentences = _random(vocabs["src"], seed) if texts is None else _known(vocabs["src"], texts, seed)
    features = len(vocabs.get("src_feats") or ())
    source = pad_sequence(sentences, batch_first=True, padding_value=float(_padding(vocabs, "source")))
    source = torch.nn.functional.pad(source[..., None], (0, features))  # unknown features
    lengths = torch.tensor([len(sentence) for sentence in sentences])
    target = _translated(model, vocabs, source, lengths)

    @torch.no_grad()
    def predict() -> Predictions:
        hidden, _ = model.eval()(source, target, lengths)
        return _predictions(model, vocabs, hidden, target[:, 1:, 0])

    of = "random words; --text names real ones" if texts is None else names_of(texts)
    return Probe(f"{_number(vocabs, target[:, 1:]):,} tokens of its translations of {of}", predict)


def language_probe(model: Any, vocabs: Mapping[str, Any], texts: Sequence[Path] | None, seed: int) -> Probe:
    """What a language model predicts after every word of texts, or of what it writes itself.

    Args:
        model, vocabs, texts, seed: see `translation_probe`.

    Raises:
        UserError: the model knows too few words of the texts.
    """
    model.eval()
    if texts is None:
        read = _written(model, vocabs, seed)
        of = "that it wrote itself; --text names real ones"
    else:
        start = torch.tensor([_start(vocabs)])
        lines = [torch.cat([start, sentence]) for sentence in _known(vocabs["src"], texts, seed)]
        read = pad_sequence(lines, batch_first=True, padding_value=float(_padding(vocabs, "target")))[
            ..., None
        ]
        of = f"of {names_of(texts)}"

    @torch.no_grad()
    def predict() -> Predictions:
        return _predictions(model, vocabs, _read(model.eval(), vocabs, read), read[..., 0])

    return Probe(f"{_number(vocabs, read):,} tokens {of}", predict)


def _known(words: Any, texts: Sequence[Path], seed: int) -> list[Tensor]:
    """The ids of sentences of texts, of those at least half of whose words are known.

    Other sentences may be of the other language.

    Raises:
        UserError: there are none.
    """
    found: list[Tensor] = []
    for line in sampled_lines(texts, seed):
        ids = torch.tensor(words(line.split()[:_LONGEST]))
        if 2 * int((ids == words.default_id).sum()) <= len(ids):
            found.append(ids)
        if sum(map(len, found)) >= PREDICTIONS:
            break
    if not found:
        raise UserError(f"the model knows less than half of the words of {names_of(texts)}")
    return found


def _random(words: Any, seed: int) -> list[Tensor]:
    """The ids of random words, as frequent as their ranks in the vocabulary would have them (Zipf)."""
    ids = [
        place
        for place, word in enumerate(words.ids_to_tokens)
        if word not in _NO_WORDS and not word.startswith(DefaultTokens.VOCAB_PAD)
    ]
    weights = [1 / rank for rank in range(1, len(ids) + 1)]
    drawn = random.Random(seed).choices(ids, weights, k=PREDICTIONS // _RANDOM * _RANDOM)
    return list(torch.tensor(drawn).view(-1, _RANDOM))


@torch.no_grad()
def _translated(model: Any, vocabs: Mapping[str, Any], source: Tensor, lengths: Tensor) -> Tensor:
    """The greedy translations ``(B, T, 1)`` of sources ``(B, S, 1 + features)``, with both sentence marks."""
    padding, end = _padding(vocabs, "target"), vocabs["tgt"][DefaultTokens.EOS]
    target = torch.full((len(source), 1, 1), _start(vocabs))
    is_done = torch.zeros(len(source), dtype=torch.bool)
    encoded, state, lengths = model.encoder(source, lengths)
    for _ in range(int(_RATIO * source.size(1)) + _MORE):
        model.decoder.init_state(source, encoded, state)
        hidden, _ = model.decoder(target, encoded, src_len=lengths, with_align=False)
        words = _scores(model, vocabs, hidden[:, -1]).argmax(dim=-1).masked_fill(is_done, padding)
        target = torch.cat([target, words[:, None, None]], dim=1)
        is_done |= words == end
        if is_done.all():
            break
    return target


@torch.no_grad()
def _written(model: Any, vocabs: Mapping[str, Any], seed: int) -> Tensor:
    """The ids ``(B, T, 1)`` of texts that a language model writes, drawn from its probabilities."""
    draw = torch.Generator().manual_seed(seed)
    read = torch.full((PREDICTIONS // _WRITTEN, 1, 1), _start(vocabs))
    while read.size(1) < _WRITTEN:
        probabilities = _scores(model, vocabs, _read(model, vocabs, read)[:, -1]).softmax(dim=-1)
        if not probabilities.isfinite().all():
            raise UserError("the scores of the model are no numbers")
        read = torch.cat([read, torch.multinomial(probabilities, 1, generator=draw)[:, None]], dim=1)
    return read


def _read(model: Any, vocabs: Mapping[str, Any], read: Tensor) -> Tensor:
    """The states ``(B, T, D)`` of a language model after every word of ``(B, T, 1)``."""
    hidden, _ = model(read, None, (read[..., 0] != _padding(vocabs, "target")).sum(dim=1))
    return hidden  # type: ignore[no-any-return]


def _predictions(model: Any, vocabs: Mapping[str, Any], hidden: Tensor, words: Tensor) -> Predictions:
    """What is predicted for states ``(B, T, D)``, but where `words` ``(B, T)`` are padding."""
    return Predictions.of(
        hidden[words != _padding(vocabs, "target")], lambda rows: _scores(model, vocabs, rows)
    )


def _scores(model: Any, vocabs: Mapping[str, Any], hidden: Tensor) -> Tensor:
    """The scores of the words of the vocabulary for states; the padding is never chosen."""
    scores: Tensor = scoring_layer(model)(hidden)
    scores[..., _padding(vocabs, "target")] = -torch.inf
    return scores


def _number(vocabs: Mapping[str, Any], words: Tensor) -> int:
    """How many words are no padding."""
    return int((words != _padding(vocabs, "target")).sum())


def _padding(vocabs: Mapping[str, Any], side: str) -> int:
    """The id of padding on one side."""
    padding = padding_of(dict(vocabs), side)
    assert padding is not None  # only an output has none
    return padding


def _start(vocabs: Mapping[str, Any]) -> int:
    """The id of the word that texts begin with."""
    start: int = vocabs["tgt"][vocabs.get("decoder_start_token") or DefaultTokens.BOS]
    return start


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
