"""Tiny static models in the layouts of all programs, written with numpy and safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS, DIM = 60, 12
UNKNOWN = 0


def make_tokenizer(kind: str = "WordLevel") -> Tokenizer:
    """Words w1 to w59, and an unknown one; as a WordPiece tokenizer, of pieces that spell numbers."""
    if kind == "WordPiece":
        pieces = [
            "[UNK]",
            "w",
            *(f"##{number}" for number in range(10)),
            *(f"w{number}" for number in range(1, 49)),
        ]
        model = models.WordPiece({piece: place for place, piece in enumerate(pieces)}, unk_token="[UNK]")
    else:
        vocabulary = {"[UNK]": 0, **{f"w{number}": number for number in range(1, WORDS)}}
        model = models.WordLevel(vocabulary, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def rows(count: int = WORDS, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def write_model2vec(
    folder: Path,
    table: np.ndarray | None = None,
    weights: np.ndarray | None = None,
    mapping: np.ndarray | None = None,
    tokenizer: Tokenizer | None = None,
    **settings: Any,
) -> Path:
    """A folder of model2vec."""
    tensors = {"embeddings": rows() if table is None else table, "weights": weights, "mapping": mapping}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    config = {"model_type": "model2vec", "architectures": ["StaticModel"], "normalize": True}
    config |= {"embedding_dtype": tensors["embeddings"].dtype.name, "hidden_dim": DIM, **settings}
    write_json(folder / "config.json", config)
    modules = [{"idx": 0, "name": "0", "path": ".", "type": "sentence_transformers.models.StaticEmbedding"}]
    if config["normalize"]:
        normalize = "sentence_transformers.models.Normalize"
        modules.append({"idx": 1, "name": "1", "path": "1_Normalize", "type": normalize})
    write_json(folder / "modules.json", modules)
    save_file(tensors, folder / "model.safetensors")
    (tokenizer or make_tokenizer()).save(os.fspath(folder / "tokenizer.json"))
    return folder


def write_static_embedding(folder: Path, table: np.ndarray, is_nested: bool = False) -> Path:
    """A folder of sentence-transformers, with the table in it or in a folder of its own."""
    place = "0_StaticEmbedding" if is_nested else ""
    kind = "sentence_transformers.sentence_transformer.modules.static_embedding.StaticEmbedding"
    write_json(folder / "modules.json", [{"idx": 0, "name": "0", "path": place, "type": kind}])
    write_json(folder / "config_sentence_transformers.json", {"prompts": {}, "similarity_fn_name": "cosine"})
    (folder / place).mkdir(exist_ok=True)
    save_file({"embedding.weight": table}, folder / place / "model.safetensors")
    make_tokenizer().save(os.fspath(folder / place / "tokenizer.json"))
    return folder


def write_wordllama(folder: Path, table: np.ndarray) -> Path:
    """The file of WordLlama, beside a folder with its tokenizer."""
    for name in ("weights", "tokenizers"):
        (folder / name).mkdir(parents=True)
    path = folder / "weights" / f"tiny_{DIM}.safetensors"
    save_file({"embedding.weight": table.astype(np.float16)}, path)
    make_tokenizer().save(os.fspath(folder / "tokenizers" / "tiny_tokenizer_config.json"))
    return path


def write_text(path: Path, lines: int = 40, seed: int = 2) -> Path:
    """Lines of words, some more frequent than others."""
    draw = np.random.default_rng(seed)
    words = [np.minimum(draw.geometric(0.06, draw.integers(3, 9)), WORDS - 1) for _ in range(lines)]
    path.write_text("".join(" ".join(f"w{word}" for word in line) + "\n" for line in words))
    return path


def means(texts: Sequence[Sequence[int]], vectors: np.ndarray) -> np.ndarray:
    """The mean vectors of texts, of their ids, in plain numpy; zeros without tokens."""
    return np.stack([vectors[list(ids)].mean(0) if ids else np.zeros(vectors.shape[1]) for ids in texts])
