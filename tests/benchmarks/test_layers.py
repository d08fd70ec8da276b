"""Benchmarks of layers and decoding, and the file of results and tables of the README."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import shared_embeddings as se
from benchmarks import compression, decoding, fitting, gpu, language_model, layers, preprocessing
from benchmarks.layers import PLAIN, PUBLISHED, SETTINGS, operations, rows, with_ratios, words
from benchmarks.measuring import Record, median_times, read_record, read_records, save_record
from recipes.common.tools import run_main

TINY = SETTINGS["tiny"]
ROWS = [PLAIN, *rows(TINY, se.methods())]


@pytest.mark.slow_except("*-input")
@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_method_can_be_measured(side, row) -> None:
    step = layers.SIDES[side](row, TINY)
    step()
    step()


def test_rows_cover_the_registry_in_every_setting() -> None:
    for name in PUBLISHED:
        assert {row.method for row in rows(SETTINGS[name], se.methods())} == set(se.methods())
    assert [row.method for row in rows(TINY, ["uncle"])] == ["uncle"]


def test_words_follow_zipf() -> None:
    drawn = words(SETTINGS["translation"])
    share = [(drawn == rank).float().mean().item() for rank in range(2)]
    total = sum(1 / rank for rank in range(1, 37001))
    assert share[0] == pytest.approx(1 / total, abs=0.02)
    assert share[1] == pytest.approx(0.5 / total, abs=0.02)


def test_warm_up_is_not_counted_and_runs_alternate() -> None:
    order: list[str] = []
    times = median_times([lambda: order.append("a"), lambda: order.append("b")], repeats=2)
    assert "".join(order) == "ababab" and len(times) == 2


def test_output_layer_flops_are_three_products() -> None:
    plain = operations(layers.output_step(PLAIN, TINY))
    assert plain == 3 * 2 * TINY.tokens * TINY.vocab_size * TINY.dim


def measured(plain_seconds: list[float]) -> dict:
    """A record of two rows, as `measure` makes it."""
    results = [
        {
            "name": name,
            "options": {},
            "seconds": seconds,
            "plain_seconds": plain,
            "needed_seconds": seconds / 2,
            "peak_bytes": mebibytes * 2**20,
        }
        for name, seconds, plain, mebibytes in zip(
            ("plain table", "small"), (2.0, 1.0), plain_seconds, (100, 25), strict=True
        )
    ]
    return {"setting": TINY._asdict(), "product_speed": 1e9, "results": results}


def test_ratios_are_relative_to_the_alternating_plain_layer() -> None:
    plain, small = with_ratios(measured([2.0, 2.5]))
    assert (plain["time_ratio"], small["time_ratio"]) == (1.0, 0.4)
    assert (plain["limit_ratio"], small["limit_ratio"]) == (0.5, 0.2)
    assert (small["peak_mib"], small["peak_ratio"]) == (25.0, 0.25)
    # Times that vary a lot are replaced by their median.
    plain, small = with_ratios(measured([2.0, 6.0]))
    assert (plain["time_ratio"], small["time_ratio"]) == (0.5, 0.25)


@pytest.mark.slow
def test_the_program_writes_numbers_and_a_table(tmp_path: Path) -> None:
    numbers, readme = tmp_path / "numbers.jsonl", tmp_path / "README.md"
    readme.write_text("before\n<!-- BEGIN input layer -->\nold\n<!-- END input layer -->\nafter\n")
    asked = ["input", "--settings", "tiny", "--methods", "projective", "--repeats", "1", "--threads", "1"]
    layers.main([*asked, "--output", str(numbers), "--readme", str(readme)])
    record = read_record(numbers, "input layer", "measured")
    (part,) = record["measured"]
    assert [result["name"] for result in part["results"]] == ["plain table", "projective"]
    assert all(result["seconds"] > 0 and result["peak_bytes"] > 0 for result in part["results"])
    assert record["versions"]["torch"] and record["repeats"] == 1
    text = readme.read_text()
    assert "| projective |" in text and "old" not in text and text.startswith("before\n")

    # The same numbers shown again are the same table.
    layers.main(["input", "--input", str(numbers), "--readme", str(readme)])
    assert readme.read_text() == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("no JSON", "cannot be read as JSON"),
        ("[1]", "line 1 was not written by a benchmark"),
        ('{"benchmark": "decoding", "measured": []}', "no numbers of the benchmark 'output layer'"),
    ],
)
def test_invalid_results_are_reported_in_one_line(tmp_path: Path, capsys, content, message) -> None:
    path = tmp_path / "numbers.json"
    if content is not None:
        path.write_text(content)
    assert run_main("layers", layers.main, ["output", "--input", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0] and str(path) in lines[0]


@pytest.mark.parametrize("asked", [["--repeats", "0"], ["--methods", "dense"], ["--settings", "small"]])
def test_invalid_arguments(asked: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        layers.main(["input", *asked])
    assert ended.value.code == 2


def test_tables_are_measured_next_to_plain_ones(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [table for table in decoding.TABLES if table.name in ("plain, bf16", "uniform, 4 bits")]
    results = [decoding.measure(table, decoding.SIZES["tiny"], 1) for table in chosen]
    assert [one["file_bytes"] for one in results] == [2000 * 64 * 2, 2000 * (32 + 2 * 2)]
    assert [set(one["times"]) for one in results] == [{"look_up", "token"}, {"look_up", "token", "batch"}]
    lines = decoding.as_table("tiny", results).splitlines()
    assert lines[0] == "V = 2,000, D = 64" and len(lines) == 6
    assert {line.count("|") for line in lines[2:]} == {8}


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
    "large fits": lambda record: fitting.as_large_table(record["fits"]),
    "preprocessing": preprocessing.as_table,
    "compression ptb": compression.as_table,
    "compression quickstart": compression.as_table,
    "gpu": of_cases,
}


def test_the_choice_of_compress_is_named() -> None:
    def trial(method: str, options: dict[str, str], store: str, kept: float, predictions: float) -> Record:
        key = {"method": method, "options": options, "store": store, "ratio": 8.0}
        return {**key, "kept": kept, "predictions": predictions, "bytes": 10}

    found = [
        trial("quantized", {}, "fp16", 0.9, 0.7),
        trial("quantized", {"codec": "uniform"}, "fp16", 0.8, 0.75),
        trial("structured", {}, "fp16", 0.95, 0.99),  # not a candidate
    ]
    assert list(compression.choices(found)) == [
        "- At 8x, `compress` chooses quantized, trellis by quality (90.0%) and quantized, uniform by "
        "predictions (80.0%); the best row is structured (95.0%)."
    ]
    found[0]["distance"], found[1]["distance"] = 0.1, 0.2
    assert "quantized, trellis by predictions (90.0%)" in next(compression.choices(found))
    for one in found:
        del one["predictions"]
    assert "predictions" not in next(compression.choices(found))


def test_readme_tables_match_the_results() -> None:
    readme = gpu.README.read_text(encoding="utf-8")
    records = {"gpu": {"cases": []}, **read_records(gpu.RESULTS)}

    for name, record in records.items():
        begin, end = f"<!-- BEGIN {name} -->", f"<!-- END {name} -->"
        assert TABLES[name](record) in readme[readme.index(begin) : readme.index(end)], name


def test_records_of_other_benchmarks_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "numbers.jsonl"
    for name, number in (("b", 1), ("a", 2), ("b", 3)):
        save_record(path, name, {"measured": number})
    assert [read_record(path, name, "measured")["measured"] for name in "ab"] == [2, 3]
    assert len(path.read_text().splitlines()) == 2
