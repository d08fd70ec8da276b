"""Tables that are coded in blocks of rows, in parts, and looked up on the disk."""

from __future__ import annotations

import multiprocessing
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import shared_embeddings as se
from shared_embeddings.cli.main import main
from shared_embeddings.compress.options import CompressOptions
from shared_embeddings.large.coding import compress_table, join
from shared_embeddings.large.source import TableRows
from shared_embeddings.large.table import LargeTable
from shared_embeddings.quant.codec import codecs
from shared_embeddings.utils.errors import UserError

ROWS, DIM = 230, 40
NAME = "ple.shard_*.weight"
# Five shards of 46 rows.
SHARD = {"shard_numbers": 50 * DIM}


@pytest.fixture
def table() -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.1, 2, DIM)


@pytest.fixture
def source(tmp_path: Path, table: Tensor) -> Path:
    """A folder with the table in parts of three files, the last of which is not that of the last name."""
    folder = tmp_path / "source"
    folder.mkdir()
    parts = {f"ple.shard_{number}.weight": part.clone() for number, part in enumerate(table.split(20))}
    for place, file in enumerate(("b", "c", "a")):
        chosen = {name: part for number, (name, part) in enumerate(parts.items()) if number // 4 == place}
        save_file({**chosen, f"other_{place}.weight": torch.zeros(3, 3)}, folder / f"{file}.safetensors")
    return folder


def options(source: Path, output: Path, **changes: Any) -> CompressOptions:
    return CompressOptions(**{"model": source, "output": output, "table": NAME, "bits": 2.0, **changes})


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("codec", sorted(codecs()))
def test_rows_have_the_codes_of_the_fit_in_memory(
    source: Path, table: Tensor, tmp_path: Path, codec: str
) -> None:
    bits = 4.0
    report = compress_table(options(source, tmp_path / "large", bits=bits), codec=codec, **SHARD)
    large, ids = LargeTable(tmp_path / "large"), torch.randint(ROWS, (3, 70))
    wanted, _ = se.fit("quantized", table, bits=bits, codec=codec, progress=False)
    if codec != "spectral":  # which gives rows different bits in memory
        files = sorted((tmp_path / "large").glob("rows-*"))
        codes = torch.cat([load_file(file)[wanted.code_names[bits]] for file in files])
        torch.testing.assert_close(codes, wanted.codes(bits), rtol=0, atol=0)
        # Scales of rows are stored as logarithms in 8 bits.
        torch.testing.assert_close(large(ids), wanted.eval()(ids), rtol=0.03, atol=0.03)
    assert large(ids).shape == (3, 70, DIM)
    assert report.error == pytest.approx(float((large(torch.arange(ROWS)) - table).norm() / table.norm()))
    assert report.error < 0.09


def test_any_number_of_processes_writes_the_same_bytes(source: Path, tmp_path: Path) -> None:
    compress_table(options(source, tmp_path / "1"), **SHARD)
    for count in (2, 4):
        folder = tmp_path / str(count)
        for number in reversed(range(count)):
            report = compress_table(options(source, folder, part=f"{number}/{count}"), **SHARD)
            assert (report.error is None) == (number > 0) == bool(report.missing)
        assert content(folder) == content(tmp_path / "1")


@pytest.mark.slow
def test_processes_at_once_write_the_same_bytes(source: Path, tmp_path: Path) -> None:
    compress_table(options(source, tmp_path / "alone"), **SHARD)
    context = multiprocessing.get_context("spawn")
    parts = [options(source, tmp_path / "together", part=f"{number}/4") for number in range(4)]
    processes = [context.Process(target=compress_table, args=(part,), kwargs=SHARD) for part in parts]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert content(tmp_path / "together") == content(tmp_path / "alone")


def test_torchrun_names_the_part(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    report = compress_table(options(source, tmp_path / "large"), **SHARD)
    assert report.part == (1, 2) and len(report.missing) == 3
    assert "part 1/2 is done; 3 shards of other parts are missing" in report.summary()


def test_a_lost_shard_is_named_and_written_again(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "large"
    compress_table(options(source, folder), **SHARD)
    before = content(folder)
    lost = folder / "rows-00002-of-00005.safetensors"
    lost.unlink()
    with pytest.raises(UserError, match=rf"1 of 5 shards are missing, such as {lost.name}"):
        join(folder)
    report = compress_table(options(source, folder, part="1/5"), **SHARD)
    assert report.numbers == 46 * DIM and content(folder) == before


def test_a_stopped_process_goes_on_at_its_shard(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = tmp_path / "large", TableRows.read

    def stop(self: TableRows, first: int, last: int) -> Tensor:
        if first == 92:
            raise KeyboardInterrupt
        return read(self, first, last)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TableRows, "read", stop)
        compress_table(options(source, folder), **SHARD)
    assert sorted(content(folder)) == [f"rows-0000{n}-of-00005.safetensors" for n in (1, 2)] + [
        "shared.safetensors"
    ]
    assert compress_table(options(source, folder), **SHARD).numbers == (ROWS - 92) * DIM


def test_threads_and_forked_processes_read_at_once(source: Path, tmp_path: Path) -> None:
    compress_table(options(source, tmp_path / "large"), **SHARD)
    large = LargeTable(tmp_path / "large")
    ids = torch.randint(ROWS, (500,))
    wanted, results = large(ids), []
    threads = [threading.Thread(target=lambda: results.append(large(ids))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(torch.equal(result, wanted) for result in results)

    def compare() -> None:
        raise SystemExit(not torch.equal(large(ids), wanted))

    process = multiprocessing.get_context("fork").Process(target=compare)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_vectors_have_the_type_that_is_asked_for(source: Path, tmp_path: Path, kind: torch.dtype) -> None:
    compress_table(options(source, tmp_path / "large"), **SHARD)
    ids = torch.tensor([[0, ROWS - 1], [77, 0]])
    vectors = LargeTable(tmp_path / "large", dtype=kind)(ids)
    assert vectors.dtype == kind
    torch.testing.assert_close(vectors.float(), LargeTable(tmp_path / "large")(ids), rtol=0.02, atol=0.02)
    assert LargeTable(tmp_path / "large")(ids[:0]).shape == (0, 2, DIM)


def test_ids_out_of_range_are_errors(source: Path, tmp_path: Path) -> None:
    compress_table(options(source, tmp_path / "large"), **SHARD)
    for wrong in (-1, ROWS):
        with pytest.raises(IndexError):
            LargeTable(tmp_path / "large")(torch.tensor([3, wrong]))


def test_tables_stay_in_the_mapped_file(tmp_path: Path) -> None:
    save_file({"t": torch.randn(2000, 16)}, tmp_path / "t.safetensors")
    folder = tmp_path / "large"
    compress_table(options(tmp_path / "t.safetensors", folder, table="t", bits=4.0))
    large = LargeTable(folder)
    large(torch.tensor([7]))
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    [shard] = large._shards
    ranges = [[int(end, 16) for end in re.split("[- ]", line)[:2]] for line in maps if "rows-" in line]
    assert any(start <= shard.codes.data_ptr() < end for start, end in ranges)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"table": "absent.weight"}, ["absent.weight", "no such tensor", "other_2.weight"]),
        ({"bits": 2.5}, ["'bits' is 2.5", "0.25, 0.5, 1, 2, 3, 4"]),
        ({"method_options": {"codec": "thin"}}, ["codec", "thin", "trellis"]),
        ({"method_options": {"rank": 3}}, ["rank"]),
        ({"part": "4/4"}, ["'4/4'", "0/4 to 3/4"]),
        ({"method": "funnel"}, ["funnel", "use quantized"]),
    ],
)
def test_wrong_options(source: Path, tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        more = changes.pop("method_options", {})
        compress_table(options(source, tmp_path / "large", **changes), **SHARD, **more)
    assert all(word in str(error.value) for word in words)
    assert not (tmp_path / "large").exists()


def test_wrong_tables(source: Path, table: Tensor, tmp_path: Path) -> None:
    folder = tmp_path / "large"
    compress_table(options(source, folder), **SHARD)
    with pytest.raises(UserError, match=r"was begun with asked .*; name another folder"):
        compress_table(options(source, folder, bits=3.0), **SHARD)
    (source / "c.safetensors").unlink()
    with pytest.raises(UserError, match="has no part 4; copy it again"):
        TableRows(source, NAME)
    table[123, 5] = torch.nan
    save_file({"t": table}, tmp_path / "t.safetensors")
    with pytest.raises(UserError, match="row 123 is not finite"):
        compress_table(options(tmp_path / "t.safetensors", tmp_path / "new", table="t"))
    save_file({"t": table.long()}, tmp_path / "t.safetensors")
    with pytest.raises(UserError, match=r"t is I64 \(230, 40\)"):
        TableRows(tmp_path / "t.safetensors", "t")
    with pytest.raises(UserError, match=r"has no table.json; .*or join its parts"):
        LargeTable(source)


def test_commands(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "large")
    words = ["compress", "--model", str(source), "--table", NAME, "--bits", "3", "--output", folder]
    assert main([*words, "--method", "{method: quantized, codec: affine, group_size: 20}"]) == 0
    assert "bytes instead of 36,800" in capsys.readouterr().out
    assert LargeTable(folder).settings["options"]["codec"] == "affine"
    assert main([*words, "--method", "{method: quantized, codec: affine, group_size: 20}"]) == 0  # at once
    assert "coded" not in capsys.readouterr().out
    assert main(["join", folder]) == 0
    assert capsys.readouterr().out == f"{folder}: all 1 shards are there\n"
    capsys.readouterr()
    for wrong in ([*words, "--compare"], [*words, "--force"], ["join", str(source)]):
        assert main(wrong) == 2
        assert capsys.readouterr().err.count("\n") == 1
