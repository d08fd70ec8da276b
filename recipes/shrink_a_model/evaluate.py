"""Measure the models, and write the table and the picture of the README."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipes.common.plot import PLAIN, draw_lines, draw_points, finish, new_figure, shown_method
from recipes.common.recipe import Recipe
from recipes.common.results import FILE, Record, describe_options, not_run, read_results, write_result
from recipes.common.smoke import SMOKE, SMOKE_HELP
from recipes.common.table import NONE, Column, markdown_table, update_readme
from recipes.common.tools import print_line, read_json, run_module
from recipes.shrink_a_model.encoder import (
    Encoder,
    Texts,
    generating_speeds,
    measure,
    read_all,
    read_encoder,
    read_onnx,
    speed_ratio,
    table_bytes,
)
from recipes.shrink_a_model.preprocess import DECODER, MODEL, PAIRS, TEXTS, VECTORS
from recipes.shrink_a_model.train import (
    COMMAND,
    ORIGINAL,
    WEIGHTS,
    ShrinkRow,
    chosen_rows,
    model_folder,
    read_grid,
)
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import bytes_on_disk, write_text
from shared_embeddings.utils.path_options import PathOption

MARKER, PICTURE = "results", "quality_size.png"
# Panels of the picture, by metric.
PANELS = {
    "top10": "nearest 10 neighbors as in the original",
    "found": "headlines whose description is nearest",
}
# Sentences whose vectors are compared between ONNX Runtime and PyTorch.
_COMPARED = 64
_PLAIN: dict[str, Any] = {"method": "standard", "options": {}, "relative_error": 0.0}


def evaluate(home: Path, row: ShrinkRow, data: Mapping[str, Any]) -> Path:
    """Measure the model of a row; returns the file of results.

    Args:
        home: folder of everything that the recipe writes.
        row: whose model is measured.
        data: the description of the data.

    Raises:
        UserError: the model is not there.
    """
    folder, prepared = model_folder(home, row), home / "data"
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder}: no model; run train.sh {row.name}")
    texts = Texts(**read_json(prepared / TEXTS))
    with np.load(prepared / VECTORS) as stored:
        original = dict(stored)
    encoder, tests = read_encoder(folder), read_all(prepared / PAIRS)
    vectors = texts.encode(encoder, prepared / PAIRS)
    metrics = {
        **measure(vectors, original, tests),
        "speed": speed_ratio(encoder, read_encoder(prepared / MODEL), texts.descriptions),
        "onnx": _in_onnx_runtime(home, row, texts.descriptions, vectors["descriptions"]),
    }
    fit = _fit(folder) if row.is_compressed else _PLAIN
    options = {name: value for name, value in fit["options"].items() if name != "words_per_width"}
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
            # What is not the table takes as much in all models.
            "stored_bits": 8
            * (_weights(folder) - _weights(prepared / MODEL) + table_bytes(prepared / MODEL)),
        },
        metrics={**metrics, "relative_error": fit["relative_error"]},
        data_checksum=data["checksum"],
    )


def evaluate_decoder(home: Path, row: ShrinkRow, data: Mapping[str, Any]) -> Path:
    """As `evaluate`, for a decoder: from the report of its compression, and its speed."""
    folder, original = model_folder(home, row), home / "data" / DECODER
    report = read_json(folder.with_suffix(".json"))
    if report is None or not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder}: no model; run train.sh {row.name}")
    prompt = Texts(**read_json(home / "data" / TEXTS)).captions[0]
    words, before, after = generating_speeds(folder, original, prompt)
    fit = _fit(folder)
    return write_result(
        home,
        row.name,
        config={"trim": row.trim, "given": row.embedding, "embedding": {"method": fit["method"]}},
        counts={
            "words": words,
            "folder_bytes": bytes_on_disk(folder),
            "folder_bytes_before": bytes_on_disk(original),
            "stored_bits": 8 * report["tables"][0]["stored_bytes"]["after"],
        },
        metrics={
            "kept": report["kept"],
            "tokens_per_second": {"before": before, "after": after},
            "relative_error": fit["relative_error"],
        },
        data_checksum=data["checksum"],
    )


def _fit(folder: Path) -> dict[str, Any]:
    """The part of the report of ``compress`` next to a folder about the fit of its table."""
    fit: dict[str, Any] = read_json(folder.with_suffix(".json"))["tables"][0]["fit"]
    return fit


def _weights(folder: Path) -> int:
    """Bytes of the files of weights in a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _in_onnx_runtime(
    home: Path, row: ShrinkRow, sentences: Sequence[str], vectors: np.ndarray
) -> dict[str, float] | None:
    """The size of the exported model, its difference from the vectors of PyTorch ``(N, D)``, and its speed
    relative to the original; None, with a line that says why, where it is not exported as a whole.
    """
    original = ShrinkRow(ORIGINAL)
    if not (model_folder(home, original) / WEIGHTS).is_file():
        raise UserError(f"{model_folder(home, original)}: no model; run train.sh {ORIGINAL}")
    own, other = (_exported(model_folder(home, each)) for each in (row, original))
    if own is None or other is None:
        print_line(f"{row.name}: not run in ONNX Runtime: export wrote no file with the whole encoder")
        return None
    difference = np.abs(own.encode(sentences[:_COMPARED]) - vectors[:_COMPARED]).max()
    return {
        "bytes": model_folder(home, row).with_suffix(".onnx").stat().st_size,
        "difference": float(difference),
        "speed": speed_ratio(own, other, sentences),
    }


def _exported(folder: Path) -> Encoder | None:
    """A model in ONNX Runtime, exported where the file is older than the model; None without one."""
    file = folder.with_suffix(".onnx")
    if not file.is_file() or file.stat().st_mtime < (folder / WEIGHTS).stat().st_mtime:
        command: list[str | Path] = ["export", "--model", folder, "--format", "onnx", "--output", file]
        try:
            run_module(COMMAND, [*command, "--force"])
        except (UserError, SystemExit):
            return None
    return read_onnx(file, folder)


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Measure the models of the rows; write the table and the picture of all results into the README."""
    parser = Parser("eval.sh", description=main.__doc__)
    parser.add_argument("rows", nargs="*", default=[], help="names or patterns, such as 'automatic_*'")
    parser.add_argument(
        "--readme",
        type=PathOption.UPDATED,
        help="with the markers; gets the table, also without rows (default: README.md next to the results)",
    )
    parser.add_argument(SMOKE, action="store_true", help=f"{SMOKE_HELP}; all of its rows")
    options = parser.parse_args(arguments)
    recipe = recipe.smoke() if options.smoke else recipe
    rows = chosen_rows(recipe, ["*"] if options.smoke else options.rows)
    data = recipe.describe_data(recipe.data)
    for row in rows:
        measured = evaluate_decoder if row.decoder else evaluate
        print_line(f"{row.name}: wrote {measured(recipe.home, row, data)}")
    readme = options.readme or recipe.home / "README.md"
    if options.readme is None:
        markers = "".join(f"<!-- BEGIN {name} -->\n<!-- END {name} -->\n" for name in (MARKER, DECODER))
        write_text(readme, markers)
    write_report(read_grid(recipe), recipe.home / FILE, readme)


def write_report(rows: Mapping[str, ShrinkRow], results: Path, readme: Path) -> None:
    """Put the results of the rows into a README, and draw the figure next to it.

    Raises:
        UserError: there are no results, or the README lacks the markers.
    """
    found = {record["row"]: record for record in read_results(results)}
    of_kind: dict[bool, list[Record]] = {False: [], True: []}
    for name, row in rows.items():
        config = {"trim": row.trim, "embedding": row.embedding or {"method": "standard"}}
        of_kind[row.decoder].append(found.get(name) or not_run(name, config))
    update_readme(readme, MARKER, table(of_kind[False]))
    if of_kind[True]:
        update_readme(readme, DECODER, decoder_table(of_kind[True]))
    draw([record for record in of_kind[False] if record["metrics"]], readme.with_name(PICTURE))
    print(f"wrote the results into {readme}")


def table(records: Sequence[Record]) -> str:
    """The Markdown table of all rows."""
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


def decoder_table(records: Sequence[Record]) -> str:
    """The Markdown table of the rows of the decoder."""
    columns = [
        Column("row", lambda r: r["row"], always=True),
        Column("words", lambda r: f"{r['counts']['words']:,}"),
        Column("table, MB", lambda r: f"{r['counts']['stored_bits'] / 8e6:.1f}"),
        Column("folder, MB", lambda r: f"{r['counts']['folder_bytes'] / 1e6:.1f}"),
        Column("folder before, MB", lambda r: f"{r['counts']['folder_bytes_before'] / 1e6:.1f}"),
        Column("predictions kept", lambda r: f"{100 * r['metrics']['kept']['share']:.1f} %"),
        Column("tokens/s", lambda r: f"{r['metrics']['tokens_per_second']['after']:.2f}"),
        Column("tokens/s before", lambda r: f"{r['metrics']['tokens_per_second']['before']:.2f}"),
    ]
    return markdown_table(records, columns)


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw quality against the bytes of the table, a panel per metric, as PNG.

    Args:
        records: measured rows.
        path: the picture; replaced only once the new one is complete.
    """
    shown = [{**one, "metrics": {key: 100 * one["metrics"][key] for key in PANELS}} for one in records]
    names = {one["row"]: one["row"].replace("_", " ") for one in shown if shown_method(one) == PLAIN}
    series = [one for one in shown if one["row"] not in names]
    figure, panels = new_figure(len(PANELS), "A sentence encoder with a smaller table", shared=False)
    for axes, (metric, title) in zip(panels, PANELS.items(), strict=True):
        draw_lines(axes, series, metric)
        draw_points(axes, shown, metric, lambda record: names.get(record["row"], ""))
        axes.set_ylabel(f"{title} (%)")
    finish(figure, panels, path)
