"""The benchmark of memory and time in decoding."""

from __future__ import annotations

import pytest

from benchmarks import decoding


def test_tables_are_measured_beside_plain_ones(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [table for table in decoding.TABLES if table.name in ("plain, bf16", "uniform, 4 bits")]
    results = [decoding.measure(table, decoding.SIZES["tiny"], 1) for table in chosen]
    assert [one["file_bytes"] for one in results] == [2000 * 64 * 2, 2000 * (32 + 2 * 2)]
    assert [set(one["times"]) for one in results] == [{"look_up", "token"}, {"look_up", "token", "batch"}]
    lines = decoding.as_table("tiny", results).splitlines()
    assert lines[0] == "V = 2,000, D = 64" and len(lines) == 6
    assert {line.count("|") for line in lines[2:]} == {8}
