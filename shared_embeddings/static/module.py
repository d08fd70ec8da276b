"""A compressed static model as a module of sentence-transformers, which ``modules.json`` names.

>>> from sentence_transformers import SentenceTransformer              # doctest: +SKIP
>>> model = SentenceTransformer("small", trust_remote_code=True)       # doctest: +SKIP
>>> model.encode(["A dog runs on the beach."])                         # doctest: +SKIP

Its table stays in few bits in memory; rows are decoded when texts have them.

Axes: ``N`` texts, ``T`` tokens of all texts, ``D`` dimensions.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shared_embeddings.quant.storage import packed_as
from shared_embeddings.static.table import CONFIG, TOKENIZER, WEIGHTS, StaticTable, flat, read_folder
from shared_embeddings.utils.errors import require
from shared_embeddings.utils.reading import read_json


class CompressedStaticEmbedding(nn.Module):
    """Computes the vectors of texts: means of the vectors of their tokens.

    It has the methods that sentence-transformers calls, which therefore need not be installed with this
    library.
    """

    modalities = ("text",)
    save_in_root = True

    def __init__(self, table: StaticTable) -> None:
        super().__init__()
        self.table, self.tokenizer = table, table.tokenizer

    def preprocess(
        self, inputs: Sequence[str], prompt: str | None = None, **settings: Any
    ) -> dict[str, Tensor]:
        """Return ``input_ids`` ``(T,)`` and ``offsets`` ``(N,)``, where each text starts."""
        ids, offsets = flat(self.table.tokenize([f"{prompt or ''}{text}" for text in inputs]))
        return {"input_ids": ids, "offsets": offsets}

    def tokenize(self, texts: Sequence[str], **settings: Any) -> dict[str, Tensor]:
        """As `preprocess`, for sentence-transformers before 6."""
        return self.preprocess(texts, **settings)

    def forward(self, features: dict[str, Any], **settings: Any) -> dict[str, Any]:
        """Add ``sentence_embedding`` ``(N, D)`` to the features."""
        features["sentence_embedding"] = self.table.vectors(features["input_ids"], features["offsets"])
        return features

    @property
    def max_seq_length(self) -> float:
        """How many tokens of a text are read."""
        return self.table.config["max_length"] or math.inf

    def get_embedding_dimension(self) -> int:
        """Return D."""
        return self.table.embedding.embedding_dim

    def get_sentence_embedding_dimension(self) -> int:
        """Return D, for sentence-transformers before 6."""
        return self.table.embedding.embedding_dim

    def save(self, output_path: str | os.PathLike[str], *arguments: Any, **settings: Any) -> None:
        """Write the files of the folder that `load` reads."""
        self.table.write(Path(output_path), packed_as(self.table.tensors(), self.table.packing))

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        **settings: Any,
    ) -> CompressedStaticEmbedding:
        """Load a folder that `shared-embeddings compress` wrote, or its copy on the Hub."""
        files = []
        for name in (WEIGHTS, TOKENIZER, CONFIG):
            path = Path(model_name_or_path, subfolder, name)
            if not Path(model_name_or_path).is_dir():
                path = require("huggingface_hub").hf_hub_download(
                    model_name_or_path,
                    name,
                    subfolder=subfolder or None,
                    token=token,
                    cache_dir=cache_folder,
                    revision=revision,
                    local_files_only=local_files_only,
                )
            files.append(Path(path))
        weights, tokenizer, config = files
        return cls(read_folder(weights, tokenizer, read_json(config)))
