"""Trim and compress the model, row by row; measure the models, and write table and picture of the README."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipes.common.plot import (
    PLAIN,
    draw_lines,
    draw_points,
    finish,
    new_figure,
    numbered_style,
    shown_method,
    write_png,
)
from recipes.common.recipe import FILE, Recipe, read_file
from recipes.common.results import FILE as RESULTS
from recipes.common.results import (
    Record,
    describe_options,
    find_result,
    not_run,
    read_results,
    write_result,
)
from recipes.common.smoke import SMOKE, SMOKE_HELP
from recipes.common.table import NONE, Column, markdown_table, update_readme
from recipes.common.tools import print_line, read_json, run_module, run_step, write_json
from recipes.shrink_a_model.decoder import (
    Sums,
    compare_predictions,
    generating_speeds,
    read_dense,
    round_table,
)
from recipes.shrink_a_model.encoder import (
    Encoder,
    Texts,
    measure,
    read_all,
    read_encoder,
    read_onnx,
    speed_ratio,
    table_bytes,
)
from recipes.shrink_a_model.preprocess import (
    CALIBRATED,
    MODEL,
    PAIRS,
    TEXT,
    TEXTS,
    VECTORS,
    get_decoder,
    installed,
    windows_file,
    write_calibration_text,
    write_windows,
)
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import bytes_on_disk, sha256, write_text
from shared_embeddings.utils.path_options import PathOption

COMMAND = "shared_embeddings.cli.main"
WEIGHTS = "model.safetensors"
ORIGINAL = "original"
MARKER, PICTURE = "results", "quality_size.png"
SUMMARY_PICTURE = Path(__file__).with_name("summary.png")
DECODERS, DECODER_PICTURE = "decoder", "decoder.png"
# Panels of the picture, by metric.
PANELS = {
    "top10": "nearest 10 neighbors as in the original",
    "found": "headlines whose description is nearest",
}
# The rows of the table in the README of the project, without the name of the decoder.
SUMMARY = (
    *("int4", "gguf_iq4_nl", "torchao_int4", "bitsandbytes_nf4"),
    *(f"spectral_{bits}_calibrated" for bits in (4, 2, 1)),
)
# Titles of decoders, and of the texts that measure them.
DECODER_NAMES = {"gemma": "Gemma 3 270M", "smollm": "SmolLM2 135M"}
DECODER_TEXTS = {"wikitext2": "WikiText-2", "ag_news": "AG News"}
# Rows that share a pass, whose tables are in memory: 0.7 GB each with the words of Gemma.
_TOGETHER = 4
# The series of the picture of decoders: plain and spectral codes of this library, and other packages.
SERIES = (
    *("rounded", "rounded, calibrated", "spectral", "spectral, calibrated", "spectral, recovered"),
    *("gguf", "torchao", "bitsandbytes"),
)
# Those of the picture in the README of the project: their names, and the place and points where the name is.
SUMMARY_LINES = {
    "rounded": ("rounded", 0, (8, 2)),
    "gguf": ("llama.cpp's types", -2, (8, 4)),
    "spectral": ("spectral", 0, (8, 2)),
    "spectral, calibrated": ("spectral, calibrated", -2, (0, 12)),
}
# Larger losses, in percent, are left out there.
_MOST_LOSS = 1000
# Smaller and larger losses, in percent, are drawn as these: a logarithmic axis has no 0.
_LEAST_LOSS, _GREATEST_LOSS = 0.1, 10_000
# Sentences whose vectors are compared between ONNX Runtime and PyTorch.
_COMPARED = 64
_PLAIN: dict[str, Any] = {"method": "standard", "options": {}, "relative_error": 0.0}


@dataclass(frozen=True)
class ShrinkRow:
    """One model.

    Attributes:
        trim: whether the vocabulary is trimmed to the texts.
        ratio: how many times fewer bytes its table takes than before compression, or None.
        embedding: method and options; empty where `compress` chooses them, or nothing is compressed.
        decoder: the name of the decoder that it is of; empty for the encoder.
        calibrate: the option of `compress`, or None for its default.
        recover: the minutes that `compress` trains the model after rounding, or None.
        peer: ``package`` and ``kind`` of the codes of another package for the table (decoder).
    """

    name: str
    trim: bool = False
    ratio: float | None = None
    embedding: dict[str, Any] = field(default_factory=dict)
    decoder: str = ""
    calibrate: str | None = None
    recover: float | None = None
    peer: dict[str, str] = field(default_factory=dict)

    @property
    def is_compressed(self) -> bool:
        return bool(self.embedding) or self.ratio is not None or bool(self.peer)


def read_grid(recipe: Recipe) -> dict[str, ShrinkRow]:
    """The rows of ``rows.yaml`` by name, with ``--smoke`` those of the small grid."""
    path = recipe.folder / FILE
    rows = read_file(path)["grids"]["smoke" if recipe.is_smoke else "full"]
    try:
        return {name: ShrinkRow(name, **settings) for name, settings in rows.items()}
    except TypeError as error:
        raise UserError(
            f"{path}: grids: {error}; a row may hold trim, ratio, embedding, decoder, calibrate, recover and "
            "peer"
        ) from error


def chosen_rows(recipe: Recipe, patterns: Sequence[str]) -> list[ShrinkRow]:
    """The rows whose names match one of the patterns, in the order of the file."""
    rows = read_grid(recipe)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in rows):
            raise UserError(f"no row is called {pattern!r}; there are: {', '.join(rows)}")
    return [row for name, row in rows.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]


def model_folder(home: Path, row: str) -> Path:
    """The folder of the model of a row."""
    return home / "models" / row


def train_command(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Write the models of the rows; those that are up to date are kept."""
    parser = Parser("train.sh", description=train_command.__doc__)
    parser.add_argument("rows", nargs="*", help="names or patterns, 'automatic_*'; all of the encoder")
    parser.add_argument("--list", action="store_true", help="only list the rows")
    parser.add_argument(SMOKE, action="store_true", help=SMOKE_HELP)
    options = parser.parse_args(arguments)
    recipe = recipe.smoke() if options.smoke else recipe
    rows = chosen_rows(recipe, options.rows or ["*"])
    if options.list:
        print("\n".join(row.name for row in rows))
        return
    recipe.describe_data(recipe.data)  # fails where there are none
    for row in rows:
        if options.rows or not row.decoder:
            shrink(recipe, row)
            print_line(f"{row.name}: {model_folder(recipe.home, row.name)}")


def shrink(recipe: Recipe, row: ShrinkRow) -> None:
    """Write the model of a row unless it is there, from the same model and settings."""
    data, step = recipe.data, partial(run_step, recipe.home / "steps")
    source, text, folder = data / MODEL, data / TEXT, model_folder(recipe.home, row.name)
    if row.decoder:
        shrink_decoder(recipe, row)
        return
    if row.trim:
        trimmed = model_folder(recipe.home, "trimmed")

        def trim(model: Path = source) -> None:
            shutil.rmtree(trimmed, ignore_errors=True)
            run_module(COMMAND, ["trim", "--model", model, "--text", text, "--output", trimmed])

        step("trimmed", [source / WEIGHTS, text], [trimmed / WEIGHTS], trim)
        source = trimmed
    if row.is_compressed:
        names = ("name", "trim", "ratio", "embedding", "calibrate", "recover")
        settings = {name: vars(row)[name] for name in names}
        inputs, asked = [source / WEIGHTS, text], (source, text, folder, row)
        step(row.name, inputs, [folder / WEIGHTS], _compress, *asked, **settings)
    elif not row.trim:
        shutil.copytree(source, folder, dirs_exist_ok=True)


def shrink_decoder(recipe: Recipe, row: ShrinkRow) -> None:
    """As `shrink`, for a decoder, which is read and cut into windows first."""
    home, settings = recipe.home, recipe.data_settings()[1]
    folder, step = model_folder(home, row.name), partial(run_step, home / "steps")
    source = get_decoder(row.decoder, settings["decoders"][row.decoder], home)
    text = write_calibration_text(settings, home)
    write_windows(row.decoder, settings, home)
    if row.peer:
        package = settings["peers"][row.peer["package"]]

        def write_peer() -> None:
            with installed([package]):
                write_json(folder.with_suffix(".json"), round_table(source, folder, **row.peer))

        step(row.name, [source / WEIGHTS], [folder / WEIGHTS], write_peer, **row.peer, requirement=package)
    elif row.is_compressed:
        inputs = [source / WEIGHTS, text, *([recipe.data / TEXT] if row.trim else [])]
        asked = (source, text, folder, row, _decoder_options(recipe, row))
        step(row.name, inputs, [folder / WEIGHTS], _compress, *asked, **vars(row))
    else:
        shutil.copytree(source, folder, dirs_exist_ok=True)


def _decoder_options(recipe: Recipe, row: ShrinkRow) -> list[str | Path]:
    """The options of `compress` that only decoders have."""
    options: list[str | Path] = ["--trim-to", recipe.data / TEXT] if row.trim else []
    runs_model = row.recover is not None
    if row.calibrate is not None:
        runs_model |= row.calibrate != "none"
    elif not row.trim:
        # Measured with the first of the rows, and the same for all.
        calibration = recipe.data / f"{row.decoder}{CALIBRATED}"
        options += ["--calibration", calibration]
        runs_model |= not calibration.is_file()
    # Else nothing runs the model: eval.sh compares more predictions.
    return options if runs_model or row.trim else [*options, "--no-check"]


def _compress(model: Path, text: Path, output: Path, row: ShrinkRow, more: Sequence[str | Path] = ()) -> None:
    """Replace the table of a model; `more` are further arguments of `compress`."""
    arguments: list[str | Path] = ["compress", "--model", model, "--text", text, "--output", output]
    arguments += ["--report", output.with_suffix(".json"), "--force", *more]
    given = {"target-ratio": row.ratio, "calibrate": row.calibrate, "recover": row.recover}
    for name, value in given.items():
        arguments += [] if value is None else [f"--{name}", str(value)]
    for name, value in row.embedding.items():
        arguments += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    output.parent.mkdir(parents=True, exist_ok=True)
    run_module(COMMAND, arguments)


def eval_command(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Measure the models of the rows; write the table and the picture of all results into the README."""
    parser = Parser("eval.sh", description=eval_command.__doc__)
    parser.add_argument("rows", nargs="*", default=[], help="names or patterns, such as 'automatic_*'")
    parser.add_argument(
        "--readme",
        type=PathOption.UPDATED,
        help="with the markers; gets the table, also without rows (default: README.md next to the results)",
    )
    parser.add_argument(SMOKE, action="store_true", help=f"{SMOKE_HELP}; all of its rows")
    options = parser.parse_args(arguments)
    recipe = recipe.smoke() if options.smoke else recipe
    data = recipe.describe_data(recipe.data)
    rows = chosen_rows(recipe, ["*"] if options.smoke else options.rows)
    for row in rows:
        if not (model_folder(recipe.home, row.name) / WEIGHTS).is_file():
            raise UserError(f"{model_folder(recipe.home, row.name)}: no model; run train.sh {row.name}")
    for row in rows:
        if not row.decoder:
            print_line(f"{row.name}: wrote {evaluate(recipe.home, row, data)}")
    evaluate_decoders(recipe.home, [row for row in rows if row.decoder])
    readme = options.readme or recipe.home / "README.md"
    if options.readme is None:
        markers = "".join(f"<!-- BEGIN {name} -->\n<!-- END {name} -->\n" for name in (MARKER, DECODERS))
        write_text(readme, markers)
    write_report(read_grid(recipe), recipe.home / RESULTS, readme)


def evaluate(home: Path, row: ShrinkRow, data: Mapping[str, Any]) -> Path:
    """Measure the model of a row in the recipe's folder of runs; return the file of results."""

    def weights(folder: Path) -> int:
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))

    folder, prepared = model_folder(home, row.name), home / "data"
    texts = Texts(**read_json(prepared / TEXTS))
    with np.load(prepared / VECTORS) as stored:
        original = dict(stored)
    encoder, tests = read_encoder(folder), read_all(prepared / PAIRS)
    vectors = texts.encode(encoder, prepared / PAIRS)
    metrics = {
        **measure(vectors, original, tests),
        "speed": speed_ratio(encoder, read_encoder(prepared / MODEL), texts.descriptions),
        "onnx": _measure_in_onnx_runtime(home, row.name, texts.descriptions, vectors["descriptions"]),
    }
    fit = _PLAIN
    if row.is_compressed:
        fit = read_json(folder.with_suffix(".json"))["tables"][0]["fit"]
    options = {name: value for name, value in fit["options"].items() if name != "words_per_width"}
    # What is not the table takes as much in all models.
    table = weights(folder) - weights(prepared / MODEL) + table_bytes(prepared / MODEL)
    return write_result(
        home,
        row.name,
        config={
            "trim": row.trim,
            "ratio": row.ratio,
            "given": row.embedding,
            "embedding": {"method": fit["method"], **options},
        },
        counts={
            "words": len(encoder.tokenizer),
            "folder_bytes": bytes_on_disk(folder),
            "stored_bits": 8 * table,
        },
        metrics={**metrics, "relative_error": fit["relative_error"]},
        data_checksum=data["checksum"],
    )


def evaluate_decoders(home: Path, rows: Sequence[ShrinkRow]) -> None:
    """As `evaluate`, for decoders; rows whose results are of the same files are not measured again.

    Some rows of one decoder share a pass over its windows, so that the original reads them once. An
    interrupted pass resumes at the next window.
    """
    rest = []
    for row in rows:
        if row.is_compressed and not model_folder(home, row.name).with_suffix(".json").is_file():
            raise UserError(f"{model_folder(home, row.name)}: no report; run train.sh {row.name}")
        known = find_result(home, row.name)
        if known is not None and known.get("checksums") == decoder_checksums(home, row):
            print_line(f"{row.name}: up to date")
        else:
            rest.append(row)
    for name in dict.fromkeys(row.decoder for row in rest):
        own = [row for row in rest if row.decoder == name]
        for first in range(0, len(own), _TOGETHER):
            measure_decoders(home, own[first : first + _TOGETHER])


def decoder_checksums(home: Path, row: ShrinkRow) -> dict[str, str]:
    """The SHA-256 of the files that the results of a row depend on."""
    folder = model_folder(home, row.name)
    return {"model": sha256(folder / WEIGHTS), "windows": sha256(windows_file(home, row.decoder))}


def measure_decoders(home: Path, rows: Sequence[ShrinkRow]) -> None:
    """Compare the models of rows of one decoder with it in one pass over its windows; write their results."""
    print_line(f"measuring {', '.join(row.name for row in rows)}")
    name, folders = rows[0].decoder, [model_folder(home, row.name) for row in rows]
    original = read_dense(home / "data" / name)
    decoders = [read_dense(folder, original) for folder in folders]
    sums = [
        Sums(folder.with_suffix(".windows.json"), decoder_checksums(home, row))
        for folder, row in zip(folders, rows, strict=True)
    ]
    with np.load(windows_file(home, name)) as stored:
        texts = {text: torch.from_numpy(windows) for text, windows in stored.items()}
    for text, windows in texts.items():
        compare_predictions(original, decoders, text, windows, sums)
    for row, decoder, own in zip(rows, decoders, sums, strict=True):
        measured = {text: own.means(text, windows[:, 1:].numel()) for text, windows in texts.items()}
        sizes = decoder.table.shape
        print_line(f"{row.name}: wrote {write_decoder_result(home, row, measured, *sizes)}")
        own.path.unlink()


def write_decoder_result(
    home: Path, row: ShrinkRow, measured: Mapping[str, Any], words: int, dim: int
) -> Path:
    """Write what was measured of a row on each text, its bytes and its speed; return the file of results."""
    folder, original = model_folder(home, row.name), home / "data" / row.decoder
    fit, table, speed = _PLAIN, table_bytes(original), None
    if row.is_compressed:
        report = read_json(folder.with_suffix(".json"))["tables"][0]
        fit, table = report["fit"], report["stored_bytes"]["after"]
        if not row.peer:
            prompt = Texts(**read_json(home / "data" / TEXTS)).captions[0]
            speed = dict(zip(("before", "after"), generating_speeds(folder, original, prompt)))
    given = {"given": row.embedding, "calibrate": row.calibrate, "recover": row.recover}
    checksums = decoder_checksums(home, row)
    return write_result(
        home,
        row.name,
        config={
            "trim": row.trim,
            **({"peer": row.peer} if row.peer else given),
            "embedding": {"method": fit["method"]},
        },
        counts={
            "words": words,
            "weights": words * dim,
            # A folder of a peer holds decoded numbers.
            "folder_bytes": None if row.peer else bytes_on_disk(folder),
            "folder_bytes_before": bytes_on_disk(original),
            "stored_bits": 8 * table,
        },
        metrics={
            "texts": dict(measured),
            "tokens_per_second": speed,
            "relative_error": fit["relative_error"],
        },
        data_checksum=checksums["windows"],
        checksums=checksums,
    )


def _measure_in_onnx_runtime(
    home: Path, row: str, sentences: Sequence[str], vectors: np.ndarray
) -> dict[str, float] | None:
    """The size of the exported model, its difference from the vectors of PyTorch ``(N, D)``, and its speed
    relative to the original; None, with a line that says why, where it is not exported as a whole.
    """

    def exported(folder: Path) -> Encoder | None:
        """A model in ONNX Runtime, exported where the file is older than the model."""
        file = folder.with_suffix(".onnx")
        if not file.is_file() or file.stat().st_mtime < (folder / WEIGHTS).stat().st_mtime:
            command: list[str | Path] = ["export", "--model", folder, "--format", "onnx", "--output", file]
            try:
                run_module(COMMAND, [*command, "--force"])
            except (UserError, SystemExit):
                return None
        return read_onnx(file, folder)

    folder, original = model_folder(home, row), model_folder(home, ORIGINAL)
    if not (original / WEIGHTS).is_file():
        raise UserError(f"{original}: no model; run train.sh {ORIGINAL}")
    own, other = exported(folder), exported(original)
    if own is None or other is None:
        print_line(f"{row}: not run in ONNX Runtime: export wrote no file with the whole encoder")
        return None
    difference = np.abs(own.encode(sentences[:_COMPARED]) - vectors[:_COMPARED]).max()
    return {
        "bytes": folder.with_suffix(".onnx").stat().st_size,
        "difference": float(difference),
        "speed": speed_ratio(own, other, sentences),
    }


def write_report(rows: Mapping[str, ShrinkRow], results: Path, readme: Path) -> None:
    """Put the results of the rows into a README, and draw the figure next to it."""
    found = {record["row"]: record for record in read_results(results)}
    of_kind: dict[bool, list[Record]] = {False: [], True: []}
    for name, row in rows.items():
        config = {"trim": row.trim, "embedding": row.embedding or {"method": "standard"}}
        of_kind[bool(row.decoder)].append(found.get(name) or not_run(name, config))
    update_readme(readme, MARKER, table(of_kind[False]))
    if of_kind[True]:
        update_readme(readme, DECODERS, decoder_table(of_kind[True]))
        draw_decoders(
            [one for one in of_kind[True] if "texts" in one["metrics"]], readme.with_name(DECODER_PICTURE)
        )
    draw([record for record in of_kind[False] if record["metrics"]], readme.with_name(PICTURE))
    print(f"wrote the results into {readme}")


def table(records: Sequence[Record]) -> str:
    """The Markdown table of all rows of the encoder."""
    original: Record = next((one["counts"] for one in records if one["row"] == ORIGINAL), {})
    sets = next((list(record["metrics"]["rho"]) for record in records if record["metrics"]), [])

    def replaced(record: Record) -> str:
        method = str(record["config"]["embedding"]["method"])
        return "plain" if method == "standard" else f"{method}, {describe_options(record)}"

    def rho(name: str) -> Callable[[Record], str]:
        def describe(record: Record) -> str:
            found = record["metrics"]["rho"][name]
            return "undefined" if found is None else f"{found:.3f}"

        return describe

    def percent(metric: str) -> Callable[[Record], str]:
        return lambda record: f"{100 * record['metrics'][metric]:.1f} %"

    def onnx(describe: Callable[[dict[str, float]], str]) -> Callable[[Record], str]:
        return lambda r: NONE if r["metrics"]["onnx"] is None else describe(r["metrics"]["onnx"])

    columns = [
        Column("row", lambda r: r["row"], always=True),
        Column("table", replaced),
        Column("words", lambda r: f"{r['counts']['words']:,}"),
        Column("folder, MB", lambda r: f"{r['counts']['folder_bytes'] / 1e6:.1f}"),
        Column("table, MB", lambda r: f"{r['counts']['stored_bits'] / 8e6:.2f}"),
        Column("table smaller", lambda r: f"{original['stored_bits'] / r['counts']['stored_bits']:.1f}x"),
        *(Column(f"rho {name.removeprefix('EN-').removesuffix('-ALL')}", rho(name)) for name in sets),
        Column("headlines found", percent("found")),
        Column("nearest as before", percent("top1")),
        Column("10 nearest as before", percent("top10")),
        Column("correlation", lambda r: f"{r['metrics']['correlation']:.4f}"),
        Column("speed", lambda r: f"{r['metrics']['speed']:.2f}x"),
        Column("ONNX, MB", onnx(lambda found: f"{found['bytes'] / 1e6:.1f}")),
        Column("ONNX, difference", onnx(lambda found: f"{found['difference']:.0e}")),
        Column("ONNX, speed", onnx(lambda found: f"{found['speed']:.2f}x")),
    ]
    return markdown_table(records, columns)


def higher(text: str) -> Callable[[Record], str]:
    """How much higher the perplexity of a text is, for a column; +0.0 % if that rounds to zero."""

    def text_of(record: Record) -> str:
        found = round(loss(record, text), 1) + 0.0
        return f"{found:+.1f} %" if found < 1e6 else f"{found:+.0e} %"

    return text_of


def decoder_table(records: Sequence[Record]) -> str:
    """The Markdown table of the measured rows of decoders, and the names of the others."""

    def shown(text: str, metric: str, form: Callable[[float], str]) -> Callable[[Record], str]:
        def describe(record: Record) -> str:
            found = record["metrics"]["texts"][text][metric]
            return NONE if found is None else form(found)

        return describe

    def speed(when: str) -> Callable[[Record], str]:
        def describe(record: Record) -> str:
            found = record["metrics"]["tokens_per_second"]
            return NONE if found is None else f"{found[when]:.2f}"

        return describe

    def folder(record: Record) -> str:
        found = record["counts"]["folder_bytes"]
        return NONE if found is None else f"{found / 1e6:.1f}"

    columns = [
        Column("row", lambda r: r["row"], always=True),
        Column("bits a weight", lambda record: f"{bits_a_weight(record):.2f}"),
        Column("words", lambda r: f"{r['counts']['words']:,}"),
        Column("table, MB", lambda r: f"{r['counts']['stored_bits'] / 8e6:.1f}"),
        Column("folder, MB", folder),
    ]

    def perplexity(value: float) -> str:
        return f"{value:.2f}" if value < 1e6 else f"{value:.0e}"

    for text, title in DECODER_TEXTS.items():
        columns += [
            Column(f"{title}: perplexity", shown(text, "perplexity", perplexity)),
            Column("loss", higher(text)),
            Column("KL", shown(text, "kl", lambda value: f"{abs(value):.4f}")),
            Column("greedy kept", shown(text, "kept", lambda value: f"{100 * value:.1f} %")),
        ]
    columns += [Column("tokens/s", speed("after")), Column("tokens/s before", speed("before"))]
    done = [one for one in records if "texts" in (one.get("metrics") or {})]
    others = ", ".join(f"`{one['row']}`" for one in records if one not in done)
    return markdown_table(done, columns) + (f"\nNot run: {others}." if others else "")


def decoder_summary() -> str:
    """The table of rows of the first decoder for the README of the project, by size: those in `SUMMARY`."""
    name, text = next(iter(DECODER_NAMES)), next(iter(DECODER_TEXTS))
    found = [
        one
        for one in read_results(Path(__file__).with_name(RESULTS))
        if one["row"].removeprefix(f"{name}_") in SUMMARY and "texts" in one["metrics"]
    ]

    def whole(one: Record) -> str:
        counts = one["counts"]  # the folder before has its table in bf16
        return (
            f"{(counts['folder_bytes_before'] - 2 * counts['weights'] + counts['stored_bits'] / 8) / 1e6:.0f}"
        )

    columns = [
        Column("table", lambda one: " ".join(one["config"].get("peer", {"": series(one)}).values())),
        Column("bits a weight", lambda one: f"{bits_a_weight(one):.2f}"),
        Column("whole model, MB", whole),
        *(Column(f"perplexity, {title}", higher(of)) for of, title in DECODER_TEXTS.items()),
        Column("greedy choice kept", lambda one: f"{100 * one['metrics']['texts'][text]['kept']:.1f} %"),
    ]
    return markdown_table(sorted(found, key=bits_a_weight, reverse=True), columns)


def draw_summary(path: Path) -> None:
    """Draw the losses of the first decoder on its first text against the bits of a weight, as PNG."""
    name, text = next(iter(DECODER_NAMES)), next(iter(DECODER_TEXTS))
    records = read_results(Path(__file__).with_name(RESULTS))
    shown = [one for one in records if one["row"].startswith(name) and "texts" in one["metrics"]]
    figure, (axes,) = new_figure(1, f"{DECODER_NAMES[name]} with a smaller table, on {DECODER_TEXTS[text]}")
    for line, (label, place, offset) in SUMMARY_LINES.items():
        color, marker = numbered_style(SERIES.index(line))
        places = sorted(
            (bits_a_weight(one), max(_LEAST_LOSS, loss(one, text)))
            for one in shown
            if series(one) == line and loss(one, text) < _MOST_LOSS
        )
        axes.plot(*zip(*places), color=color, marker=marker, linewidth=2)
        axes.annotate(label, places[place], offset, textcoords="offset points", color=color, fontsize=12)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g} %")
    axes.set_xlabel("bits of a weight, scales counted", fontsize=12)
    axes.set_ylabel(f"rise in perplexity (less: drawn at {_LEAST_LOSS:g} %)", fontsize=12)
    axes.grid(alpha=0.3, linewidth=0.6)
    write_png(figure, path)


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw quality of the measured rows against the bytes of the table, a panel per metric, as PNG."""
    shown = [{**one, "metrics": {key: 100 * one["metrics"][key] for key in PANELS}} for one in records]
    names = {one["row"]: one["row"].replace("_", " ") for one in shown if shown_method(one) == PLAIN}
    series = [one for one in shown if one["row"] not in names]
    figure, panels = new_figure(len(PANELS), "A sentence encoder with a smaller table", shared=False)
    for axes, (metric, title) in zip(panels, PANELS.items(), strict=True):
        draw_lines(axes, series, metric)
        draw_points(axes, shown, metric, lambda record: names.get(record["row"], ""))
        axes.set_ylabel(f"{title} (%)")
    finish(figure, panels, path)


def draw_decoders(records: Sequence[Record], path: Path) -> None:
    """Draw the losses of measured decoders against the bits of a weight, a row for each original, as PNG.

    Originals and trimmed decoders are left out.
    """
    from matplotlib.ticker import LogFormatter

    styles = {name: numbered_style(index) for index, name in enumerate(SERIES)}
    shown = [one for one in records if "texts" in one["metrics"] and series(one) in styles]
    of_decoder = {name: [one for one in shown if one["row"].startswith(name)] for name in DECODER_NAMES}
    wanted = [(name, text) for name, own in of_decoder.items() if own for text in DECODER_TEXTS]
    if not wanted:
        return
    figure, panels = new_figure(len(wanted), "Decoders with a smaller table", False, len(DECODER_TEXTS))
    for axes, (decoder, text) in zip(panels, wanted, strict=True):
        for one in of_decoder[decoder]:
            color, marker = styles[series(one)]
            place = bits_a_weight(one), min(max(_LEAST_LOSS, loss(one, text)), _GREATEST_LOSS)
            axes.scatter(*place, s=34, marker=marker, color=color, label=series(one), zorder=2)
            given = one["config"].get("peer", {}).get("kind") or f"{one['config']['given']['bits']:g}"
            axes.text(*place, given, fontsize=8, color=color)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(LogFormatter())  # leaves out labels where there are many
        axes.set_xlabel("bits of a weight, all counted")
        axes.set_title(f"{DECODER_NAMES[decoder]}, {DECODER_TEXTS[text]}", fontsize=10)
        axes.grid(alpha=0.3, linewidth=0.6)
        axes.margins(x=0.15, y=0.1)
    for axes in panels[:: len(DECODER_TEXTS)]:
        axes.set_ylabel(f"higher perplexity (%), drawn from {_LEAST_LOSS:g} to {_GREATEST_LOSS}")
    finish(figure, panels, path, styles)


def series(record: Record) -> str:
    """The name of a record's series in the picture of decoders; empty for originals and trimmed ones."""
    config = record["config"]
    if config["trim"] or config["embedding"]["method"] == "standard":
        return ""
    if "peer" in config:
        return str(config["peer"]["package"])
    name = "spectral" if config["given"].get("codec") == "spectral" else "rounded"
    if config.get("recover"):
        return f"{name}, recovered"
    return f"{name}, calibrated" if config["calibrate"] is None else name


def bits_a_weight(record: Record) -> float:
    """The bits of codes and scales for each number of the table."""
    return float(record["counts"]["stored_bits"] / record["counts"]["weights"])


def loss(record: Record, text: str) -> float:
    """By how many percent a decoder has a higher perplexity than the original."""
    found = record["metrics"]["texts"][text]
    return float(100 * (found["perplexity"] / found["original_perplexity"] - 1))
