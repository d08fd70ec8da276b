"""The file of results, and the tables of the README, which are made from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks import compression, decoding, fitting, gpu, language_model, large_fits, layers, preprocessing
from benchmarks.measuring import Record, read_record, read_records, save_record
from tests.helpers import check_each


def of_layers(record: Record) -> str:
    """The tables of all settings."""
    return "\n\n".join(map(layers.as_table, record["measured"]))


def of_cases(record: Record) -> str:
    """The tables of measurements on a GPU."""
    return gpu.as_text({(case["slice"], case["case"]): case for case in record["cases"]})


TABLES: dict[str, Callable[[Record], str]] = {
    "input layer": of_layers,
    "output layer": of_layers,
    "language model": lambda record: language_model.as_table(record["measured"]),
    "decoding": lambda record: "\n\n".join(decoding.as_table(*part) for part in record["measured"].items()),
    "fitting": lambda record: fitting.as_table(record["fits"]),
    "large fits": lambda record: large_fits.as_table(record["fits"]),
    "preprocessing": preprocessing.as_table,
    "compression ptb": compression.as_table,
    "compression quickstart": compression.as_table,
    "gpu": of_cases,
}


def test_tables_of_the_readme_are_those_of_the_results() -> None:
    readme = gpu.README.read_text(encoding="utf-8")
    records = {"gpu": {"cases": []}, **read_records(gpu.RESULTS)}

    def check(name: str) -> None:
        begin, end = f"<!-- BEGIN {name} -->", f"<!-- END {name} -->"
        assert TABLES[name](records[name]) in readme[readme.index(begin) : readme.index(end)]

    check_each(check, list(records))


def test_records_of_other_benchmarks_stay(tmp_path: Path) -> None:
    path = tmp_path / "numbers.jsonl"
    for name, number in (("b", 1), ("a", 2), ("b", 3)):
        save_record(path, name, {"measured": number})
    assert [read_record(path, name, "measured")["measured"] for name in "ab"] == [2, 3]
    assert len(path.read_text().splitlines()) == 2
