"""Compress a table of any size in blocks of rows, in several files, on one machine or on many.

What rows share, such as codebooks, is learned from a sample. Then each row is coded alone, so that files, the
shards, can be written by any process in any order, and a file that is there is never written again.

Axes: ``D`` dimensions, ``n`` rows.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from shared_embeddings.checkpoints import load_tensors
from shared_embeddings.compress.options import CompressOptions
from shared_embeddings.large.source import TableRows
from shared_embeddings.large.table import FORMAT, INDEX, SHARED, LargeTable, shared_part
from shared_embeddings.modules.quantized import QuantizedEmbedding
from shared_embeddings.quant.storage import pack
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import bytes_on_disk, replacing, write_json
from shared_embeddings.utils.options import OptionError
from shared_embeddings.utils.progress import begin_phase, command_progress, plan_phases, progress_bar

# Rows from which what all rows share is learned, and rows whose error is measured; fewer where these, which
# stay in memory, have more numbers.
SAMPLE, _MEASURED, _MOST_SAMPLED = 2**15, 2**12, 2**26
# A table has about so many shards, which have at least and at most so many numbers.
_SHARDS, LEAST_NUMBERS, _MOST_NUMBERS = 16, 2**26, 2**32
# Numbers that are coded together.
_BLOCK = 2**22
# Bytes for the description of the tensors of a shard.
_HEADER = 2**12
_PLAN = "plan"


class LargeTableReport(NamedTuple):
    """What was written of a table.

    Attributes:
        missing: the shards that other parts write, by name; without any, the table is complete.
        error: ``||E - Ê|| / ||E||`` of a sample of rows; None of a table that is not complete.
        numbers: how many this process coded, in `seconds`.
    """

    output: Path
    part: tuple[int, int]
    missing: list[str]
    bytes_before: int
    numbers: int
    seconds: float
    bytes_after: int = 0
    error: float | None = None

    def summary(self) -> str:
        """Return what a user wants to know, in a few lines."""
        speed = f"{self.numbers / 1e6 / max(self.seconds, 1e-9):,.1f} million numbers a second"
        lines = [f"coded {self.numbers:,} numbers in {self.seconds:,.0f} seconds ({speed})"] * (
            self.numbers > 0
        )
        if self.missing:
            lines.append(
                f"part {self.part[0]}/{self.part[1]} is done; {len(self.missing)} shards of other parts are "
                f"missing, such as {self.missing[0]}; the last part completes the table"
            )
        else:
            ratio = self.bytes_before / self.bytes_after
            lines.append(
                f"wrote {self.output}: {self.bytes_after:,} bytes instead of {self.bytes_before:,} "
                f"({ratio:.1f} times smaller), relative error {self.error:.4f} of a sample of rows"
            )
        return "\n".join(lines)


def compress_table(
    options: CompressOptions, *, shard_numbers: int | None = None, **method_options: Any
) -> LargeTableReport:
    """Code the rows of a table in safetensors, or the part of them that `options.part` names.

    The last part completes the table, for `LargeTable`. A process that was stopped goes on at the shard that
    it was writing.

    Args:
        options: with `model`, `table`, `output`, and the bits or options of the method `quantized`.
        shard_numbers: numbers of a shard; by default it depends on the size of the table.
        method_options: options of the method.

    Raises:
        UserError: the files have no such table, or one with infinite numbers; the codec has no such rate; the
            output was begun with other options.
        OSError: a file cannot be read or written.
    """
    if (output := options.output) is None or options.table is None:
        raise UserError("output is missing; name the folder to write")
    if options.method not in (None, "quantized"):
        raise OptionError(f"table: rows of {options.method} are not coded alone; use quantized")
    number, count = part_of(options.part)
    source = TableRows(options.model, options.table)
    with command_progress():
        plan_phases({"learning": 1, "coding": source.nbytes / 1e7})
        plan, embedding = _read_plan(source, options, output, method_options, shard_numbers)
        files = [output / shard["file"] for shard in plan["shards"]]
        ends = [*itertools.accumulate(shard["rows"] for shard in plan["shards"])]
        shards = zip(files, [0, *ends], ends)
        missing = [shard for shard in itertools.islice(shards, number, None, count) if not shard[0].exists()]
        begin_phase("coding")
        rows = sum(end - first for _, first, end in missing)
        bar, started = progress_bar(rows, "coding", " rows"), time.perf_counter()
        for file, first, end in missing:
            write_shard(source, embedding, first, end, file, bar)
        bar.close()
        seconds = time.perf_counter() - started
    report = LargeTableReport(
        output=output,
        part=(number, count),
        missing=[file.name for file in files if not file.exists()],
        bytes_before=source.nbytes,
        numbers=rows * source.embedding_dim,
        seconds=seconds,
    )
    if report.missing:
        return report
    join(output)
    error = _measured_error(source, LargeTable(output))
    return report._replace(bytes_after=bytes_on_disk(output), error=error)


def part_of(part: str | None) -> tuple[int, int]:
    """Return the number of a part and how many there are, of a text such as 0/4.

    Without one, they are those of ``torchrun``: RANK and WORLD_SIZE of the environment.
    """
    text = part or f"{os.environ.get('RANK', 0)}/{os.environ.get('WORLD_SIZE', 1)}"
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise OptionError(f"part is '{text}', which is no part; write 0/4 to 3/4 for the parts of four")
    return int(number), int(count)


def _read_plan(
    source: TableRows,
    options: CompressOptions,
    output: Path,
    method_options: Mapping[str, object],
    shard_numbers: int | None,
) -> tuple[dict[str, Any], QuantizedEmbedding]:
    """Return the plan of the table, with the files of its shards, and what its rows share."""
    asked = {**method_options, "seed": options.seed}
    if options.bits is not None:
        asked["bits"] = options.bits
    wanted = {
        "format": FORMAT,
        "table": source.name,
        "num_embeddings": source.num_embeddings,
        "embedding_dim": source.embedding_dim,
        "method": "quantized",
        "asked": asked,
    }
    if not (output / SHARED).exists():
        _write_plan(source, output, wanted, shard_numbers)
    plan = _stored_plan(output)
    for name, value in wanted.items():
        if plan[name] != value:
            raise UserError(
                f"output {output}: was begun with {name} {plan[name]!r}, not {value!r}; name another folder, "
                "or delete it"
            )
    return plan, shared_part(plan, load_tensors(output / SHARED, f"table {output / SHARED}"))


def _stored_plan(folder: Path) -> dict[str, Any]:
    with safe_open(folder / SHARED, "pt") as file:
        plan: dict[str, Any] = json.loads(file.metadata()[_PLAN])
    return plan


def _write_plan(
    source: TableRows, output: Path, wanted: Mapping[str, Any], shard_numbers: int | None
) -> None:
    """Learn what the rows share, and choose the shards, unless another process was faster."""
    begin_phase("learning")
    sample = source.sample(min(SAMPLE, max(1, _MOST_SAMPLED // source.embedding_dim)))
    embedding = QuantizedEmbedding.learn(sample, wanted["asked"])
    numbers = source.num_embeddings * source.embedding_dim
    size = shard_numbers or min(max(numbers // _SHARDS, LEAST_NUMBERS), _MOST_NUMBERS)
    rows = -(-source.num_embeddings // max(1, round(numbers / size)))
    firsts = range(0, source.num_embeddings, rows)
    shards = [
        {
            "file": f"rows-{place + 1:05}-of-{len(firsts):05}.safetensors",
            "rows": min(rows, source.num_embeddings - first),
        }
        for place, first in enumerate(firsts)
    ]
    plan = {**wanted, "options": embedding.stored_options(), "shards": shards}
    per_row = (embedding.scales_name, *embedding.code_names.values())
    state = {name: part.contiguous() for name, part in embedding.state_dict().items() if name not in per_row}
    output.mkdir(parents=True, exist_ok=True)
    temporary = output / f".{SHARED}.{uuid.uuid4().hex}"
    save_file(state, temporary, {_PLAN: json.dumps(plan)})
    try:
        # Unlike renaming, it keeps the file of another process; some file systems have no links.
        with contextlib.suppress(OSError):
            os.link(temporary, output / SHARED)
        if not (output / SHARED).exists():
            temporary.replace(output / SHARED)
    finally:
        temporary.unlink(missing_ok=True)


@torch.no_grad()
def write_shard(
    source: TableRows, embedding: QuantizedEmbedding, first: int, last: int, path: Path, bar: Any
) -> None:
    """Write the codes and scales of the rows from `first` to `last` in the order of the table.

    Codes go to the disk block by block; the description of the file comes last, in space that is left for it.
    """
    [name], count = embedding.code_names.values(), last - first
    codec = embedding.codec
    [rate] = embedding.word_counts
    scales, width = torch.empty(count, codec.num_scales), codec.row_bytes(rate)
    end = count * width
    entries = {name: {"dtype": "U8", "shape": [count, width], "data_offsets": [0, end]}}
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.seek(8 + _HEADER)
        for start, rows in _blocks(source, first, last):
            codes, factors = embedding.encode(rows)
            file.write(codes.contiguous().numpy().data)
            scales[start - first : start - first + len(rows)] = factors
            bar.update(len(rows))
        packed = pack({embedding.scales_name: scales}, [embedding.scales_name], "fp16")
        for other, tensor in packed.items():
            offsets = [end, end := end + tensor.nbytes]
            entries[other] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": [*tensor.shape],
                "data_offsets": offsets,
            }
            file.write(tensor.contiguous().view(torch.uint8).numpy().data)
        header = json.dumps(entries).encode().ljust(_HEADER)
        file.seek(0)
        file.write(_HEADER.to_bytes(8, "little") + header)


_DTYPES = {torch.uint8: "U8", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}


def _blocks(source: TableRows, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows ``(n, D)`` of a range in blocks, each with its first row."""
    step = max(1, _BLOCK // source.embedding_dim)
    for start in range(first, last, step):
        rows = source.read(start, min(start + step, last))
        if not bool(rows.isfinite().all()):
            row = start + int((~rows.isfinite().all(dim=1)).nonzero()[0])
            raise UserError(f"table {source.name}: row {row} is not finite; use a table from before that")
        yield start, rows


def join(folder: Path) -> list[str]:
    """Complete a table all whose shards are there: write its index.

    Returns:
        The shards, by name.

    Raises:
        UserError: the folder has no table, or shards are missing.
    """
    if not (folder / SHARED).is_file():
        raise UserError(f"table {folder}: has no {SHARED}; name the output of compress")
    plan = _stored_plan(folder)
    names = [shard["file"] for shard in plan["shards"]]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"table {folder}: {len(missing)} of {len(names)} shards are missing, such as {missing[0]}; run "
            "the same compress again"
        )
    with replacing(folder / INDEX) as temporary:
        write_json(temporary, plan)
    return names


@torch.no_grad()
def _measured_error(source: TableRows, table: LargeTable) -> float:
    """Return the relative error of rows at equal distances."""
    count = min(_MEASURED, max(1, _MOST_SAMPLED // 8 // source.embedding_dim))
    ids = torch.arange(0, source.num_embeddings, 1 + source.num_embeddings // count)
    rows = torch.cat([source.read(row, row + 1) for row in ids.tolist()])
    return float((table(ids) - rows).norm() / rows.norm().clamp(min=1e-30))
