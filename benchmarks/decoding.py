"""Memory and time of quantized tables in text generation, compared with plain tables in fp32 and bf16.

Every table is measured in its own process: the memory that it holds there, and the time to look up 64 words,
to score all words for one token, for eight and for 256 tokens. Times are medians of runs that alternate with
those of plain tables, and are printed relative to these. Output layers of other programs are measured, too.

    OMP_NUM_THREADS=1 python -m benchmarks.decoding --threads 1
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import shared_embeddings as se
from benchmarks.measuring import in_fresh_process, markdown, median_times, memory, parser_of, publish
from recipes.common.tools import run_main
from shared_embeddings.export.onnx import IR_VERSION, OPSET
from shared_embeddings.quant import lanes
from shared_embeddings.quant.codec import codecs
from shared_embeddings.quant.codecs.trellis import TrellisCodec
from shared_embeddings.quant.storage import packed_bytes

Uses = dict[str, Callable[[], object]]
SIZES = {"translation": (37_000, 512), "large": (262_144, 640), "tiny": (2_000, 64)}
LOOKED_UP, BATCH = 64, 256
# Hidden states that are scored at once.
SCORED = {"token": 1, "few": 8, "batch": BATCH}


class Table(NamedTuple):
    """A table to measure: a type of plain numbers, one of the `PEERS`, or options of `quantized`."""

    name: str
    plain: str | None
    options: dict[str, Any]


def scored(score: Callable[[int], object]) -> Uses:
    """The uses of a table that scores all words for a number of hidden states."""
    return {name: functools.partial(score, count) for name, count in SCORED.items()}


def onnx_runtime_uses(size: tuple[int, int]) -> tuple[Uses, int]:
    """The uses of an output layer in 4 bits of ONNX Runtime (MatMulNBits), and its bytes: a scale in fp32 for
    32 numbers. Hidden states are rounded to int8.
    """
    words, dim = size
    codes = np.random.default_rng(0).integers(0, 256, (words, dim // 32, 16), np.uint8)
    scales = np.full(words * dim // 32, 0.01, np.float32)
    kind: Any = {"K": dim, "N": words, "bits": 4, "block_size": 32, "accuracy_level": 4}
    node = helper.make_node(
        "MatMulNBits", ["hidden", "codes", "scales"], ["scores"], domain="com.microsoft", **kind
    )
    inputs = helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["n", dim])
    outputs = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", words])
    stored = [numpy_helper.from_array(array, name) for array, name in ((codes, "codes"), (scales, "scales"))]
    sets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(
        helper.make_graph([node], "layer", [inputs], [outputs], stored), opset_imports=sets
    )
    model.ir_version = IR_VERSION
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    hidden = np.random.default_rng(1).standard_normal((BATCH, dim), np.float32)
    uses = scored(lambda count: session.run(None, {"hidden": hidden[:count]}))
    return uses, codes.nbytes + scales.nbytes


# Output layers of other programs.
PEERS = ("torch, dynamic int8", "ONNX Runtime, 4 bits")

TABLES = [
    Table("plain, fp32", "float32", {}),
    Table("plain, bf16", "bfloat16", {}),
    *(Table(name, None, {}) for name in PEERS),
    *(
        Table(f"{name}, {bits} bits", None, {"codec": name, "bits": float(bits)})
        for name, codec in codecs().items()
        for bits in (
            (8, 4, 3, 2) if codec.has_groups else (4, 3, 2, 1) if issubclass(codec, TrellisCodec) else (4, 2)
        )
    ),
    *(
        Table(f"{name}, 4 bits, groups of 128", None, {"codec": name, "bits": 4.0, "group_size": 128})
        for name, codec in codecs().items()
        if codec.has_groups
    ),
]


def uses_of(table: Table, size: tuple[int, int]) -> tuple[Uses, int]:
    """The uses of a table with random numbers, and the bytes of its file; of `PEERS`, only the scores."""
    ids, hidden = torch.randint(size[0], (LOOKED_UP,)), torch.randn(BATCH, size[1])
    if table.plain:
        weight = torch.empty(size, dtype=getattr(torch, table.plain)).uniform_(-1, 1)
        hidden = hidden.to(weight.dtype)
        scores = scored(lambda count: F.linear(hidden[:count], weight))
        return {"look_up": lambda: F.embedding(ids, weight), **scores}, weight.nbytes
    if table.options:
        embedding = se.build("quantized", num_embeddings=size[0], embedding_dim=size[1], **table.options)
        embedding.eval()
        file_bytes = sum(buffer.nbytes for buffer in embedding.buffers())
        for name, tensor in embedding.named_parameters():
            file_bytes += packed_bytes(tensor, embedding.options.default_store, name)
        scores = scored(lambda count: embedding.logits(hidden[:count]))
        return {"look_up": lambda: embedding(ids), **scores}, file_bytes
    if table.name.startswith("ONNX"):
        return onnx_runtime_uses(size)
    # torch also rounds hidden states.
    plain = nn.Sequential(nn.Linear(size[1], size[0], bias=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its successor, torchao, has no layer of this kind for CPUs
        layer = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, torch.qint8)
    return scored(lambda count: layer(hidden[:count])), size[0] * size[1]


@torch.no_grad()
def measure(table: Table, size: tuple[int, int], repeats: int) -> dict[str, Any]:
    """The memory of a table in this process, and its times compared with plain tables."""
    if table.options:
        # Compiled loops take 160 MiB of this process, for tables of any size.
        for use in uses_of(table, (1000, 128))[0].values():
            use()
    before = memory()
    uses, file_bytes = uses_of(table, size)
    # The first uses fill caches.
    for name in ("look_up", "token"):
        if name in uses:
            uses[name]()
    gc.collect()
    held = memory() - before
    plain = {kind: uses_of(Table(kind, kind, {}), size)[0] for kind in ("float32", "bfloat16")}
    times = {}
    for name, use in uses.items():
        # Several states times bf16 are many times slower on CPUs without instructions for it.
        is_slow = SCORED.get(name, 1) > 1
        if is_slow and table.plain == "bfloat16":
            continue
        kinds = ["float32"] if is_slow else list(plain)
        taken = median_times([use, *(plain[kind][name] for kind in kinds)], repeats)
        times[name] = {"seconds": taken[0], **dict(zip(kinds, taken[1:]))}
    return {"name": table.name, "resident_bytes": held, "file_bytes": file_bytes, "times": times}


def as_table(size: str, results: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of the results at one size."""
    words, dim = SIZES[size]
    compared = {
        f"look-up of {LOOKED_UP}, / fp32": ("look_up", "float32"),
        "one token, / bf16": ("token", "bfloat16"),
        "one token, / fp32": ("token", "float32"),
        f"{SCORED['few']} tokens, / fp32": ("few", "float32"),
        f"{BATCH} tokens, / fp32": ("batch", "float32"),
    }
    titles = ["table", "file, MiB", "in memory, MiB", *compared]
    rows = []
    for result in results:
        times = result["times"]
        sizes = [f"{result[key] / 2**20:.1f}" for key in ("file_bytes", "resident_bytes")]
        ratios = [
            f"{times[use]['seconds'] / times[use][kind]:.2f}" if use in times else "–"
            for use, kind in compared.values()
        ]
        rows.append([result["name"], *sizes, *ratios])
    return f"V = {words:,}, D = {dim}\n\n{markdown(titles, rows)}"


def as_text(record: dict[str, Any]) -> str:
    """The tables of all sizes, and what they were measured with."""
    tables = [as_table(size, results) for size, results in record["measured"].items()]
    note = f"Threads: {record['threads']}; torch {record['torch']} with {record['instructions']['torch']}"
    return "\n\n".join([*tables, f"{note}; loops with {record['instructions']['loops']}."])


def main(arguments: Sequence[str]) -> None:
    """Measure every table at every size, and publish."""
    parser = parser_of("benchmarks.decoding", __doc__, threads=1)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["translation", "large"])
    parser.add_argument("--marker", default="decoding", help="name of the results (default: decoding)")
    parser.add_argument("--table", choices=[table.name for table in TABLES], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.table:
        (size,) = options.sizes
        table = next(table for table in TABLES if table.name == options.table)
        print(json.dumps(measure(table, SIZES[size], options.repeats)))
        return
    instructions = {"torch": torch.backends.cpu.get_cpu_capability(), "loops": lanes.INSTRUCTIONS}
    record: dict[str, Any] = {"threads": options.threads, "torch": torch.__version__}
    record |= {"instructions": instructions, "measured": {size: [] for size in options.sizes}}
    for size, results in record["measured"].items():
        for table in TABLES:
            print(f"{size}: measuring {table.name} ...", file=sys.stderr, flush=True)
            how = ["--sizes", size, "--threads", options.threads, "--repeats", options.repeats]
            results.append(in_fresh_process("benchmarks.decoding", "--table", table.name, *how))
    publish(record, as_text(record), options.marker, options)


if __name__ == "__main__":
    raise SystemExit(run_main("decoding", main))
