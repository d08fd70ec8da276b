"""Static models as model2vec and sentence-transformers store them, without compressed codes.

Axes: ``V`` vocabulary, ``n`` rows, ``D`` dimensions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from shared_embeddings.checkpoints import save_safetensors
from shared_embeddings.static import table as static
from shared_embeddings.static.table import StaticTable
from shared_embeddings.utils.files import write_json

DTYPES = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}
# The names of tensors: the rows ``(n, D)``, the row of each token ``(V,)``, and its factor ``(V,)``.
TABLE, ROWS, FACTORS = "embeddings", "mapping", "weights"
_CLASS = "sentence_transformers.models.StaticEmbedding"
_MOST = 127


def plain_tensors(table: StaticTable, dtype: str) -> dict[str, Tensor]:
    """Return the tensors of a model in a data type of `DTYPES`, by the names of model2vec.

    Its int8 has no scales. Here each row is rounded with its own scale, which the factors of its tokens have.
    """
    with torch.no_grad():
        vectors = table.embedding.table().float()
    factors = table.factors
    if dtype == "int8":
        scales = vectors.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / _MOST
        codes = (vectors / scales).round()
        scales = (codes * vectors).sum(dim=1) / codes.square().sum(dim=1).clamp(min=1)
        vectors, of_tokens = codes, scales if table.rows is None else scales[table.rows.long()]
        factors = of_tokens if factors is None else factors * of_tokens
    tensors = {TABLE: vectors.to(DTYPES[dtype]), ROWS: table.rows, FACTORS: factors}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def select_tokens(stored: Mapping[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a stored model with these tokens ``(n,)`` only, by the names of model2vec."""
    [old] = [tensor for tensor in stored.values() if tensor.dim() == 2]
    tensors = {name: stored[name][ids] for name in (ROWS, FACTORS) if name in stored}
    rows = ids
    if ROWS in tensors:
        rows, tensors[ROWS] = tensors[ROWS].long().unique(return_inverse=True)
        tensors[ROWS] = tensors[ROWS].to(stored[ROWS].dtype)
    return {TABLE: old[rows], **tensors}


def write_plain(table: StaticTable, tensors: Mapping[str, Tensor], target: Path, source: Path) -> None:
    """Write a model into a folder; the `tensors` are those of `plain_tensors`, `source` is the original."""
    save_safetensors({name: tensor.contiguous() for name, tensor in tensors.items()}, target / static.WEIGHTS)
    table.tokenizer.save(os.fspath(target / static.TOKENIZER), pretty=False)
    config = {
        **table.config,
        "model_type": static.MODEL2VEC,
        "architectures": ["StaticModel"],
        "hidden_dim": tensors[TABLE].size(1),
        "embedding_dtype": str(tensors[TABLE].dtype).removeprefix("torch."),
    }
    if ROWS in tensors:
        config["vocabulary_quantization"] = len(tensors[TABLE])
    write_json(target / static.CONFIG, config)
    _, *others = static.modules(source, table.config)
    first = {"idx": 0, "name": "0", "path": ".", "type": _CLASS}
    write_json(target / static.MODULES, [first, *others])
