"""Words to subwords and back: byte-pair encoding of Moses tokens, or SentencePiece on plain text."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nsmallest
from itertools import islice
from pathlib import Path

import sentencepiece
from sacremoses import MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe as learn_merges

from recipes.common.corpus import stream_lines, with_progress, write_lines
from recipes.translation.sources import Pieces
from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import replacing, write_text

# Outside English, the tokenizer makes three tokens of "McDonald's", which cannot be joined again.
INNER_APOSTROPHE = r"\w'\w"


class Tokenizer:
    """Text to tokens and back, for one language.

    Punctuation is normalized first. Nothing is escaped (``&`` stays ``&``), since no later step reads XML,
    and dashes inside words stay there unless `split_dashes` is set: subwords split what is rare anyway.
    """

    def __init__(self, language: str, split_dashes: bool = False) -> None:
        self.split_dashes = split_dashes
        self.protected = [] if language == "en" else [INNER_APOSTROPHE]
        self._normalizer = MosesPunctNormalizer(language)
        self._tokenizer = MosesTokenizer(language)
        self._detokenizer = MosesDetokenizer(language)

    def tokenize(self, text: str) -> str:
        """One line of text as tokens with a space between each two."""
        return self._tokenizer.tokenize(
            self._normalizer.normalize(text),
            aggressive_dash_splits=self.split_dashes,
            return_str=True,
            escape=False,
            protected_patterns=self.protected,
        )

    def detokenize(self, tokens: str) -> str:
        """The text of a tokenized line."""
        return self._detokenizer.detokenize(tokens.split(), unescape=False)


SEPARATOR = "@@"
MIN_PAIR_FREQUENCY = 2
# So that memory does not grow with the text: when more different words than the first number have been
# counted, the rarer half is forgotten; merges are learned from the second number of words, the most frequent.
MOST_COUNTED = 2_000_000
MOST_LEARNED_FROM = 250_000


def learn_bpe(texts: Iterable[Path], codes: Path, operations: int) -> None:
    """Learn `operations` merges on all `texts` together and write them to `codes`.

    Raises:
        UserError: there is nothing to merge.
    """
    counts = count_words(texts, MOST_COUNTED)
    if all(len(word) == 1 for word in counts):
        raise UserError("byte pairs cannot be learned: no word has two characters; give more text")
    frequent = nsmallest(MOST_LEARNED_FROM, counts.items(), key=lambda item: (-item[1], item[0]))
    words = io.StringIO("".join(f"{word} {count}\n" for word, count in sorted(frequent)))
    del counts, frequent
    learned = io.StringIO()
    learn_merges(words, learned, operations, min_frequency=MIN_PAIR_FREQUENCY, is_dict=True)
    write_text(codes, learned.getvalue())


def count_words(texts: Iterable[Path], most: int) -> Counter[str]:
    """Count words between white space in all `texts`.

    Args:
        texts: are read line by line.
        most: how many different words may be counted at a time; above it, the rarest half is forgotten.
    """
    counts: Counter[str] = Counter()
    for path in texts:
        for line in stream_lines(path):
            counts.update(line.split())
            if len(counts) > most:
                counts = Counter(dict(counts.most_common(most // 2)))
    return counts


def apply_bpe(codes: Path, sources: Iterable[Path], folder: Path) -> None:
    """Split the tokens of each source into the subwords of `codes`, under the same name in `folder`."""
    with codes.open(encoding="utf-8") as file:
        bpe = BPE(file, separator=SEPARATOR)
    for source in sources:
        lines = with_progress(stream_lines(source), source.name)
        write_lines(folder / source.name, (bpe.segment(line) for line in lines))


def join_bpe(subwords: str) -> str:
    """Undo `apply_bpe` on one line, also where a translation ends within a word."""
    return re.sub(f"{SEPARATOR}( |$)", "", subwords)


def write_vocabulary(texts: Iterable[Path], vocabulary: Path) -> None:
    """Write the joint vocabulary as OpenNMT-py reads it: token, tab, count, most frequent first."""
    counts = count_words(texts, MOST_COUNTED)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    write_lines(vocabulary, (f"{token}\t{count}" for token, count in ordered))


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
    counts = count_words(texts, MOST_COUNTED)
    ordered = sorted(own, key=lambda piece: (-counts[piece], piece))
    write_lines(vocabulary, (f"{piece}\t{counts[piece]}" for piece in ordered))


def joiner(kind: str, language: str) -> Callable[[str], str]:
    """What joins a line of pieces of a `kind` to text."""
    if kind == "sentencepiece":
        return lambda line: "".join(line.split(" ")).replace(WORD_START, " ").strip()
    tokenizer = Tokenizer(language)
    return lambda line: tokenizer.detokenize(join_bpe(line))


def tokenize(text: Path, target: Path, language: str) -> None:
    """Write the Moses tokens of the lines of `text` to `target`."""
    tokenizer = Tokenizer(language)
    write_lines(target, (tokenizer.tokenize(line) for line in stream_lines(text)))
