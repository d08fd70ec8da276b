"""Words to pieces and back: byte pairs of Moses tokens, or SentencePiece on plain text."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import sentencepiece

from recipes.common.corpus import stream_lines, write_lines
from recipes.common.errors import UserError
from recipes.translation import subwords
from recipes.translation.moses import Tokenizer
from recipes.translation.settings import Pieces
from shared_embeddings.utils.files import replacing

WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
# <unk>, <s>, </s> of SentencePiece; OpenNMT-py has a <blank> beside them.
_SENTENCEPIECE_MARKERS, _OPENNMT_MARKERS = 3, 4


def learn_sentencepiece(texts: Sequence[Path], model: Path, pieces: Pieces, sentences: int) -> None:
    """Learn a joint SentencePiece model from at most `sentences` lines, taken at equal distances.

    Its size is such that the vocabulary of a model of OpenNMT-py has exactly ``pieces.size`` words.

    Raises:
        UserError: the text is too short for the size.
    """
    lines = sum(1 for path in texts for _ in stream_lines(path))
    step = -(-lines // sentences)
    learned = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=islice(_all_lines(texts), 0, None, step),
            model_writer=learned,
            vocab_size=pieces.size - _OPENNMT_MARKERS + _SENTENCEPIECE_MARKERS,
            model_type=pieces.model,
            character_coverage=1.0,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise UserError(
            f"SentencePiece cannot learn {pieces.size} pieces ({reason}); give more text"
        ) from error
    with replacing(model) as temporary:
        temporary.write_bytes(learned.getvalue())


def _all_lines(texts: Sequence[Path]) -> Iterator[str]:
    """The lines of all texts, one after the other."""
    for path in texts:
        yield from stream_lines(path)


def apply_sentencepiece(model: Path, text: Path, target: Path) -> None:
    """Write the lines of `text`, their pieces with spaces between them, to `target`."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    write_lines(target, (" ".join(processor.encode(line, out_type=str)) for line in stream_lines(text)))


def write_sentencepiece_vocabulary(model: Path, texts: Sequence[Path], vocabulary: Path) -> None:
    """Write every piece of a model with its count in `texts`, 0 included, as OpenNMT-py reads it."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    own = [
        processor.id_to_piece(number) for number in range(_SENTENCEPIECE_MARKERS, processor.get_piece_size())
    ]
    counts = subwords.count_words(texts, subwords.MOST_COUNTED)
    ordered = sorted(own, key=lambda piece: (-counts[piece], piece))
    write_lines(vocabulary, (f"{piece}\t{counts[piece]}" for piece in ordered))


def joiner(kind: str, language: str) -> Callable[[str], str]:
    """What joins a line of pieces of a `kind` to text."""
    if kind == "sentencepiece":
        return lambda line: "".join(line.split(" ")).replace(WORD_START, " ").strip()
    tokenizer = Tokenizer(language)
    return lambda line: tokenizer.detokenize(subwords.join(line))


def tokenize(text: Path, target: Path, language: str) -> None:
    """Write the Moses tokens of the lines of `text` to `target`."""
    tokenizer = Tokenizer(language)
    write_lines(target, (tokenizer.tokenize(line) for line in stream_lines(text)))
