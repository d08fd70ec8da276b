"""Words to subwords and back: byte-pair encoding of Moses tokens, or SentencePiece on plain text."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from heapq import nsmallest
from itertools import chain, islice
from pathlib import Path

import sentencepiece
from sacremoses import MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe as learn_merges
from tqdm import tqdm

from recipes.common.tools import stream_lines
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import replacing, write_lines, write_text

# For other languages than English, the tokenizer irreversibly splits "McDonald's" into three tokens.
INNER_APOSTROPHE = r"\w'\w"


class Tokenizer:
    """Moses tokenization and its inverse for one language, with sacremoses.

    Punctuation is normalized. Special characters are not escaped, and words are split at dashes only with
    `split_dashes`.
    """

    def __init__(self, language: str, split_dashes: bool = False) -> None:
        self.split_dashes = split_dashes
        self.protected = [] if language == "en" else [INNER_APOSTROPHE]
        self._normalizer = MosesPunctNormalizer(language)
        self._tokenizer = MosesTokenizer(language)
        self._detokenizer = MosesDetokenizer(language)

    def tokenize(self, text: str) -> str:
        return self._tokenizer.tokenize(
            self._normalizer.normalize(text),
            aggressive_dash_splits=self.split_dashes,
            return_str=True,
            escape=False,
            protected_patterns=self.protected,
        )

    def detokenize(self, tokens: str) -> str:
        return self._detokenizer.detokenize(tokens.split(), unescape=False)


SEPARATOR = "@@"
MIN_PAIR_FREQUENCY = 2
# Limits memory: above MOST_COUNTED distinct words, the rarer half is dropped; merges are learned from the
# MOST_LEARNED_FROM most frequent words.
MOST_COUNTED = 2_000_000
MOST_LEARNED_FROM = 250_000


def learn_bpe(texts: Iterable[Path], codes: Path, operations: int) -> None:
    """Learn BPE merges (Sennrich et al., 2016) jointly on all texts with subword-nmt, and write them."""
    counts = count_words(texts)
    frequent = nsmallest(MOST_LEARNED_FROM, counts.items(), key=lambda item: (-item[1], item[0]))
    words = io.StringIO("".join(f"{word} {count}\n" for word, count in sorted(frequent)))
    del counts, frequent
    learned = io.StringIO()
    learn_merges(words, learned, operations, min_frequency=MIN_PAIR_FREQUENCY, is_dict=True)
    write_text(codes, learned.getvalue())


def count_words(texts: Iterable[Path], most: int = MOST_COUNTED) -> Counter[str]:
    """Count whitespace-separated words; above `most` distinct ones, the rarer half is dropped."""
    counts: Counter[str] = Counter()
    for path in texts:
        for line in stream_lines(path):
            counts.update(line.split())
            if len(counts) > most:
                counts = Counter(dict(counts.most_common(most // 2)))
    return counts


def apply_bpe(codes: Path, sources: Iterable[Path], folder: Path) -> None:
    """Split the tokens of each source into subwords, and write them to `folder` under the same name."""
    with codes.open(encoding="utf-8") as file:
        bpe = BPE(file, separator=SEPARATOR)
    for source in sources:
        lines = tqdm(stream_lines(source), desc=source.name, unit=" lines", unit_scale=True, mininterval=0.5)
        write_lines(folder / source.name, (bpe.segment(line) for line in lines))


def run_bpe_steps(
    step: Callable[..., None], training: Sequence[Path], texts: Sequence[Path], codes: Path, operations: int
) -> None:
    """Learn merges from `training`, and split `texts` into subwords beside the codes, unless up to date.

    `step` is `recipes.common.tools.run_step` with its ``stamps``; all texts are tokenized.
    """
    settings = {"operations": operations, "min_frequency": MIN_PAIR_FREQUENCY}
    step("learn-bpe", training, [codes], learn_bpe, training, codes, operations, **settings)
    outputs = [codes.parent / path.name for path in texts]
    step("apply-bpe", [codes, *texts], outputs, apply_bpe, codes, texts, codes.parent)


def join_bpe(subwords: str) -> str:
    """Invert `apply_bpe` for a line, which may end within a word."""
    return re.sub(f"{SEPARATOR}( |$)", "", subwords)


WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
# <unk>, <s>, </s> of SentencePiece; OpenNMT-py also has <blank>.
_SENTENCEPIECE_MARKERS, _OPENNMT_MARKERS = 3, 4


def learn_sentencepiece(texts: Sequence[Path], model: Path, size: int, kind: str, sentences: int) -> None:
    """Learn a joint model, ``unigram`` or ``bpe``, from at most `sentences` evenly spaced lines.

    OpenNMT-py's vocabulary then has `size` words.
    """
    lines = sum(1 for path in texts for _ in stream_lines(path))
    step = -(-lines // sentences)
    learned = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=islice(chain.from_iterable(map(stream_lines, texts)), 0, None, step),
            model_writer=learned,
            vocab_size=size - _OPENNMT_MARKERS + _SENTENCEPIECE_MARKERS,
            model_type=kind,
            character_coverage=1.0,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise UserError(f"SentencePiece cannot learn {size} pieces ({reason}); give more text") from error
    with replacing(model) as temporary:
        temporary.write_bytes(learned.getvalue())


def apply_sentencepiece(model: Path, text: Path, target: Path) -> None:
    """Split the lines of `text` into space-separated subwords and write them to `target`."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    write_lines(target, (" ".join(processor.encode(line, out_type=str)) for line in stream_lines(text)))


def write_vocabulary(texts: Iterable[Path], vocabulary: Path, model: Path | None = None) -> None:
    """Write the joint vocabulary of OpenNMT-py: token, tab, count, most frequent first.

    The tokens are those of the texts, or all subwords of a SentencePiece `model`.
    """
    counts = count_words(texts)
    tokens: Iterable[str] = counts
    if model is not None:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
        tokens = map(processor.id_to_piece, range(_SENTENCEPIECE_MARKERS, processor.get_piece_size()))
    ordered = sorted(tokens, key=lambda token: (-counts[token], token))
    write_lines(vocabulary, (f"{token}\t{counts[token]}" for token in ordered))


# Prefix of words without a space before them, as in pyonmttok.
JOINER = "\uffed"


def joiner(kind: str, language: str) -> Callable[[str], str]:
    """Return what joins a line of pieces of a `kind` to text."""
    if kind == "sentencepiece":
        return lambda line: "".join(line.split(" ")).replace(WORD_START, " ").strip()
    if kind == "words":
        return lambda line: line.replace(f" {JOINER}", "").removeprefix(JOINER)
    tokenizer = Tokenizer(language)
    return lambda line: tokenizer.detokenize(join_bpe(line))
