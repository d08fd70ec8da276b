"""A static model: a table of token vectors and a tokenizer, read from the folders of several programs.

The vector of a text is the mean of the vectors of its tokens. A token has the row of its own, or one that it
shares with others, times its factor.

Axes: ``N`` texts, ``T`` tokens of all texts, ``V`` vocabulary, ``n`` rows, ``D`` dimensions.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_embeddings.accounting import distinct_state
from shared_embeddings.checkpoints import load_tensors
from shared_embeddings.embedding import SharedEmbedding
from shared_embeddings.modules.quantized import QuantizedEmbedding
from shared_embeddings.quant.codec import program
from shared_embeddings.quant.storage import Packing
from shared_embeddings.registry import build
from shared_embeddings.utils.errors import UserError, first_line, require
from shared_embeddings.utils.files import write_json
from shared_embeddings.utils.reading import read_json
from shared_embeddings.word_vectors import load_vectors
from shared_embeddings.word_vectors.adapter import read_compressed, write_compressed

CONFIG, WEIGHTS, TOKENIZER, MODULES = "config.json", "model.safetensors", "tokenizer.json", "modules.json"
# The type of model in the configuration of model2vec, and in that of a compressed model.
MODEL2VEC, COMPRESSED = "model2vec", "shared_embeddings_static"
# The class of sentence-transformers that is read, and the one that loads compressed models.
STATIC, CLASS = "StaticEmbedding", "shared_embeddings.static.module.CompressedStaticEmbedding"
_NORMALIZE = "sentence_transformers.models.Normalize"
# What model2vec reads of a text unless the configuration says otherwise.
_LONGEST = 512
# Settings of model2vec that are not those of a compressed model.
_OF_TABLE = ("architectures", "embedding_dtype", "vocabulary_quantization")
# Bytes of a safetensors file that are searched for its tensors.
_SEARCHED_BYTES = 2**16


class StaticTable(nn.Module):
    """A table with its tokenizer.

    Attributes:
        embedding: of rows ``(n, D)``.
        tokenizer: of the library tokenizers.
        config: ``normalize``: whether vectors of texts have length one; ``max_length``: how many tokens of a
            text are read, None for all; ``drops_unknown``: whether tokens of unknown words are left out; and
            what else the configuration of the original says.
        rows: ``(V,)`` the row of each token; None for its own.
        factors: ``(V,)`` of the rows of tokens; None for 1.
        packing: of a compressed model.
        stored: the tensors of an original model.
    """

    embedding: Any  # a SharedEmbedding
    rows: Tensor | None
    factors: Tensor | None

    def __init__(
        self,
        embedding: SharedEmbedding,
        tokenizer: Any,
        config: dict[str, Any],
        rows: Tensor | None = None,
        factors: Tensor | None = None,
        packing: Packing | None = None,
        stored: dict[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.embedding, self.tokenizer, self.config = embedding, tokenizer, config
        self.packing, self.stored = packing, stored
        self.register_buffer("rows", rows)
        self.register_buffer("factors", factors)
        ids = self.tokenizer.get_vocab()
        size = self.embedding.num_embeddings if self.rows is None else len(self.rows)
        if ids and max(ids.values()) >= size:
            raise UserError(
                f"the tokenizer has {max(ids.values()) + 1} tokens, but the table only {size}: it belongs to "
                "another model; give the model its own"
            )
        tokens = {number: token for token, number in ids.items()}
        self.tokens = [
            tokens.get(number, f"<unused {number}>").replace("\n", "\\n") for number in range(size)
        ]
        self.unknown = _unknown_id(self.tokenizer)
        self.tokenizer.no_padding()
        self.longest_text = None
        if (longest := self.config["max_length"]) is None:
            self.tokenizer.no_truncation()
        else:
            self.tokenizer.enable_truncation(longest)
            # As model2vec cuts texts before it tokenizes them.
            self.longest_text = longest * int(statistics.median(map(len, ids)))

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of the tokens of each text."""
        texts = [text[: self.longest_text] for text in texts]
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        if self.config["drops_unknown"] and self.unknown is not None:
            ids = [[token for token in text if token != self.unknown] for text in ids]
        return ids

    def vectors(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Return the means ``(N, D)`` of the vectors of tokens ``(T,)`` of texts, which start at `offsets`.

        A text without tokens has zeros. The means are not normalized.
        """
        tokens, places = ids.unique(return_inverse=True)
        words = tokens if self.rows is None else self.rows[tokens].long()
        # The mean of coded rows gives the same vectors, with fewer products; calibration looks at look-ups.
        embedding = self.embedding
        is_coded = isinstance(embedding, QuantizedEmbedding) and not torch.is_grad_enabled()
        rows = (embedding.coded_rows(words) if is_coded else embedding(words)).float()
        if self.factors is not None:
            rows = rows * self.factors[tokens].float().unsqueeze(1)
        means = F.embedding_bag(places, rows, offsets, mode="mean")
        return embedding.restore(means) if is_coded else means

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the model, by the names in its file."""
        both = zip(load_vectors.EXTRAS, (self.rows, self.factors))
        of_tokens = {name: tensor for name, tensor in both if tensor is not None}
        return {**distinct_state(self.embedding), **of_tokens}

    def write(self, target: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the table into a folder, with what reads it; the `tensors` may be packed."""
        write_compressed(target / WEIGHTS, self.tokens, self.embedding, tensors)
        self.tokenizer.save(os.fspath(target / TOKENIZER), pretty=False)
        config = {name: value for name, value in self.config.items() if name not in _OF_TABLE}
        write_json(target / CONFIG, {**config, "model_type": COMPRESSED})
        loader = Path(load_vectors.__file__)
        (target / loader.name).write_text(program(loader), encoding="utf-8")


def flat(texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the tokens ``(T,)`` of texts, and where each text starts ``(N,)``."""
    lengths = torch.tensor([0, *map(len, texts)])
    ids = np.fromiter(itertools.chain.from_iterable(texts), np.int64, int(lengths.sum()))
    return torch.from_numpy(ids), lengths.cumsum(0)[:-1]


# Reading.


def is_static(path: Path) -> bool:
    """Return whether a folder, or the file of WordLlama, looks like a static model."""
    if path.is_file():
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = file.read(min(size, _SEARCHED_BYTES))
        try:
            return json.loads(header).keys() - {"__metadata__"} == {"embedding.weight"}
        except (ValueError, AttributeError):
            return False
    try:
        if (path / CONFIG).is_file() and read_json(path / CONFIG).get("model_type") in (
            MODEL2VEC,
            COMPRESSED,
        ):
            return True
        return str(read_json(path / MODULES)[0]["type"]).endswith(f".{STATIC}")
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        return False


def read(path: Path) -> StaticTable:
    """Return the static model in a folder, or in WordLlama's file beside its tokenizer.

    Raises:
        UserError: the model is damaged or incomplete.
    """
    try:
        if path.is_file():
            return _read_plain(path, _tokenizer_of(path), {})
        config = read_json(path / CONFIG) if (path / CONFIG).is_file() else {}
        if config.get("model_type") == COMPRESSED:
            return read_folder(path / WEIGHTS, path / TOKENIZER, config)
        place = path
        if not (path / WEIGHTS).is_file() and (path / MODULES).is_file():
            place = path / Path(read_json(path / MODULES)[0]["path"]).name
        return _read_plain(place / WEIGHTS, place / TOKENIZER, config)
    except ImportError:
        raise
    except Exception as error:  # of the library tokenizers, and of settings of other forms
        if isinstance(error, UserError) and str(path) in str(error):
            raise
        raise UserError(f"model {path}: cannot be read ({first_line(error)}); copy it again") from error


def read_folder(weights: Path, tokenizer: Path, config: Mapping[str, Any]) -> StaticTable:
    """Return a compressed model from its files and the content of its configuration."""
    stored = read_compressed(weights)
    rows, factors = (stored.extras.get(name) for name in load_vectors.EXTRAS)
    read_with = _read_tokenizer(tokenizer)
    return StaticTable(stored.embedding, read_with, dict(config), rows, factors, stored.packing)


def _read_plain(weights: Path, tokenizer: Path, config: Mapping[str, Any]) -> StaticTable:
    """Return a model of another program; factors without shared rows become a part of the table."""
    stored = load_tensors(weights, f"weights {weights}")
    name = next(name for name in ("embeddings", "embedding.weight") if name in stored)
    table, rows, factors = stored[name], stored.get("mapping"), stored.get("weights")
    if table.dtype != torch.float16:
        table = table.half() if table.dtype == torch.int8 else table.float()
    if factors is not None and rows is None:
        table, factors = (table.float() * factors.float().unsqueeze(1)).to(table.dtype), None
    with torch.device("meta"):
        count, dim = table.shape
        embedding = build("standard", num_embeddings=count, embedding_dim=dim).eval()
    embedding.load_state_dict({"weight": table}, assign=True)
    if rows is not None and not 0 <= int(rows.min()) <= int(rows.max()) < count:
        raise UserError(f"mapping names other rows than the {count} of the table")
    of_model2vec = config.get("model_type") == MODEL2VEC
    settings = {
        **config,
        "normalize": bool(config.get("normalize", False)),
        "max_length": config.get("max_length", _LONGEST if of_model2vec else None),
        "drops_unknown": config.get("drops_unknown", of_model2vec),
    }
    rows = None if rows is None else rows.int()
    factors = None if factors is None else factors.float()
    return StaticTable(embedding, _read_tokenizer(tokenizer), settings, rows, factors, stored=stored)


def _read_tokenizer(path: Path) -> Any:
    return require("tokenizers").Tokenizer.from_file(os.fspath(path))


def _tokenizer_of(weights: Path) -> Path:
    """Return the file of the tokenizer of a file of WordLlama, such as weights/NAME_256.safetensors."""
    name = f"{weights.stem.rpartition('_')[0]}_tokenizer_config.json"
    places = [weights.with_name(TOKENIZER), weights.with_name(name), weights.parents[1] / "tokenizers" / name]
    for place in places:
        if place.is_file():
            return place
    raise UserError(f"it has no tokenizer beside it: put it there as {TOKENIZER} or {name}")


def _unknown_id(tokenizer: Any) -> int | None:
    """Return the id of unknown words."""
    if hasattr(tokenizer.model, "unk_token"):
        token = tokenizer.model.unk_token
        return None if token is None else tokenizer.token_to_id(token)
    number: int | None = json.loads(tokenizer.to_str())["model"].get("unk_id")
    return number


def modules(source: Path, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the content of ``modules.json`` of a compressed model, with later modules of its original."""
    first = {"idx": 0, "name": "0", "path": "", "type": CLASS}
    if source.is_dir() and (source / MODULES).is_file():
        return [first, *read_json(source / MODULES)[1:]]
    normalize = {"idx": 1, "name": "1", "path": "1_Normalize", "type": _NORMALIZE}
    return [first, normalize] if config["normalize"] else [first]
