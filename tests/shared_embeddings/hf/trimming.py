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

SYLLABLES = ["ka", "to", "mi", "re", "shu", "lon", "ber", "ti", "na", "ou", "gra", "ph", "ing", "é"]
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
SEQUENCES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
}


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


def llama(words: int) -> Any:
    """A causal model with a separate output table that has rows without a token."""
    ids = {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 2}
    config = transformers.LlamaConfig(vocab_size=words + 7, num_key_value_heads=2, **SIZES, **ids)
    return transformers.LlamaForCausalLM(config)


def gpt2(words: int) -> Any:
    """A causal model with tied tables, whose configuration names an id without a token."""
    config = transformers.GPT2Config(
        vocab_size=words, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=50256
    )
    return transformers.GPT2LMHeadModel(config)


def t5(words: int) -> Any:
    """A sequence-to-sequence model with a separate output layer."""
    config = transformers.T5Config(
        vocab_size=words,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def marian(words: int) -> Any:
    """A sequence-to-sequence model with a bias for every word."""
    ids = {
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": words - 1,
        "forced_eos_token_id": 1,
    }
    model = transformers.MarianMTModel(transformers.MarianConfig(vocab_size=words, **SEQUENCES, **ids))
    model.generation_config.bad_words_ids = [[0], [words // 2]]
    return model


def bert(words: int) -> Any:
    """A masked language model."""
    config = transformers.BertConfig(vocab_size=words, max_position_embeddings=64, **SIZES)
    return transformers.BertForMaskedLM(config)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[int], Any], str]] = {
    "llama": (byte_level, llama, "AutoModelForCausalLM"),
    "gpt2": (byte_level, gpt2, "AutoModelForCausalLM"),
    "t5": (unigram, t5, "AutoModelForSeq2SeqLM"),
    "marian": (unigram, marian, "AutoModelForSeq2SeqLM"),
    "bert": (wordpiece, bert, "AutoModelForMaskedLM"),
}


def save(folder: Path, kind: str, **how: Any) -> Path:
    """A folder with a tiny random model and its tokenizer."""
    torch.manual_seed(5)
    tokenizer = KINDS[kind][0]()
    model = KINDS[kind][1](len(tokenizer))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("bias", "embed_tokens.weight", "shared.weight")):
            torch.nn.init.normal_(tensor, std=0.5)
    model.save_pretrained(folder, **how)
    tokenizer.save_pretrained(folder)
    return folder


def log_probabilities(folder: Path, kind: str, ids: list[int]) -> torch.Tensor:
    """The log-probabilities ``(T, V)`` of the plain model in a folder of a text."""
    return output_of(getattr(transformers, KINDS[kind][2]).from_pretrained(folder).eval(), ids)


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
