"""Measures tables of any size: the time and the memory of coding, and look-ups from the disk.

``code`` codes generated tables of normal numbers in bfloat16, each in a process of its own, whose peak memory
is measured; pages of mapped files count as its memory. ``read`` looks up 64 random rows of a table of random
codes. For cold look-ups, the system is asked to forget the file; the disk's own time is that of reading as
many codes and scales at random places with ``pread``, one after the other.

    python -m benchmarks.large_tables code --folder FOLDER --output benchmarks/results.jsonl \\
        --readme docs/large_tables.md
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.measuring import Record, in_fresh_process, markdown, memory, parser_of, publish
from recipes.common.tools import run_main
from shared_embeddings.compress.options import CompressOptions
from shared_embeddings.large.coding import compress_table, write_shard
from shared_embeddings.large.source import TableRows
from shared_embeddings.large.table import INDEX, LargeTable
from shared_embeddings.quant.codec import Encoded
from shared_embeddings.utils.files import write_json
from shared_embeddings.utils.reading import read_json

# Numbers of published tables, for which hours are computed: name -> numbers.
_PUBLISHED = {
    "Gemma 4 E2B, per layer": 262_144 * 8_960,
    "Qwen3.8-Flash-Next, n-grams": 320_001_536 * 160,
    "DeepSeek V4.1 Flash, Engram": 2 * 384_000_000 * 256,
}
_ROWS, _TIMES = 64, 15


def generate(path: Path, rows: int, width: int) -> None:
    """Write a table of normal numbers in bfloat16, in blocks."""
    generator = torch.Generator().manual_seed(0)
    header = {"table": {"dtype": "BF16", "shape": [rows, width], "data_offsets": [0, 2 * rows * width]}}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, rows, step := max(1, 2**23 // width)):
            block = torch.randn(min(step, rows - start), width, generator=generator).mul_(0.05).bfloat16()
            file.write(block.view(torch.uint8).numpy().data)


def code(folder: Path, numbers: int, width: int, codec: str, bits: float) -> Record:
    """Code a generated table in a process of its own."""
    source = folder / f"{numbers}_{width}.safetensors"
    if not source.exists():
        generate(source, numbers // width, width)
    shutil.rmtree(folder / "output", ignore_errors=True)
    words = ["run", "--folder", folder, "--source", source, "--bits", bits, "--codec", codec]
    measured = dict(in_fresh_process("benchmarks.large_tables", *words))
    return {"numbers": numbers, "width": width, "codec": codec, "bits": bits, **measured}


def run(source: Path, output: Path, codec: str, bits: float) -> Record:
    """Code a table in this process."""
    options = CompressOptions(model=source, table="table", output=output, bits=bits)
    report = compress_table(options, codec=codec)
    return {"seconds": report.seconds, "error": report.error, "peak": memory("VmHWM")}


class NoRows(TableRows):
    """A table of zeros, which takes no memory."""

    def __init__(self, width: int) -> None:
        self.name, self.embedding_dim = "zeros", width

    def read(self, first: int, last: int) -> torch.Tensor:
        """Return rows ``(last - first, D)``."""
        return torch.zeros(1, 1).expand(last - first, self.embedding_dim)


def write_random(folder: Path, output: Path, codes: int, width: int, bits: float) -> None:
    """Write a table with so many bytes of random codes in one file."""
    sample = folder / "sample.safetensors"
    generate(sample, 4096, width)
    options = CompressOptions(model=sample, table="table", output=output, bits=bits)
    compress_table(options)
    table = LargeTable(output)
    shard, settings = table.shared, table.settings
    generator = torch.Generator().manual_seed(0)

    def encode(rows: torch.Tensor) -> Encoded:
        size = len(rows), shard.codec.row_bytes(bits)
        random = torch.randint(256, size, dtype=torch.uint8, generator=generator)
        return Encoded(random, 0.5 + torch.rand(len(rows), 1, generator=generator))

    object.__setattr__(shard, "encode", encode)
    rows = codes // shard.codec.row_bytes(bits)
    name = settings["shards"][0]["file"]
    write_shard(NoRows(width), shard, 0, rows, output / name, tqdm(disable=True))
    settings["options"]["words_per_width"] = [
        rows * (count > 0) for count in settings["options"]["words_per_width"]
    ]
    settings |= {"num_embeddings": rows, "shards": [{"file": name, "rows": rows}]}
    write_json(output / INDEX, settings)


def read(folder: Path, codes: int, width: int, bits: float) -> dict[str, float]:
    """Time look-ups of 64 random rows in a table with so many bytes of random codes."""
    output = folder / f"read_{codes}_{width}"
    if not (output / INDEX).exists():
        write_random(folder, output, codes, width, bits)
    [file], settings = list(output.glob("rows-*")), read_json(output / INDEX)
    rows, generator = settings["num_embeddings"], torch.Generator().manual_seed(1)
    row_bytes = codes // rows

    def forget() -> None:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def milliseconds(function: Callable[[torch.Tensor], object], is_cold: bool, among: int = rows) -> float:
        times = []
        warm = torch.randint(among, (_ROWS,), generator=generator)
        for _ in range(_TIMES):
            ids = warm
            if is_cold:
                ids = torch.randint(among, (_ROWS,), generator=generator)
                forget()
            begun = time.perf_counter()
            function(ids)
            times.append(time.perf_counter() - begun)
        return 1000 * statistics.median(times)

    def from_disk(ids: torch.Tensor) -> None:
        with file.open("rb", buffering=0) as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for row in ids.tolist():
                os.pread(opened.fileno(), row_bytes, row * row_bytes)
                os.pread(opened.fileno(), 1, codes + row)

    forget()
    table = LargeTable(output)
    table(torch.arange(_ROWS))  # compiles
    disk = milliseconds(from_disk, is_cold=True)
    before = memory()
    cold = milliseconds(table, is_cold=True)
    grown, warm = (memory() - before) / 1e6, milliseconds(table, is_cold=False)
    held, few = LargeTable(output), 2**18  # rows in memory: an array of all would take as much as the file
    [shard] = held._shards
    held._shards = [shard._replace(codes=shard.codes[:few].clone(), scales=shard.scales[:few].clone())]
    held._ends, held.num_embeddings = torch.tensor([few]), few
    in_memory = milliseconds(held, is_cold=False, among=few)
    return {
        "file_MB": file.stat().st_size / 1e6,
        "rows": rows,
        "disk_ms": disk,
        "cold_ms": cold,
        "warm_ms": warm,
        "in_memory_ms": in_memory,
        "grown_MB": grown,
    }


def coded_text(record: Record) -> str:
    """Return the tables of what was coded, and of the hours that published tables would take."""
    rows = [
        [
            f"{run['numbers'] / 1e9:g}",
            f"{run['width']:,}",
            f"{run['codec']}, {run['bits']:g} bits",
            f"{run['numbers'] / run['seconds'] / 1e6:.1f}",
            f"{run['seconds']:.0f}",
            f"{run['peak'] / 1e9:.2f}",
            f"{run['error']:.3f}",
        ]
        for run in record["runs"]
    ]
    titles = ["billion numbers", "width", "codec", "million numbers/s", "seconds", "peak memory, GB", "error"]
    rate = min(run["numbers"] / run["seconds"] for run in record["runs"] if run["codec"] == "trellis")
    hours = [
        [name, f"{numbers / 1e9:.1f}", f"{numbers / rate / 3600:.1f}", f"{numbers / rate / 3600 / 16:.2f}"]
        for name, numbers in _PUBLISHED.items()
    ]
    more = ["table", "billion numbers", "hours on one machine", "on 16"]
    return (
        f"{markdown(titles, rows, 0)}\n\nAt the lowest rate of `trellis` above, on machines with "
        f"{record['threads']} cores:\n\n{markdown(more, hours)}"
    )


def read_text(record: Record) -> str:
    """Return the table of look-ups."""
    titles = ["codes, GB", "width", "disk, ms", "cold, ms", "warm, ms", "in memory, ms", "memory grew, MB"]
    names = ("disk_ms", "cold_ms", "warm_ms", "in_memory_ms", "grown_MB")
    rows = [
        [f"{run['file_MB'] / 1000:.1f}", f"{run['width']:,}", *(f"{run[name]:.2f}" for name in names)]
        for run in record["runs"]
    ]
    return markdown(titles, rows, 0)


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    parser = parser_of("benchmarks.large_tables", __doc__)
    parser.add_argument("what", choices=["code", "read", "run"])
    parser.add_argument("--folder", type=Path, required=True, help="for generated tables")
    parser.add_argument("--numbers", type=float, nargs="*", default=[1e8, 5e8, 2e9])
    parser.add_argument("--widths", type=int, nargs="*", default=[160, 256, 8960])
    parser.add_argument("--codecs", nargs="*", default=["trellis"])
    parser.add_argument("--codec", help="of the process that is measured")
    parser.add_argument("--bits", type=float, default=2.0)
    parser.add_argument("--bytes", type=float, default=4e9, help="of the codes to read")
    parser.add_argument("--source", type=Path, help="of the process that is measured")
    asked = parser.parse_args(arguments)
    if asked.what == "run":
        print(json.dumps(run(asked.source, asked.folder / "output", asked.codec, asked.bits)))
        return
    asked.folder.mkdir(parents=True, exist_ok=True)
    runs: list[Mapping[str, Any]] = []
    for width in asked.widths:
        if asked.what == "read":
            runs.append({"width": width, **read(asked.folder, int(asked.bytes), width, asked.bits)})
        else:
            runs += [
                code(asked.folder, int(numbers), width, codec, asked.bits)
                for numbers in asked.numbers
                for codec in asked.codecs
            ]
        print(json.dumps(runs[-1]), flush=True)
    record = {"threads": torch.get_num_threads(), "runs": runs}
    text, name = (read_text, "large reading") if asked.what == "read" else (coded_text, "large coding")
    publish(record, text(record), name, asked)


if __name__ == "__main__":
    raise SystemExit(run_main("large_tables", main))
