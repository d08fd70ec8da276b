"""Tiny random Hugging Face models, their outputs, and those with tokenizers that can be trimmed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

import shared_embeddings as se
from shared_embeddings.accounting import distinct_state
from shared_embeddings.hf.folder import save_pretrained
from shared_embeddings.hf.word_layers import ENTRY, find_tables, place
from shared_embeddings.quant.storage import pack
from tests.helpers import main

WORDS = 300
DIM = 16
IDS = torch.tensor([[2, 17, 299, 0, 5, 1], [9, 8, 3, 4, 0, 0]])

_DECODER = {
    "vocab_size": WORDS,
    "hidden_size": DIM,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
_T5 = {
    "vocab_size": WORDS,
    "d_model": DIM,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
_MARIAN = {
    "vocab_size": WORDS,
    "d_model": DIM,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "scale_embedding": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "forced_eos_token_id": 1,
    "decoder_start_token_id": 0,
    "max_position_embeddings": 32,
}
_BERT = {
    "vocab_size": WORDS,
    "hidden_size": DIM,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}

# Name -> the class, the settings of its configuration, and the tables that it has.
KINDS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "gemma": ("GemmaForCausalLM", _DECODER, ["words"]),
    # Small enough to bend the scores of random weights.
    "gemma2": ("Gemma2ForCausalLM", {**_DECODER, "final_logit_softcapping": 0.5}, ["words"]),
    "gemma3": ("Gemma3ForCausalLM", _DECODER, ["words"]),
    # With vectors for every layer.
    "gemma4": (
        "Gemma4ForCausalLM",
        {**_DECODER, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0, "global_head_dim": 8}
        | {"vocab_size_per_layer_input": WORDS, "layer_types": ["full_attention"], "pad_token_id": 0},
        ["per_layer_words", "words"],
    ),
    "llama": (
        "LlamaForCausalLM",
        {**_DECODER, "tie_word_embeddings": False},
        ["input_words", "output_words"],
    ),
    "qwen2": ("Qwen2ForCausalLM", {**_DECODER, "tie_word_embeddings": True}, ["words"]),
    # Its output layer has another name in files.
    "gpt_neox": ("GPTNeoXForCausalLM", _BERT, ["input_words", "output_words"]),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": WORDS, "n_embd": DIM, "n_layer": 1, "n_head": 2}, ["words"]),
    "bert": ("BertForMaskedLM", _BERT, ["words"]),
    "albert": ("AlbertForMaskedLM", {**_BERT, "hidden_size": 24, "embedding_size": DIM}, ["words"]),
    # With a table of values for attention, and settings that name the tokens of pictures.
    "neomme": (
        "NeoMMEForMaskedLM",
        {**_DECODER, "hidden_size": 24, "head_dim": DIM, "embedding_rank": DIM, "embedding_dim": 8}
        | {"layer_types": ["full_attention"]},
        ["value_words", "words"],
    ),
    "t5": ("T5ForConditionalGeneration", _T5, ["words"]),
    "t5_untied": (
        "T5ForConditionalGeneration",
        {**_T5, "tie_word_embeddings": False},
        ["input_words", "output_words"],
    ),
    "marian": ("MarianMTModel", _MARIAN, ["words"]),
    "marian_two_vocabularies": (
        "MarianMTModel",
        {**_MARIAN, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": WORDS},
        ["input_words", "decoder_words"],
    ),
    "bart": ("BartForConditionalGeneration", _MARIAN, ["words"]),
}

_GPT = {"vocab_size": WORDS, "n_embd": DIM, "n_layer": 1, "n_head": 2, "n_inner": 24}
_MOE = {
    **_DECODER,
    "num_local_experts": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 24,
}
_PADDED = {**_DECODER, "pad_token_id": 0}
_SMALL = {"vocab_size": WORDS, "n_layers": 1, "n_heads": 2}
_XGLM = {"vocab_size": WORDS, "d_model": DIM, "ffn_dim": 24, "num_layers": 1, "attention_heads": 2}
_WIDE = {**_BERT, "hidden_size": 24}


def _classes(ending: str, names: str, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{name}{ending}": settings for name in names.split()}


# Classes of further families, with settings; the table of families in docs/huggingface.md names them.
FAMILIES: dict[str, dict[str, Any]] = {
    **_classes(
        "ForCausalLM", "Mistral Qwen3 Phi Olmo Olmo2 Cohere Granite StableLm Starcoder2 Nemotron", _DECODER
    ),
    **_classes("ForCausalLM", "Phi3 SmolLM3 Glm", _PADDED),
    **_classes("ForCausalLM", "Mixtral Qwen3Moe", _MOE),
    **_classes("ForCausalLM", "Falcon BioGpt", _BERT),
    "Gemma3nForCausalLM": {
        **{**_PADDED, "intermediate_size": [24], "laurel_rank": 4, "activation_sparsity_pattern": [0.0]},
        **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": WORDS, "num_kv_shared_layers": 0},
        **{"altup_num_inputs": 2, "layer_types": ["full_attention"]},
    },
    "Qwen3NextForCausalLM": {
        **{**_MOE, "num_hidden_layers": 2, "shared_expert_intermediate_size": 24},
        "layer_types": ["linear_attention", "full_attention"],
        **{f"linear_num_{part}_heads": 2 for part in ("key", "value")},
        **{f"linear_{part}_head_dim": 8 for part in ("key", "value")},
    },
    "Mamba2ForCausalLM": {
        **{"vocab_size": WORDS, "hidden_size": DIM, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 8},
        **{"state_size": 4, "n_groups": 1, "chunk_size": 4, "pad_token_id": 0},
    },
    # Hashed n-grams of two layers, and of bytes.
    "Qwen4ExpForCausalLM": {
        **{**_MOE, "num_hidden_layers": 3, "shared_expert_intermediate_size": 24, "pad_token_id": 0},
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        **{f"linear_num_{part}_heads": 2 for part in ("key", "value")},
        **{f"linear_{part}_head_dim": 8 for part in ("key", "value")},
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8},
        **{"indexer_compress_ratio": 2, "hc_count": 2, "hc_lowrank": 4, "eos_token_id": 1},
        **{"ple_layer_ids": [1, 2], "ple_embed_dim": 4 * DIM, "heads_per_ngram": 2},
        **{"ngram_vocab_size_base": 90, "make_ngram_vocab_size_divisible_by": 4, "split_ngram_parts": 3},
    },
    "BltForCausalLM": {
        **{f"{part}_config": {**_BERT, "hidden_size_global": 32} for part in ("encoder", "decoder")},
        **{"patcher_config": _BERT, "global_config": {**_BERT, "hidden_size": 32}, "vocab_size": WORDS},
        **{"encoder_hash_byte_group_size": [2, 3], "encoder_hash_byte_group_vocab": 170},
        **{"num_hidden_layers": 1, "pad_token_id": 0},
    },
    "Qwen2MoeForCausalLM": {**_MOE, "shared_expert_intermediate_size": 24},
    "BloomForCausalLM": {"vocab_size": WORDS, "hidden_size": DIM, "n_layer": 1, "n_head": 2},
    "MptForCausalLM": {**_SMALL, "d_model": DIM},
    "OPTForCausalLM": {**_WIDE, "ffn_dim": 24, "word_embed_proj_dim": DIM},
    "XGLMForCausalLM": _XGLM,
    "GPTNeoForCausalLM": {**_BERT, "num_heads": 2, "num_layers": 1, "attention_types": [[["global"], 1]]},
    "GPTJForCausalLM": {**_GPT, "rotary_dim": 8},
    "CodeGenForCausalLM": {**_GPT, "n_head": 4, "rotary_dim": 4},
    "MambaForCausalLM": {"vocab_size": WORDS, "hidden_size": DIM, "num_hidden_layers": 1, "state_size": 4},
    "RwkvForCausalLM": {**_BERT, "num_hidden_layers": 2, "context_length": 32},
    **_classes("ForMaskedLM", "Roberta XLMRoberta Camembert MPNet Deberta DebertaV2", _BERT),
    "ElectraForMaskedLM": {**_WIDE, "embedding_size": DIM},
    "DistilBertForMaskedLM": {**_SMALL, "dim": DIM, "hidden_dim": 24},
    "ModernBertForMaskedLM": {**_BERT, "pad_token_id": 0},
    "RoFormerForMaskedLM": {**_BERT, "embedding_size": DIM},
    **_classes("ForConditionalGeneration", "MT5 LongT5", _T5),
    **_classes("ForConditionalGeneration", "MBart Pegasus M2M100 Blenderbot", _MARIAN),
    "LEDForConditionalGeneration": {**_MARIAN, "attention_window": 4},
    "T5GemmaForConditionalGeneration": {
        "vocab_size": WORDS,
        "encoder": _PADDED,
        "decoder": {**_PADDED, "bos_token_id": 2},
    },
}


def build(kind: str, width: int = DIM) -> Any:
    """The model of a kind, or of the class of a family, without parameters that are initialized to zero."""
    name, settings, _ = KINDS[kind] if kind in KINDS else (kind, FAMILIES[kind], [])
    chosen = getattr(transformers, name)
    torch.manual_seed(3)
    if width != DIM:
        settings = {**settings, "hidden_size": width}
    model = chosen(chosen.config_class(**settings))
    if kind == "t5_untied":
        model.lm_head.weight = torch.nn.Parameter(torch.randn(WORDS, DIM))
    with torch.no_grad():
        biases = [bias for name, bias in model.named_buffers() if "bias" in name and bias.is_floating_point()]
        # Marian's positions are computed, and not saved.
        trained = [parameter for name, parameter in model.named_parameters() if "embed_positions" not in name]
        for tensor in (*trained, *biases):
            tensor.add_(0.05 * torch.randn_like(tensor))
    return model.eval()


def write(kind: str, folder: Path) -> Any:
    """A folder with the model, or with an "encoder", which has no output layer; returns the model."""
    if kind == "encoder":
        model = transformers.BertModel(build("bert").config).eval()
    else:
        model = build(kind)
    model.save_pretrained(folder)
    return model


def add_tokenizer(folder: Path, words: Sequence[str] = (), **marks: str) -> None:
    """Whole words, by default w0 to w299, whose ids are their places; the unknown token is w0 by default."""
    vocabulary = {word: number for number, word in enumerate(words or [f"w{n}" for n in range(WORDS)])}
    marks = {"unk_token": "w0", **marks}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=marks["unk_token"]))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if end := marks.get("sep_token"):
        plain.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"$A {end}", special_tokens=[(end, vocabulary[end])]
        )
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **marks).save_pretrained(folder)


def shrink(
    kind: str,
    folder: Path,
    store: str = "fp32",
    method: str = "projective",
    width: int = DIM,
    **options: Any,
) -> Any:
    """A folder with the model and random embeddings, which takes less time than a fit."""
    model = build(kind, width)
    tables = {table.name: table for table in find_tables(model)}
    if method == "projective":
        options.setdefault("rank", 6)
    fitted = {
        name: se.build(
            method, num_embeddings=len(table.weight), embedding_dim=table.weight.size(1), **options
        ).eval()
        for name, table in tables.items()
    }
    place(model, fitted, {name: table.placement for name, table in tables.items()})
    folder.mkdir()
    # transformers leaves out the other names of tied tensors.
    state = {**model.state_dict(), **pack(distinct_state(model), [ENTRY], store)}
    save_pretrained(model, folder, state_dict=state)
    return model


def scores(model: Any) -> Tensor:
    """The scores of all words after every id."""
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = IDS.flip(1)
    with torch.no_grad():
        logits: Tensor = model.eval()(**inputs).logits
    return logits


def compress(model: Path, method: str, output: Path, *arguments: object) -> int:
    """The exit status of the command."""
    asked = ["compress", "--model", model, "--method", method, "--output", output, *arguments]
    return main([str(argument) for argument in asked])


# Models with tokenizers.

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
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
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
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
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
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
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
# Kind in `KINDS` -> its tokenizer, the class that reads a folder, and settings for a number of words.
TRIMMED: dict[str, tuple[Callable[[], Any], str, Callable[[int], dict[str, Any]]]] = {
    # A separate output table, and rows without a token.
    "llama": (
        byte_level,
        "AutoModelForCausalLM",
        lambda words: {
            "vocab_size": words + 7,
            **{"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 2},
        },
    ),
    # With a second table of the same words.
    "gemma4": (
        byte_level,
        "AutoModelForCausalLM",
        lambda words: {
            **{"vocab_size": words, "vocab_size_per_layer_input": words},
            **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
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
    "neomme": (wordpiece, "AutoModelForMaskedLM", lambda words: {"vocab_size": words, **_POSITIONS}),
}


def make_model(kind: str, words: int) -> Any:
    """A tiny random model of a kind with a number of words."""
    name, settings, _ = KINDS[kind]
    chosen = getattr(transformers, name)
    model = chosen(chosen.config_class(**{**settings, **TRIMMED[kind][2](words)}))
    if kind == "marian":
        model.generation_config.bad_words_ids = [[0], [words // 2]]
    return model


def save(folder: Path, kind: str, **how: Any) -> Path:
    """A folder with a tiny random model and its tokenizer."""
    torch.manual_seed(5)
    tokenizer = TRIMMED[kind][0]()
    model = make_model(kind, len(tokenizer))
    drawn = ("bias", "embed_tokens.weight", "shared.weight")
    drawn += ("value_embeddings.weight", "output_projection.o_proj.weight")  # zero in new models
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(drawn):
            torch.nn.init.normal_(tensor, std=0.5)
    model.save_pretrained(folder, **how)
    tokenizer.save_pretrained(folder)
    return folder


def log_probabilities(folder: Path, kind: str, ids: list[int]) -> torch.Tensor:
    """The log-probabilities ``(T, V)`` of the plain model in a folder of a text."""
    return output_of(getattr(transformers, TRIMMED[kind][1]).from_pretrained(folder).eval(), ids)


def output_of(model: Any, ids: list[int]) -> torch.Tensor:
    """The log-probabilities ``(T, V)`` of a model of a text, which encoder and decoder both read."""
    inputs = {"input_ids": torch.tensor([ids])}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        return model(**inputs).logits[0].log_softmax(dim=-1)


def trim(*arguments: object) -> int:
    """The exit status of the command."""
    return main(["trim", *map(str, arguments)])


def error_line(capsys: pytest.CaptureFixture[str], run: Callable[..., int], *arguments: object) -> str:
    """The one line that `compress` or `trim` prints on stderr for a user error."""
    capsys.readouterr()
    assert run(*arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("shared-embeddings")]
    assert len(lines) == 1
    return lines[0]


def change_json(file: Path, **settings: Any) -> None:
    """Change settings in a JSON file, which may be new."""
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **settings}))
