"""Tokens per second and memory of whole decoders that generate text, the first one as the reference.

    OMP_NUM_THREADS=1 python -m benchmarks.generation MODEL SMALL SMALL:int8 FILE.gguf

Folders of Hugging Face models are run by transformers in fp32, ``FOLDER:bf16`` in bf16, and ``FOLDER:int8``
with torch's dynamic int8 for its linear layers. GGUF files are run by llama.cpp, through the package
``llama-cpp-python``. Every round runs each of them once, in a process of its own, so that all share the
noise of the machine; the table has medians of rounds.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import shared_embeddings.hf  # noqa: F401  # registers with transformers
from benchmarks.measuring import in_fresh_process, markdown, memory, parser_of, publish
from recipes.common.tools import run_main
from shared_embeddings.utils.command_line import positive
from shared_embeddings.utils.errors import UserError

PROMPT = "The city lies on a river, at the foot of the mountains. In the nineteenth century"


def generator(name: str, threads: int) -> Callable[[int], object]:
    """A function that generates a number of tokens greedily, with transformers or llama.cpp."""
    path, _, kind = name.partition(":")
    if path.endswith(".gguf"):
        llama: Any = importlib.import_module("llama_cpp").Llama
        reader = llama(path, n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)
        tokens = reader.tokenize(PROMPT.encode())

        def generate(count: int) -> None:
            reader.reset()
            next(islice(reader.generate(tokens, temp=0.0), count - 1, None), None)

        return generate
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    if kind == "int8":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its successor, torchao, has no layer of this kind for CPUs
            model = torch.ao.quantization.quantize_dynamic(
                model, {torch.nn.Linear}, torch.qint8, inplace=True
            )
    prompt = AutoTokenizer.from_pretrained(path)(PROMPT, return_tensors="pt")
    return lambda count: model.generate(
        **prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
    )


def measure(name: str, tokens: int, threads: int) -> dict[str, Any]:
    """Tokens per second of the model in this process, after the prompt, and the memory that it takes."""
    before = memory()
    generate = generator(name, threads)
    generate(2)
    gc.collect()
    taken = []
    for count in (2, tokens + 2):
        start = time.perf_counter()
        generate(count)
        taken.append(time.perf_counter() - start)
    speed = {"tokens_per_second": tokens / (taken[1] - taken[0])}
    return {**speed, "resident_bytes": memory() - before, "peak_bytes": memory("VmHWM") - before}


def as_table(record: dict[str, Any]) -> str:
    """A Markdown table; speeds are relative to the first model."""
    titles = ["model", "weights on disk, MB", "in memory, MiB", "peak, MiB", "tokens/s", "/ first"]
    rounds = record["measured"]
    first = [turn["tokens_per_second"] for turn in rounds[record["names"][0]]]
    rows = []
    for name in record["names"]:
        speeds = [turn["tokens_per_second"] for turn in rounds[name]]
        ratio = statistics.median(speed / other for speed, other in zip(speeds, first, strict=True))
        held, most = (max(turn[key] for turn in rounds[name]) for key in ("resident_bytes", "peak_bytes"))
        size = [f"{record['bytes'][name] / 1e6:.1f}", f"{held / 2**20:.0f}", f"{most / 2**20:.0f}"]
        rows.append([name, *size, f"{statistics.median(speeds):.1f}", f"{ratio:.2f}"])
    note = f"{record['tokens']} tokens; rounds: {len(first)}; threads: {record['threads']}"
    return f"{markdown(titles, rows)}\n\n{note}; torch {record['torch']}."


def main(arguments: Sequence[str]) -> None:
    """Measure every model in turns, and publish."""
    parser = parser_of("benchmarks.generation", __doc__, threads=1)
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="folders, FOLDER:bf16, FOLDER:int8, GGUF files"
    )
    parser.add_argument("--tokens", type=positive, default=32, help="new tokens of each run (default: 32)")
    parser.add_argument("--marker", default="generation", help="name of the results (default: generation)")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.measure:
        print(json.dumps(measure(options.models[0], options.tokens, options.threads)))
        return
    names = {name: os.path.basename(name.rstrip("/")) for name in options.models}
    sizes = {}
    for name, short in names.items():
        path = Path(name.partition(":")[0])
        files = [path] if path.is_file() else [*path.glob("*.safetensors")]
        if not files:
            raise UserError(f"{path}: is neither a folder with *.safetensors nor a GGUF file")
        sizes[short] = sum(file.stat().st_size for file in files)
    record: dict[str, Any] = {
        "threads": options.threads,
        "tokens": options.tokens,
        "torch": torch.__version__,
        "names": list(names.values()),
        "bytes": sizes,
        "measured": {short: [] for short in names.values()},
    }
    for _ in range(options.repeats):
        for name, short in names.items():
            how = ["--measure", "--tokens", options.tokens, "--threads", options.threads]
            record["measured"][short].append(in_fresh_process("benchmarks.generation", name, *how))
    publish(record, as_table(record), options.marker, options)


if __name__ == "__main__":
    raise SystemExit(run_main("generation", main))
