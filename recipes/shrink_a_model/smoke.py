"""What ``--smoke`` shrinks: a tiny encoder with random weights, and generated texts."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.common.smoke import LINES, generated_vocabulary, generated_words, sentence
from shared_embeddings.utils.extras import require
from shared_embeddings.utils.files import replacing, write_text

# Width and number of layers of the encoder.
_DIM, _HEADS = 32, 2
_MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_smoke_model(folder: Path) -> None:
    """Write an encoder of one layer whose tokenizer knows the generated words and single letters."""
    transformers, torch = require("transformers"), require("torch")
    letters = [mark + chr(code) for code in range(ord("a"), ord("z") + 1) for mark in ("", "##")]
    words = list(dict.fromkeys([*_MARKS, *letters, ".", *generated_vocabulary()]))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=_DIM,
        num_hidden_layers=1,
        num_attention_heads=_HEADS,
        intermediate_size=_DIM,
    )
    transformers.BertModel(config).save_pretrained(folder)
    write_text(folder / "tokenizer.json", json.dumps(_tokenizer(words)))
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 64}
    write_text(folder / "tokenizer_config.json", json.dumps(settings))


def _tokenizer(words: Sequence[str]) -> dict[str, Any]:
    """The content of a ``tokenizer.json`` of BERT's kind."""
    ids = {word: number for number, word in enumerate(words)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ids[mark], "content": mark, **flags} for mark in _MARKS],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "BertProcessing",
            "sep": ["[SEP]", ids["[SEP]"]],
            "cls": ["[CLS]", ids["[CLS]"]],
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": ids,
        },
    }


def write_smoke_texts(captions: dict[str, Path], news: Path) -> None:
    """Write generated lines under the names of Multi30k's and AG News' files.

    Args:
        captions: the gzipped files of the captions by their split.
        news: the table of news.
    """
    for seed, path in enumerate(captions.values()):
        lines = "".join(f"{sentence(words)}\n" for words in generated_words(LINES, seed))
        with replacing(path) as temporary:
            temporary.write_bytes(gzip.compress(lines.encode(), mtime=0))
    table = io.StringIO()
    pairs = zip(generated_words(LINES, 2), generated_words(LINES, 3))
    csv.writer(table).writerows([1, sentence(title), sentence(text)] for title, text in pairs)
    write_text(news, table.getvalue())
