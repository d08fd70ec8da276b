"""Memory and time of quantized tables in text generation, compared with plain tables in fp32 and bf16.

Every table is measured in its own process: the memory that it holds there, and the time to look up 64 words,
to score all words for one token, and for 256 tokens. Times are medians of runs that alternate with those of
plain tables, and are printed relative to these.

    OMP_NUM_THREADS=1 python -m benchmarks.decoding --threads 1
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import shared_embeddings as se
from benchmarks.measuring import (
    add_run_options,
    in_fresh_process,
    markdown,
    median_times,
    parser_of,
    publish,
    read_record,
    resident,
)
from recipes.common.tools import run_main
from shared_embeddings.quant.codec import codecs
from shared_embeddings.quant.storage import packed_bytes

Uses = dict[str, Callable[[], object]]
SIZES = {"translation": (37_000, 512), "large": (262_144, 640), "tiny": (2_000, 64)}
LOOKED_UP, BATCH = 64, 256


class Table(NamedTuple):
    """A table to measure: a type of plain numbers, or options of `quantized`."""

    name: str
    plain: str | None
    options: dict[str, Any]


TABLES = [
    Table("plain, fp32", "float32", {}),
    Table("plain, bf16", "bfloat16", {}),
    *(
        Table(f"{name}, {bits} bits", None, {"codec": name, "bits": float(bits)})
        for name, codec in codecs().items()
        for bits in ((8, 4, 2) if codec.has_groups else (4, 2))
    ),
    *(
        Table(f"{name}, 4 bits, groups of 128", None, {"codec": name, "bits": 4.0, "group_size": 128})
        for name, codec in codecs().items()
        if codec.has_groups
    ),
]


def plain_uses(kind: str, size: tuple[int, int]) -> tuple[Uses, int]:
    """The uses of a plain table, and its bytes."""
    weight = torch.empty(size, dtype=getattr(torch, kind)).uniform_(-1, 1)
    ids = torch.randint(size[0], (LOOKED_UP,))
    hidden = torch.randn(BATCH, size[1]).to(weight.dtype)
    uses: Uses = {
        "look_up": lambda: F.embedding(ids, weight),
        "token": lambda: F.linear(hidden[:1], weight),
        "batch": lambda: F.linear(hidden, weight),
    }
    return uses, weight.nbytes


def quantized_uses(options: dict[str, Any], size: tuple[int, int]) -> tuple[Uses, int]:
    """The uses of a quantized table with random codes, and the bytes of its file."""
    embedding = se.build("quantized", num_embeddings=size[0], embedding_dim=size[1], **options).eval()
    ids, hidden = torch.randint(size[0], (LOOKED_UP,)), torch.randn(BATCH, size[1])
    uses: Uses = {
        "look_up": lambda: embedding(ids),
        "token": lambda: embedding.logits(hidden[:1]),
        "batch": lambda: embedding.logits(hidden),
    }
    numbers = sum(
        packed_bytes(tensor, embedding.options.default_store, name)
        for name, tensor in embedding.named_parameters()
    )
    return uses, numbers + sum(buffer.nbytes for buffer in embedding.buffers())


@torch.no_grad()
def measure(table: Table, size: tuple[int, int], repeats: int) -> dict[str, Any]:
    """The memory of a table in this process, and its times compared with plain tables."""
    if not table.plain:
        # Compiled loops take 160 MiB of this process, for tables of any size.
        for use in quantized_uses(table.options, (1000, 128))[0].values():
            use()
    before = resident()
    uses, file_bytes = plain_uses(table.plain, size) if table.plain else quantized_uses(table.options, size)
    # The first uses fill caches.
    for name in ("look_up", "token"):
        uses[name]()
    gc.collect()
    held = resident() - before
    plain = {kind: plain_uses(kind, size)[0] for kind in ("float32", "bfloat16")}
    times = {}
    for name, use in uses.items():
        if name == "batch" and table.plain == "bfloat16":
            continue  # many times slower on CPUs without instructions for it
        kinds = [kind for kind in plain if name != "batch" or kind == "float32"]
        taken = median_times([use, *(plain[kind][name] for kind in kinds)], repeats)
        times[name] = {"seconds": taken[0], **dict(zip(kinds, taken[1:]))}
    return {"name": table.name, "resident_bytes": held, "file_bytes": file_bytes, "times": times}


def as_table(size: str, results: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of the results at one size."""
    words, dim = SIZES[size]
    titles = ["table", "file, MiB", "in memory, MiB", f"look-up of {LOOKED_UP}, / fp32"]
    titles += ["one token, / bf16", "one token, / fp32", f"{BATCH} tokens, / fp32"]
    compared = (("look_up", "float32"), ("token", "bfloat16"), ("token", "float32"), ("batch", "float32"))
    rows = []
    for one in results:
        times = one["times"]
        sizes = [f"{one[key] / 2**20:.1f}" for key in ("file_bytes", "resident_bytes")]
        ratios = [
            f"{times[use]['seconds'] / times[use][kind]:.2f}" if use in times else "–"
            for use, kind in compared
        ]
        rows.append([one["name"], *sizes, *ratios])
    return f"V = {words:,}, D = {dim}\n\n{markdown(titles, rows)}"


def main(arguments: Sequence[str]) -> None:
    """Measure every table at every size, and publish."""
    parser = parser_of("benchmarks.decoding", __doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["translation", "large"])
    add_run_options(parser, threads=1)
    parser.add_argument("--table", choices=[table.name for table in TABLES], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.table:
        (size,) = options.sizes
        table = next(one for one in TABLES if one.name == options.table)
        print(json.dumps(measure(table, SIZES[size], options.repeats)))
        return
    if options.input:
        record = read_record(options.input, "decoding", "measured")
    else:
        record = {"threads": options.threads, "torch": torch.__version__, "measured": {}}
        for size in options.sizes:
            record["measured"][size] = []
            for table in TABLES:
                print(f"{size}: measuring {table.name} ...", file=sys.stderr, flush=True)
                how = ["--sizes", size, "--threads", options.threads, "--repeats", options.repeats]
                found = in_fresh_process("benchmarks.decoding", "--table", table.name, *how)
                record["measured"][size].append(found)
    text = "\n\n".join(as_table(size, results) for size, results in record["measured"].items())
    publish(record, f"{text}\n\nThreads: {record['threads']}; torch {record['torch']}.", "decoding", options)


if __name__ == "__main__":
    raise SystemExit(run_main("decoding", main))
