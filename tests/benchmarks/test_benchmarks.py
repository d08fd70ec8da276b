"""Benchmarks and the file of their results; slices of measurements for GPUs, once on the CPU."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import shared_embeddings as se
from benchmarks import (
    compression,
    decoding,
    fitting,
    generation,
    gpu,
    gradients,
    language_model,
    large_tables,
    layers,
    learned,
    preprocessing,
    rates,
    translation,
)
from benchmarks.layers import PLAIN, SETTINGS, operations, rows, with_ratios, words
from benchmarks.measuring import Record, read_records, save_record
from benchmarks.preprocessing import Language, as_table, watch
from lm.data.corpus import prepare
from recipes.common.tools import run_main
from shared_embeddings.utils.errors import UserError
from tests.shared_embeddings.hf import models

TINY = SETTINGS["tiny"]
ROWS = [PLAIN, *rows(TINY, se.methods())]


@pytest.mark.slow_except("*-input")
@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_method_can_be_measured(side, row) -> None:
    step = layers.layer_step(side, row, TINY)
    step()
    step()


def test_words_follow_zipf() -> None:
    drawn = words(SETTINGS["translation"])
    share = [(drawn == rank).float().mean().item() for rank in range(2)]
    total = sum(1 / rank for rank in range(1, 37001))
    assert share[0] == pytest.approx(1 / total, abs=0.02)
    assert share[1] == pytest.approx(0.5 / total, abs=0.02)


def test_output_layer_flops_are_three_products() -> None:
    plain = operations(layers.layer_step("output", PLAIN, TINY))
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
    record = read_records(numbers)["input layer"]
    (part,) = record["measured"]
    assert [result["name"] for result in part["results"]] == ["plain table", "projective"]
    assert all(result["seconds"] > 0 and result["peak_bytes"] > 0 for result in part["results"])
    assert record["versions"]["torch"] and record["repeats"] == 1
    text = readme.read_text()
    assert "| projective |" in text and "old" not in text and text.startswith("before\n")


def test_tables_are_measured_next_to_plain_ones(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("plain, bf16", *decoding.PEERS, "uniform, 4 bits")
    chosen = [table for table in decoding.TABLES if table.name in names]
    results = [decoding.measure(table, decoding.SIZES["tiny"], 1) for table in chosen]
    sizes = [2000 * 64 * 2, 2000 * 64, 2000 * (32 + 2 * 4), 2000 * (32 + 2 * 2)]
    assert [result["file_bytes"] for result in results] == sizes
    scored = {"token", "few", "batch"}
    used = [{"look_up", "token"}, scored, scored, {"look_up", *scored}]
    assert [set(result["times"]) for result in results] == used
    lines = decoding.as_table("tiny", results).splitlines()
    assert lines[0] == "V = 2,000, D = 64" and len(lines) == 8
    assert {line.count("|") for line in lines[2:]} == {9}


@pytest.mark.slow
def test_generation_of_models_is_measured_in_turns(tmp_path: Path, capsys) -> None:
    plain, small, results = tmp_path / "plain", tmp_path / "small", tmp_path / "results.jsonl"
    models.write("llama", plain)
    models.add_tokenizer(plain)
    assert models.compress(plain, "quantized", small, "--bits", "4", "--no-check") == 0
    asked = [str(plain), f"{plain}:bf16", f"{small}:int8", "--tokens", "3", "--repeats", "2"]
    generation.main([*asked, "--output", str(results), "--marker", "generation tiny"])
    record = read_records(results)["generation tiny"]
    assert {name: len(values) for name, values in record["measured"].items()} == {
        "plain": 2,
        "plain:bf16": 2,
        "small:int8": 2,
    }
    table = generation.as_table(record)
    assert table in capsys.readouterr().out and "| plain |" in table and "| 1.00 |" in table
    with pytest.raises(UserError, match="neither a folder"):
        generation.main([str(tmp_path / "no")])


def of_cases(record: Record) -> str:
    """The tables of measurements on a GPU."""
    return gpu.as_text({(case["slice"], case["case"]): case for case in record["cases"]})


TABLES: dict[str, Callable[[Record], str]] = {
    "input layer": layers.as_text,
    "output layer": layers.as_text,
    "language model": lambda record: language_model.as_table(record["measured"]),
    "gradients": gradients.as_text,
    "learned": learned.as_text,
    "rates": rates.as_text,
    "translation": lambda record: translation.as_table(record["measured"]),
    "generation gemma": generation.as_table,
    "generation smollm": generation.as_table,
    "decoding": decoding.as_text,
    "decoding avx2": decoding.as_text,
    "fitting": lambda record: fitting.as_table(record["fits"]),
    "large fits": lambda record: fitting.as_large_table(record["fits"], record["size"]),
    "preprocessing": preprocessing.as_table,
    "compression ptb": compression.as_table,
    "compression quickstart": compression.as_table,
    "gpu": of_cases,
    "large coding": large_tables.coded_text,
    "large reading": large_tables.read_text,
}
LARGE_TABLES = gpu.REPOSITORY / "docs" / "large_tables.md"


def test_readme_tables_match_the_results() -> None:
    text = gpu.README.read_text(encoding="utf-8") + LARGE_TABLES.read_text(encoding="utf-8")
    records = {"gpu": {"cases": []}, **read_records(gpu.RESULTS)}

    for name, record in records.items():
        begin, end = f"<!-- BEGIN {name} -->", f"<!-- END {name} -->"
        assert TABLES[name](record) in text[text.index(begin) : text.index(end)], name


def test_records_of_other_benchmarks_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "numbers.jsonl"
    for name, number in (("b", 1), ("a", 2), ("b", 3)):
        save_record(path, name, {"measured": number})
    assert [read_records(path)[name]["measured"] for name in "ab"] == [2, 3]
    assert len(path.read_text().splitlines()) == 2


WORDS = [f"w{number}" for number in range(400)]


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    """Arguments for a text of up to 400 words at a quarter of their size."""
    text = tmp_path / "text.txt"
    order = torch.randint(0, 400, (300, 8)).square() // 400
    text.write_text("\n".join(" ".join(WORDS[index] for index in line) for line in order.tolist()) + "\n")
    small = ["--dim", "16", "--epochs", "1", "--compression", "4"]
    return ["--text", str(text), *small, "--output", str(tmp_path / "numbers.jsonl")]


def fits(asked: list[str]) -> dict[str, dict]:
    """The results by method."""
    return {fit["method"]: fit for fit in read_records(Path(asked[-1]))["fitting"]["fits"]}


def test_options_meet_the_budget_where_possible() -> None:
    table = torch.randn(2000, 64)
    suggestions = fitting.suggested(table, 2000 * 64 // 8, se.methods())
    assert set(suggestions) == set(se.methods()) - {"standard"}
    for method, options in suggestions.items():
        assert "random_classes" not in options
        required = {"random_classes": True} if method == "uncle" else {}
        count = se.num_parameters(method, num_embeddings=2000, embedding_dim=64, **options, **required)
        assert count <= 2000 * 64 // 8


def test_fits_are_cached(asked: list[str], monkeypatch, capsys) -> None:
    fitting.main([*asked[:-2], "--methods", "projective", *asked[-2:]])
    first = fits(asked)["projective"]

    done: list[str] = []
    fit = se.fit

    def counted(method: str, *arguments, **options):
        done.append(method)
        if len(done) == 2:
            raise KeyboardInterrupt
        return fit(method, *arguments, **options)

    monkeypatch.setattr(fitting.se, "fit", counted)
    chosen = ["--methods", "projective", "tensor_train", "adaptive", "standard"]
    again = [*asked[:-2], *chosen, *asked[-2:]]
    assert run_main("fitting", fitting.main, again) == 130
    assert set(fits(asked)) == {"projective", done[0]}

    fitting.main(again)
    assert sorted(done) == sorted(["tensor_train", "adaptive", done[1]])
    assert set(fits(asked)) == {"projective", "tensor_train", "adaptive"}
    assert "standard is skipped" in capsys.readouterr().err
    assert fits(asked)["projective"] == first
    losses = [fit["loss"] for fit in read_records(Path(asked[-1]))["fitting"]["fits"]]
    assert losses == sorted(losses)


@pytest.mark.slow
def test_programs_for_translation_train_on_the_same_text(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(translation, "VOCABULARY", 100)
    monkeypatch.setattr(translation, "PAIRS", 300)
    monkeypatch.setattr(translation, "FEW", 1)
    translation.main(["--repeats", "1", "--steps", "2", "--output", str(tmp_path / "numbers.jsonl")])
    measured = read_records(tmp_path / "numbers.jsonl")["translation"]["measured"]
    assert set(measured) == {"plain loop", "OpenNMT-py", "onmt_train"}
    assert all(speed > 0 for speeds in measured.values() for speed in speeds)
    translation.write_corpus(tmp_path, 300)
    batches = list(translation.plain_batches(tmp_path, 128))
    assert sum(len(source) for source, _ in batches) > 200
    assert all(side.numel() <= 128 or len(side) == 1 for batch in batches for side in batch)


@pytest.mark.slow
def test_rates_are_tried_once_and_divergence_is_a_result(tmp_path: Path, monkeypatch, capsys) -> None:
    text = tmp_path / "text.txt"
    lines = islice(Language(0, 60, 8, seed=1).sentences(), 300)
    text.write_text("\n".join(lines) + "\n")
    prepare(dict.fromkeys(("train", "valid", "test"), [text]), tmp_path / "ptb_awd_lstm" / "data")
    monkeypatch.setenv("RUNS", str(tmp_path))
    monkeypatch.setattr(rates, "ROWS", ("small_projective",))
    monkeypatch.setattr(rates, "RATES", {"sgd": (1.0, 1e30)})
    arguments = ["--output", str(tmp_path / "numbers.jsonl"), "--rows", "small_projective"]
    rates.main(arguments)
    first, second = read_records(tmp_path / "numbers.jsonl")["rates"]["measured"]
    assert {first["rate"], second["rate"]} == {1.0, 1e30}
    assert "diverged | " not in (table := capsys.readouterr().out) and "diverged" in table
    monkeypatch.setattr(rates, "train", lambda *_: pytest.fail("is there already"))
    rates.main(arguments)
    assert capsys.readouterr().out == table


@pytest.mark.slow
def test_gradients_are_measured_for_every_tensor(tmp_path: Path, monkeypatch) -> None:
    text = tmp_path / "text.txt"
    lines = islice(Language(0, 60, 8, seed=1).sentences(), 600)
    text.write_text("\n".join(lines) + "\n")
    prepare(dict.fromkeys(("train", "valid", "test"), [text]), tmp_path / "ptb_awd_lstm" / "data")
    monkeypatch.setenv("RUNS", str(tmp_path))
    monkeypatch.setattr(gradients, "ROWS", ("small_standard", "small_projective"))
    output, readme = tmp_path / "numbers.jsonl", tmp_path / "README.md"
    readme.write_text("<!-- BEGIN gradients -->\n<!-- END gradients -->\n")
    gradients.main(["--steps", "2", "--output", str(output), "--readme", str(readme)])
    measured = read_records(output)["gradients"]["measured"]
    assert [record["row"] for record in measured] == ["small_standard", "small_projective"]
    assert [set(record["norms"]) for record in measured] == [
        {"network", "weight", "bias"},
        {"network", "codes", "basis", "bias"},
    ]
    for record in measured:
        assert all(len(values) == 1 and values[0] > 0 for values in record["norms"].values())
    assert (tmp_path / "gradients.png").stat().st_size > 1000
    table = readme.read_text()
    assert "`small_projective`" in table and "gradients.png" in table
    record = {"norms": {"network": [1.0], "a": [3.0], "b": [4.0]}, "losses": [0.0], "row": "small_x"}
    assert gradients.embedding_norms(record) == [5.0]
    # 25 of 26 parts of the squared norm, of which 16 are those of b.
    assert "| `small_x` | 5 | 1 | 5 | 1 | 96 % | `b`, 64 % | 1 |" in gradients.as_text({"measured": [record]})


def test_the_spectrum_and_the_losses_of_a_trained_model_are_measured() -> None:
    # A common vector of norm 3, and two directions of equal energy around it.
    table = torch.tensor([[3.0, 1, 0], [3, -1, 0], [3, 0, 1], [3, 0, -1]])
    spectrum = learned.spectrum(table)
    assert spectrum == {"common": pytest.approx(36 / 40), "directions": pytest.approx(2.0)}

    vocabulary = {"<blank>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}

    class BenchmarkModel:
        """Scores log 2 for the word that follows in the source, zero for others."""

        def __call__(self, source: torch.Tensor, target: torch.Tensor, lengths: torch.Tensor) -> Any:
            assert lengths.tolist() == [2, 1] and target[:, 0, 0].tolist() == [1, 1]
            return torch.nn.functional.one_hot(source[..., 0], 5) * math.log(2), None

        def generator(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    losses = learned.target_losses(BenchmarkModel(), vocabulary, ["a b", "b"], ["a a", "b"])
    likely, rare = -math.log(2 / 6), -math.log(1 / 6)
    assert losses == [("a", pytest.approx(likely)), ("a", pytest.approx(rare)), ("b", pytest.approx(likely))]
    words = [f"w{number}" for number in range(99)] + ["a", "b"]  # ranks 99 and 100
    assert learned.by_frequency(losses, words) == pytest.approx(
        [(likely + rare) / 2, likely, 0, (2 * likely + rare) / 3]
    )


def test_sentences_follow_zipf_and_have_the_requested_length() -> None:
    language = Language(1, 1000, 6, seed=1)
    sentences = [line.rstrip(".").split() for line in islice(language.sentences(), 4000)]
    assert sum(map(len, sentences)) / 4000 == pytest.approx(6, abs=0.2)
    counts = Counter(word for line in sentences for word in line)
    # The word of rank 0 has the weight 1 / 2.7, that of rank 10 the weight 1 / 12.7.
    ratio = counts[language.word(0)] / counts[language.word(10)]
    assert ratio == pytest.approx(12.7 / 2.7, rel=0.15)
    first, again, other = (list(islice(Language(0, 100, 5, seed).sentences(), 20)) for seed in (1, 1, 2))
    assert first == again != other


def test_memory_is_measured_in_each_step() -> None:
    program = "\n".join(
        [
            "import time",
            "print('small-learn: running', flush=True); time.sleep(0.5)",
            "print('large-a: running', flush=True); held = bytearray(b'1' * 2**26); time.sleep(0.5)",
        ]
    )
    seen = watch([sys.executable, "-c", program], dict(os.environ))
    assert list(seen)[-2:] == ["small-learn", "large"]
    assert seen["large"] - seen["small-learn"] > 2**25
    with pytest.raises(UserError, match="failed with exit code 3"):
        watch([sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ))


@pytest.mark.slow
def test_program_runs_end_to_end(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.jsonl"
    text = ["--pairs", "400", "--vocab-size", "3000", "--words", "6", "--pieces", "bpe32k"]
    preprocessing.main([*text, "--folder", str(tmp_path), "--output", str(numbers)])
    record = read_records(numbers)["preprocessing"]
    assert {"tokens", "bpe32k-learn", "bpe32k"} <= set(record["steps"])
    assert record["peak_bytes"] == max(record["steps"].values()) > 2**24
    table = as_table(record)
    assert "400 pairs of 6 words" in table and "| bpe32k-learn |" in table


Run = Callable[[], dict[str, Any]]


def slice_of(monkeypatch: pytest.MonkeyPatch, **cases: Run) -> None:
    """Replace all slices by one named "one"."""
    columns = {"ms": ("ms", 1), "ms/": ("ratio", 2)}
    part = gpu.Slice("Title", lambda *_: iter(cases.items()), columns)
    monkeypatch.setattr(gpu, "SLICES", {"one": part})


def run(folder: Path, minutes: float = 8.0) -> dict[str, dict[str, Any]]:
    """Run the slice in this process; gives the records by case."""
    options = argparse.Namespace(tiny=True, folder=folder, minutes=minutes)
    gpu.run_slice("one", options)
    return {case: record for (_, case), record in gpu.read_results(folder).items()}


def raising(error: BaseException) -> Run:
    """A case that fails."""

    def fail() -> dict[str, Any]:
        raise error

    return fail


def test_failures_are_recorded_and_other_cases_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {
        "large": raising(torch.OutOfMemoryError("CUDA out of memory")),
        "wrong": raising(ValueError("no such\nthing")),
        "good": lambda: {"ms": 2.0},
    }
    slice_of(monkeypatch, **cases)
    records = run(tmp_path)
    assert {name: record.get("failed") for name, record in records.items()} == {
        "large": "out of memory",
        "wrong": "ValueError: no such",
        "good": None,
    }
    assert records["good"]["measured"] == {"ms": 2.0}
    assert {"date", "git", "versions", "device"} <= records["good"].keys()
    assert [name for name, record in records.items() if record["done"]] == ["good", "large"]


def test_a_new_run_continues_with_failures_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def noting(name: str, result: dict[str, Any] | None) -> Run:
        def note() -> dict[str, Any]:
            order.append(name)
            if result is None:
                raise KeyboardInterrupt
            return result

        return note

    slice_of(monkeypatch, a=noting("a", {"ms": 1.0}), b=noting("b", None), c=noting("c", {"ms": 1.0}))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    slice_of(
        monkeypatch,
        a=noting("a", {"ms": 1.0}),
        b=noting("b", {"ms": 3.0}),
        c=noting("c", {"ms": 1.0}),
    )
    assert run(tmp_path)["b"]["measured"] == {"ms": 3.0}
    assert order == ["a", "b", "c", "b"]
    run(tmp_path)
    assert len(order) == 4


def test_no_case_starts_with_little_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    def note() -> dict[str, Any]:
        runs.append("run")
        return {"ms": 1.0}

    slice_of(monkeypatch, a=note, b=note)
    run(tmp_path, minutes=1.0)
    assert len(runs) == 2
    slice_of(monkeypatch, d=note)
    run(tmp_path, minutes=0.1)
    assert len(runs) == 2


def test_tables_show_ratios_to_the_first_case_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    slice_of(
        monkeypatch, **{name: raising(AssertionError()) for name in ("plain", "small", "large", "other")}
    )
    origin = {"device": "cuda: 1 x H100", "versions": {"torch": "2.13.0"}}
    measured = {"plain": {"measured": {"ms": 4.0}}, "small": {"measured": {"ms": 1.0}}}
    measured["large"] = {"failed": "out of memory"}  # type: ignore[dict-item]
    records = {("one", case): {**origin, **numbers} for case, numbers in measured.items()}
    text = gpu.as_text(records)
    assert text.startswith("Measured on cuda: 1 x H100; torch 2.13.0.\n\nTitle\n\n|  | ms | ratio |")
    assert text.splitlines()[-5:] == [
        "| plain | 4.0 | 1.00 |",
        "| small | 1.0 | 0.25 |",
        "| large | out of memory | – |",
        "",
        "Not run: other.",
    ]
    assert gpu.as_text({}) == "- Title: not run"


@pytest.mark.slow
def test_everything_runs_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--folder", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {record["slice"] for record in records} == set(gpu.SLICES)
    assert [record for record in records if "failed" in record or not record["done"]] == []
    (two,) = (record["measured"] for record in records if record["slice"] == "processes")
    assert two["difference"] < 1e-4
    assert "processes: 1 of 1 done" in ended.stdout


@pytest.mark.parametrize(
    ("asked", "message"),
    [(["--slices", "input"], "no CUDA device"), (["--tiny", "--publish"], "remove --tiny")],
)
def test_cases_that_need_a_gpu_report_it(
    asked: list[str], message: str, monkeypatch, capsys, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status = gpu.run_main("gpu", gpu.main, [*asked, "--folder", str(tmp_path)])
    assert status == 2 and message in capsys.readouterr().err
