"""Models that are only a table: read, written with model2vec's own means, and measured.

Axes: ``V`` vocabulary, ``D`` dimensions, ``N`` sentences.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from recipes.common.results import Record, write_result
from recipes.common.table import NONE, Column, markdown_table, number
from recipes.common.tools import read_json, run_command, run_step
from recipes.shrink_a_model.encoder import EncoderTexts, measure, quality_columns, read_all
from recipes.shrink_a_model.preprocess import MODEL, PAIRS, TEXTS, installed
from shared_embeddings.static import table as static
from shared_embeddings.utils.errors import require
from shared_embeddings.utils.files import bytes_on_disk, replacing, sha256

STATIC = "static"
# Of each model, the row of the original.
ORIGINAL = "float16"
# Sentences that model2vec encodes together, and runs of which the fastest counts.
_BATCH, _ROUNDS = 1024, 20
_WORDS = "words"  # the names of tokens, for numpy


@dataclass(frozen=True)
class StaticEncoder:
    """A static model as sentence-transformers computes with it.

    Attributes:
        table: of the model.
    """

    table: static.StaticTable

    @torch.inference_mode()
    def encode(self, sentences: Sequence[str]) -> np.ndarray:
        """Return means of the vectors of the tokens of each sentence, of length one ``(N, D)``."""
        parts = []
        for start in range(0, len(sentences), _BATCH):
            ids, offsets = static.flat(self.table.tokenize(sentences[start : start + _BATCH]))
            means = self.table.vectors(ids, offsets)
            parts.append(torch.nn.functional.normalize(means, dim=1).numpy())
        return np.concatenate(parts)


def read_static(folder: Path) -> StaticEncoder:
    """Return the model in a folder."""
    return StaticEncoder(static.read(folder))


def load_model2vec(packages: Sequence[str], home: Path) -> Any:
    """Return the module of model2vec, which is installed into a folder once."""
    folder = home / "downloads" / "-".join(packages)
    if not folder.is_dir():
        with replacing(folder) as temporary:
            run_command("pip", ["install", "--no-deps", "--quiet", "--target", str(temporary), *packages])
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return require("model2vec")


def get_static(name: str, settings: Mapping[str, Any], home: Path) -> Path:
    """Write the static model of a name as a folder of model2vec in float32, and return it.

    It is the table in a file of a package, or distilled from the encoder of the recipe.
    """
    folder = home / "data" / name
    packages, wanted = settings[STATIC]["packages"], settings[STATIC][name]

    def read() -> None:
        with installed(wanted["packages"]) as place:
            asked: list[str | Path] = [
                "export",
                "--model",
                Path(place, wanted["file"]),
                "--format",
                "model2vec",
            ]
            run_command("shared-embeddings", [*asked, "--dtype", "float32", "--output", folder, "--force"])

    def distill() -> None:
        load_model2vec(packages, home)
        transformers, source = require("transformers"), home / "data" / MODEL
        model, tokenizer = (
            kind.from_pretrained(source, local_files_only=True)
            for kind in (transformers.AutoModel, transformers.AutoTokenizer)
        )
        with replacing(folder) as temporary:
            distilled = require("model2vec.distill").distill_from_model(
                model, tokenizer, device="cpu", quantize_to="float32"
            )
            distilled.config["tokenizer_name"] = MODEL  # not the name of a folder
            distilled.save_pretrained(temporary)

    outputs = [folder / name for name in (static.CONFIG, static.WEIGHTS, static.TOKENIZER)]
    run_step(home / "steps", name, [], outputs, read if wanted else distill, **settings[STATIC], name=name)
    return folder


def write_peer(source: Path, folder: Path, kind: str, model2vec: Any) -> None:
    """Write a static model as model2vec makes it smaller.

    Args:
        source: a folder of model2vec.
        folder: the output.
        kind: ``float16``; ``int8``, with one scale for the table; ``pca_64``, so many principal directions in
            int8; ``kmeans_4000``, so many rows in float16 that tokens share.
        model2vec: the module.
    """
    name, _, size = kind.partition("_")
    model, quantize = model2vec.StaticModel.from_pretrained(source), model2vec.model.quantize_model
    with replacing(folder) as temporary:
        if name == "pca":
            _, _, directions = np.linalg.svd(model.embedding, full_matrices=False)
            model.embedding = model.embedding @ directions[: int(size)].T
            model = quantize(model, quantize_to="int8")
        elif name == "kmeans":
            model = quantize(model, vocabulary_quantization=int(size), quantize_to="float16")
        else:
            model = quantize(model, quantize_to=name)
        model.save_pretrained(temporary)
        # As many bits as they need.
        tensors = load_file(temporary / static.WEIGHTS)
        if "mapping" in tensors:
            tensors |= {
                "mapping": tensors["mapping"].astype(np.int16),
                "weights": tensors["weights"].astype(np.float16),
            }
            save_file(tensors, temporary / static.WEIGHTS)


def evaluate_static(
    home: Path, row: str, name: str, config: Mapping[str, Any], model2vec: Any, checksum: str
) -> Path:
    """Measure the model of a row, of the static model of a name; return the file of results.

    Speed is relative to model2vec's own encoding of the original in float32.
    """
    folder, source, prepared = home / "models" / row, home / "data" / name, home / "data"
    texts = EncoderTexts(**read_json(prepared / TEXTS))
    encoder, original = read_static(folder), read_static(source)
    vectors, before = (texts.encode(read, prepared / PAIRS) for read in (encoder, original))
    with safe_open(folder / static.WEIGHTS, "pt") as file:
        stored = sum(file.get_tensor(key).nbytes for key in file.keys() if key != _WORDS)
    return write_result(
        home,
        row,
        config={STATIC: name, **config},
        counts={
            "words": len(encoder.table.tokens),
            "weights": original.table.embedding.num_embeddings * original.table.embedding.embedding_dim,
            "folder_bytes": bytes_on_disk(folder),
            "stored_bits": 8 * stored,
        },
        metrics={
            **measure(vectors, before, read_all(prepared / PAIRS)),
            "speed": _speed(
                encoder, source, [*texts.captions, *texts.headlines, *texts.descriptions], model2vec
            ),
        },
        data_checksum=checksum,
        checksums={"model": sha256(folder / static.WEIGHTS)},
    )


def _speed(encoder: StaticEncoder, source: Path, sentences: Sequence[str], model2vec: Any) -> float:
    """Return how many times as many sentences a second an encoder reads as model2vec; the two take turns."""
    other = model2vec.StaticModel.from_pretrained(source)
    runs = [
        partial(other.encode, list(sentences), use_multiprocessing=False),
        partial(encoder.encode, sentences),
    ]
    best = [float("inf")] * 2
    for _ in range(_ROUNDS):
        for place, run in enumerate(runs):
            started = time.perf_counter()
            run()
            best[place] = min(best[place], time.perf_counter() - started)
    return best[0] / best[1]


def static_table(records: Sequence[Record]) -> str:
    """Return the Markdown table of the measured rows of static models."""
    done = [record for record in records if record.get("metrics")]
    sets = list(done[0]["metrics"]["rho"]) if done else []
    columns = [
        Column("row", lambda r: r["row"], always=True),
        Column("bits a number", lambda r: f"{r['counts']['stored_bits'] / r['counts']['weights']:.2f}"),
        Column("weights, MB", number("{:.2f}", "counts", "stored_bits", factor=1 / 8e6)),
        *quality_columns(sets),
        Column("speed", number("{:.2f}x", "metrics", "speed")),
    ]
    others = ", ".join(f"`{record['row']}`" for record in records if record not in done)
    return markdown_table(done, columns, NONE) + (f"\nNot run: {others}." if others else "")
