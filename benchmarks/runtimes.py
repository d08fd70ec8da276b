"""Run tables in MLX and llama.cpp themselves: perplexity and speed, beside the table that the runtime rounds.

Run it in an environment with the runtime, which needs nothing of this package but a written model::

    python benchmarks/runtimes.py mlx --original DIR --small SMALL --windows FILE.npz --grid 4_64
    python benchmarks/runtimes.py llama.cpp --original A.gguf --small SMALL.gguf --windows W.npz --grid Q4_0

The windows are those that the recipe `shrink_a_model` writes: by text, ids ``(N, T)`` with the beginning
mark. Prints a line in JSON for each table. Perplexities are of all tokens but the first of a window. Speed is
that of generating tokens after one, the best of three times; the tables take turns.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_TIMES = 3


class Runner(NamedTuple):
    """A model in a runtime."""

    table: str  # what its table is
    score: Callable[[Any], Any]  # of ids ``(T,)``, the scores ``(T, V)`` in float32
    generate: Callable[[int], None]  # so many tokens


def read_mlx(folder: Path, table: str, grid: str | None) -> Runner:
    """Read a folder with mlx-lm; with a grid, such as 4_64, MLX rounds its table."""
    mx, nn, mlx_lm = map(importlib.import_module, ("mlx.core", "mlx.nn", "mlx_lm"))
    generate_step = importlib.import_module("mlx_lm.generate").generate_step
    model, _ = mlx_lm.load(str(folder))
    if grid is not None:
        bits, group = map(int, grid.split("_"))
        nn.quantize(model, group, bits, class_predicate=lambda _, layer: isinstance(layer, nn.Embedding))

    def score(ids: Any) -> Any:
        return np.array(model(mx.array(ids)[None])[0].astype(mx.float32))

    def generate(count: int) -> None:
        for _ in generate_step(mx.array([2]), model, max_tokens=count):
            pass

    return Runner(table, score, generate)


def read_llama(file: Path, table: str) -> Runner:
    """Read a GGUF file with llama-cpp-python."""
    model = importlib.import_module("llama_cpp").Llama(
        str(file), n_ctx=512, n_threads=2, logits_all=True, verbose=False
    )

    def score(ids: Any) -> Any:
        model.reset()
        model.eval(ids.tolist())
        return model.scores[: len(ids)]

    def generate(count: int) -> None:
        model.reset()
        token = 2
        for _ in range(count):
            model.eval([token])
            token = int(model.scores[model.n_tokens - 1].argmax())

    return Runner(table, score, generate)


def round_gguf(original: Path, output: Path, grid: str) -> None:
    """Write a GGUF file whose table is rounded to a type as llama.cpp's own package does."""
    gguf = importlib.import_module("gguf")
    reader = gguf.GGUFReader(original)
    writer = gguf.GGUFWriter(output, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            kinds = field.types[0], field.types[-1] if is_array else None
            writer.add_key_value(field.name, field.contents(), *kinds)
    kind = gguf.GGMLQuantizationType[grid]
    for tensor in reader.tensors:
        data, of_tensor = tensor.data, tensor.tensor_type
        if tensor.name == "token_embd.weight":
            dense = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            data, of_tensor = gguf.quants.quantize(dense, kind), kind
        writer.add_tensor(tensor.name, data, raw_dtype=of_tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def perplexities(runner: Runner, windows: Mapping[str, Any]) -> dict[str, float]:
    """Return the perplexity of each text."""
    result = {}
    for text, rows in windows.items():
        nats = 0.0
        for ids in rows:
            scores = runner.score(ids)[:-1].astype(np.float64)
            highest = scores.max(axis=1)
            totals = highest + np.log(np.exp(scores - highest[:, None]).sum(axis=1))
            nats += float((totals - scores[np.arange(len(totals)), ids[1:]]).sum())
        result[text] = math.exp(nats / (rows.size - len(rows)))
    return result


def main() -> None:
    """Measure three tables of a model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runtime", choices=["mlx", "llama.cpp"])
    for name in ("original", "small", "windows"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    parser.add_argument("--grid", required=True, help="of the table, by the name that the runtime has for it")
    parser.add_argument("--every", type=int, default=1, help="measure each so many-th window of a text")
    parser.add_argument("--tokens", type=int, default=64, help="to generate (default: 64)")
    known = parser.parse_args()
    with np.load(known.windows) as file:
        windows = {text: file[text][:: known.every] for text in file.files}
    if known.runtime == "mlx":
        runners = [
            read_mlx(known.original, "original", None),
            read_mlx(known.original, f"{known.grid}, rounded by MLX", known.grid),
            read_mlx(known.small, f"{known.grid}, calibrated", None),
        ]
    else:
        rounded = known.small.with_suffix(".rounded.gguf")
        round_gguf(known.original, rounded, known.grid)
        tables = {
            known.original: "original",
            rounded: f"{known.grid}, rounded by llama.cpp",
            known.small: f"{known.grid}, calibrated",
        }
        runners = [read_llama(file, table) for file, table in tables.items()]
    seconds = {runner.table: math.inf for runner in runners}
    for _ in range(_TIMES):
        for runner in runners:
            started = time.perf_counter()
            runner.generate(known.tokens)
            seconds[runner.table] = min(seconds[runner.table], time.perf_counter() - started)
    for runner in runners:
        speed = known.tokens / seconds[runner.table]
        measured = {"table": runner.table, "tokens per second": round(speed, 2)}
        print(json.dumps(measured | {"perplexity": perplexities(runner, windows)}), flush=True)


if __name__ == "__main__":
    main()
