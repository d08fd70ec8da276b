"""Tiny random models of Hugging Face with tokenizers of every kind, for tests of trimming."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from shared_embeddings.cli.main import main
from tests.shared_embeddings.hf.models import KINDS as MODELS

SYLLABLES = ["ka", "to", "mi", "re", "shu", "lon", "ber", "ti", "na", "ou", "gra", "ph", "ing", "é"]


def sentences(number: int, seed: int) -> list[str]:
    """Sentences of generated words; those of seed 1 use the first half of the lexicon."""
    draw = random.Random(3)
    lexicon = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(150)]
    draw = random.Random(seed)
    words = lexicon[:30] if seed == 1 else lexicon
    return [" ".join(draw.choices(words, k=draw.randint(3, 9))).capitalize() + "." for _ in range(number)]


def byte_level() -> Any:
    """A BPE tokenizer of bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(300, 2), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def unigram() -> Any:
    """A Unigram tokenizer as SentencePiece has it."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(sentences(300, 2), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.add_special_tokens(["<sep>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", pad_token="<pad>", sep_token="<sep>"
    )


def wordpiece() -> Any:
    """A WordPiece tokenizer as BERT has it."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(sentences(300, 2), trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(
        zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), specials, strict=True)
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


_POSITIONS = {"max_position_embeddings": 64}
# Kind in `models.KINDS` -> its tokenizer, the class that reads a folder, and settings for a number of words.
KINDS: dict[str, tuple[Callable[[], Any], str, Callable[[int], dict[str, Any]]]] = {
    # A separate output table, and rows without a token.
    "llama": (
        byte_level,
        "AutoModelForCausalLM",
        lambda words: {
            "vocab_size": words + 7,
            **{"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 2},
        },
    ),
    # Names an id without a token.
    "gpt2": (
        byte_level,
        "AutoModelForCausalLM",
        lambda words: {"vocab_size": words, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 50256},
    ),
    "t5_untied": (
        unigram,
        "AutoModelForSeq2SeqLM",
        lambda words: {"vocab_size": words, "pad_token_id": 0, "eos_token_id": 1},
    ),
    "marian": (
        unigram,
        "AutoModelForSeq2SeqLM",
        lambda words: {"vocab_size": words, "decoder_start_token_id": words - 1, **_POSITIONS},
    ),
    "bert": (wordpiece, "AutoModelForMaskedLM", lambda words: {"vocab_size": words, **_POSITIONS}),
}


def make_model(kind: str, words: int) -> Any:
    """A tiny random model of a kind with a number of words."""
    name, settings, _ = MODELS[kind]
    chosen = getattr(transformers, name)
    model = chosen(chosen.config_class(**{**settings, **KINDS[kind][2](words)}))
    if kind == "marian":
        model.generation_config.bad_words_ids = [[0], [words // 2]]
    return model


def save(folder: Path, kind: str, **how: Any) -> Path:
    """A folder with a tiny random model and its tokenizer."""
    torch.manual_seed(5)
    tokenizer = KINDS[kind][0]()
    model = make_model(kind, len(tokenizer))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("bias", "embed_tokens.weight", "shared.weight")):
            torch.nn.init.normal_(tensor, std=0.5)
    model.save_pretrained(folder, **how)
    tokenizer.save_pretrained(folder)
    return folder


def log_probabilities(folder: Path, kind: str, ids: list[int]) -> torch.Tensor:
    """The log-probabilities ``(T, V)`` of the plain model in a folder of a text."""
    return output_of(getattr(transformers, KINDS[kind][1]).from_pretrained(folder).eval(), ids)


def output_of(model: Any, ids: list[int]) -> torch.Tensor:
    """The log-probabilities ``(T, V)`` of a model of a text, which encoder and decoder both read."""
    given = {"input_ids": torch.tensor([ids])}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = given["input_ids"]
    with torch.no_grad():
        return model(**given).logits[0].log_softmax(dim=-1)


def trim(*arguments: object) -> int:
    """The exit status of the command."""
    return main(["trim", *map(str, arguments)])


def error_line(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that the command prints on stderr for a user error."""
    capsys.readouterr()
    assert trim(*arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("shared-embeddings")]
    assert len(lines) == 1
    return lines[0]
