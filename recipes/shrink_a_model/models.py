"""Trim and compress the model, row by row; measure the models, and write table and picture of the README."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    read_results,
    write_result,
)
from recipes.common.table import NONE, Column, markdown_table, number, update_readme
from recipes.common.tools import SMOKE, SMOKE_HELP, matching, read_json, run_command, run_step, write_json
from recipes.shrink_a_model.decoder import (
    Predictions,
    round_table,
)
from recipes.shrink_a_model.encoder import (
    EncoderTexts,
    measure,
    quality_columns,
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
from recipes.shrink_a_model.static import (
    STATIC,
    evaluate_static,
    get_static,
    load_model2vec,
    static_table,
    write_peer,
)
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import bytes_on_disk, sha256, write_text
from shared_embeddings.utils.options import parse_options
from shared_embeddings.utils.paths import existing_file

COMMAND = "shared-embeddings"
WEIGHTS = "model.safetensors"
ORIGINAL = "original"
MARKER, PICTURE = "results", "quality_size.png"
DECODERS, DECODER_PICTURE = "decoder", "decoder.png"
# Panels of the picture, by metric.
PANELS = {
    "top10": "nearest 10 neighbors as in the original",
    "found": "headlines whose description is nearest",
}
# Titles of decoders, and of the texts that measure them unless these are names; those in no other language.
DECODER_NAMES = {"gemma": "Gemma 3 270M", "smollm": "SmolLM2 135M"}
TITLES = {"wikitext2": "WikiText-2", "ag_news": "AG News"}
NO_LANGUAGE = (*TITLES, "Python")
# The series of the picture of decoders: codes of this library, and other packages.
SERIES = (
    *("default", "only the text", "recovered", "not calibrated", "rounded", "for a runtime"),
    *("gguf", "mlx", "torchao", "bitsandbytes"),
)
PEERS = {"gguf": "llama.cpp", "mlx": "MLX"}  # what runs the codes of a package
# Smaller losses, in percent, are drawn as this, since a logarithmic axis has no 0, and larger ones as that;
# rows of more bits are not drawn, and those of about as many stand so far apart.
LEAST_LOSS, _MOST_LOSS, _MOST_BITS, _APART = 0.1, 1000, 6, 0.085
# Sentences whose vectors are compared between ONNX Runtime and PyTorch.
_COMPARED = 64
_PLAIN: dict[str, Any] = {"method": "standard", "options": {}, "relative_error": 0.0}


@dataclass(frozen=True)
class ShrinkRow:
    """One model."""

    name: str
    trim: bool = False  # the vocabulary, to the texts
    ratio: float | None = None  # how many times fewer bytes its table takes than before compression
    # Method and options; empty where `compress` chooses them, or nothing is compressed.
    embedding: dict[str, Any] = field(default_factory=dict)
    decoder: str = ""  # the name of the decoder that it is of; empty for the encoder
    static: str = ""  # that of the static model, likewise
    dtype: str = ""  # of the copy for model2vec that `export` writes; empty for none
    calibration: str | None = None  # the option of `compress`; None: its default
    only_text: bool = False  # likewise
    recover: float | None = None  # minutes that `compress` trains the model after rounding
    # ``package`` and ``kind`` of the codes of another package for the table (decoder, static).
    peer: dict[str, str] = field(default_factory=dict)

    @property
    def is_compressed(self) -> bool:
        return bool(self.embedding) or self.ratio is not None or bool(self.peer)

    @property
    def is_of_encoder(self) -> bool:
        return not self.decoder and not self.static


def read_grid(recipe: Recipe, patterns: Sequence[str] = ("*",)) -> dict[str, ShrinkRow]:
    """Return the rows of ``rows.yaml`` whose names match a pattern; with ``--smoke`` of the small grid."""
    path = recipe.folder / FILE
    rows = read_file(path)["grids"]["smoke" if recipe.is_smoke else "full"]
    names = matching(rows, patterns, "row")
    return {name: parse_options(f"{path}: {name}", ShrinkRow, {"name": name, **rows[name]}) for name in names}


def model_folder(home: Path, row: str) -> Path:
    """Return the folder of the model of a row."""
    return home / "models" / row


def train_command(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Write the models of the rows; those that are up to date are not written again."""
    parser = Parser("train.sh", description=train_command.__doc__)
    parser.add_argument("rows", nargs="*", help="names or patterns, 'automatic_*'; all of the encoder")
    parser.add_argument("--list", action="store_true", help="only list the rows")
    parser.add_argument(SMOKE, action="store_true", help=SMOKE_HELP)
    options = parser.parse_args(arguments)
    recipe = recipe.smoke() if options.smoke else recipe
    rows = read_grid(recipe, options.rows or ["*"])
    if options.list:
        print("\n".join(rows))
        return
    recipe.describe_data(recipe.data)  # fails where there are none
    for name, row in rows.items():
        if row.is_of_encoder:
            shrink_encoder(recipe, row)
        elif options.rows:
            (shrink_decoder if row.decoder else shrink_static)(recipe, row)
        if options.rows or row.is_of_encoder:
            print(f"{name}: {model_folder(recipe.home, name)}", flush=True)


def shrink_encoder(recipe: Recipe, row: ShrinkRow) -> None:
    """Write the model of a row unless it is there, from the same model and settings."""
    step = partial(run_step, recipe.home / "steps")
    source, text = recipe.data / MODEL, recipe.data / TEXT
    folder, trimmed = model_folder(recipe.home, row.name), model_folder(recipe.home, "trimmed")
    if row.trim:
        asked = ["trim", "--model", source, "--text", text, "--output", trimmed, "--force"]
        step("trimmed", [source / WEIGHTS, text], [trimmed / WEIGHTS], run_command, COMMAND, asked)
        source = trimmed
    if row.is_compressed:
        inputs, asked = [source / WEIGHTS, text], [source, text, folder, row]
        step(row.name, inputs, [folder / WEIGHTS], _compress, *asked, **vars(row))
    elif not row.trim:
        shutil.copytree(source, folder, dirs_exist_ok=True)


def shrink_decoder(recipe: Recipe, row: ShrinkRow) -> None:
    """As `shrink_encoder`, for a decoder, which is read and cut into windows first."""
    home, settings = recipe.home, recipe.data_settings()[1]
    folder, step = model_folder(home, row.name), partial(run_step, home / "steps")
    source = get_decoder(row.decoder, settings["decoders"][row.decoder], home)
    text = write_calibration_text(settings, home)
    write_windows(row.decoder, settings, home)
    if row.peer:
        packages = settings["peers"][row.peer["package"]]

        def write_peer() -> None:
            with installed(packages):
                write_json(folder.with_suffix(".json"), round_table(source, folder, **row.peer))

        step(row.name, [source / WEIGHTS], [folder / WEIGHTS], write_peer, **row.peer, requirements=packages)
    elif row.is_compressed:
        # eval.sh compares more predictions.
        more: list[str | Path] = [] if row.recover is not None else ["--no-check"]
        if row.calibration is None:
            # Measured with the first of the rows, and the same for all.
            calibration = recipe.data / f"{row.decoder}{'_only_text' * row.only_text}{CALIBRATED}"
            more += ["--calibration", calibration]
        inputs, asked = [source / WEIGHTS, text], [source, text, folder, row, more]
        step(row.name, inputs, [folder / WEIGHTS], _compress, *asked, **vars(row))
    else:
        shutil.copytree(source, folder, dirs_exist_ok=True)


def shrink_static(recipe: Recipe, row: ShrinkRow) -> None:
    """As `shrink_encoder`, for a static model, which is read or distilled first."""
    home, settings = recipe.home, recipe.data_settings()[1]
    folder, step = model_folder(home, row.name), partial(run_step, home / "steps")
    source, text = get_static(row.static, settings, home), recipe.data / TEXT
    inputs, outputs = [source / WEIGHTS, text], [folder / WEIGHTS]
    if row.peer:
        packages = settings[STATIC]["packages"]
        peer = [source, folder, row.peer["kind"], load_model2vec(packages, home)]
        step(row.name, inputs[:1], outputs, write_peer, *peer, **row.peer, packages=packages)
    elif row.dtype:
        places: list[str | Path] = ["--model", source, "--output", folder, "--force"]
        asked = ["export", *places, "--format", "model2vec", "--dtype", row.dtype]
        step(row.name, inputs[:1], outputs, run_command, COMMAND, asked, dtype=row.dtype)
    else:
        # eval.sh compares more.
        step(row.name, inputs, outputs, _compress, source, text, folder, row, ["--no-check"], **vars(row))


def _compress(model: Path, text: Path, output: Path, row: ShrinkRow, more: Sequence[str | Path] = ()) -> None:
    """Replace the table of a model; `more` are further arguments of `compress`."""
    arguments: list[str | Path] = ["compress", "--model", model, "--text", text, "--output", output]
    arguments += ["--report", output.with_suffix(".json"), "--force", *more]
    arguments += ["--only-text"] * row.only_text
    settings = {
        "size": None if row.ratio is None else f"{row.ratio:g}x",
        "calibration": row.calibration,
        "recover": None if row.recover is None else f"{row.recover:g}min",
    }
    for name, value in settings.items():
        arguments += [] if value is None else [f"--{name}", value]
    for name, value in row.embedding.items():
        arguments += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    output.parent.mkdir(parents=True, exist_ok=True)
    run_command(COMMAND, arguments)


def eval_command(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Measure the models of the rows; write the table and the picture of all results into the README."""
    parser = Parser("eval.sh", description=eval_command.__doc__)
    parser.add_argument("rows", nargs="*", default=[], help="names or patterns, such as 'automatic_*'")
    parser.add_argument(
        "--readme",
        type=existing_file,
        help="with the markers; gets the table, also without rows (default: README.md next to the results)",
    )
    parser.add_argument(SMOKE, action="store_true", help=f"{SMOKE_HELP}; all of its rows")
    options = parser.parse_args(arguments)
    recipe = recipe.smoke() if options.smoke else recipe
    data = recipe.describe_data(recipe.data)
    rows = list(read_grid(recipe, ["*"] if options.smoke else options.rows).values())
    for row in rows:
        if not (model_folder(recipe.home, row.name) / WEIGHTS).is_file():
            raise UserError(f"{model_folder(recipe.home, row.name)}: no model; run train.sh {row.name}")
    for row in rows:
        if row.decoder:
            evaluate_decoder(recipe.home, row)
        elif row.static:
            model2vec = load_model2vec(recipe.data_settings()[1][STATIC]["packages"], recipe.home)
            asked = {
                name: getattr(row, name)
                for name in ("embedding", "dtype", "peer", "calibration", "only_text")
            }
            path = evaluate_static(recipe.home, row.name, row.static, asked, model2vec, data["checksum"])
            print(f"{row.name}: wrote {path}", flush=True)
        else:
            print(f"{row.name}: wrote {evaluate_encoder(recipe.home, row, data)}", flush=True)
    readme = options.readme or recipe.home / "README.md"
    if options.readme is None:
        markers = "".join(
            f"<!-- BEGIN {name} -->\n<!-- END {name} -->\n" for name in (MARKER, DECODERS, STATIC)
        )
        write_text(readme, markers)
    write_report(read_grid(recipe), recipe.home / RESULTS, readme)


def evaluate_encoder(home: Path, row: ShrinkRow, data: Mapping[str, Any]) -> Path:
    """Measure the model of a row in the recipe's folder of runs; return the file of results."""
    folder, prepared = model_folder(home, row.name), home / "data"
    texts = EncoderTexts(**read_json(prepared / TEXTS))
    with np.load(prepared / VECTORS) as stored:
        original = dict(stored)
    encoder = read_encoder(folder)
    vectors = texts.encode(encoder, prepared / PAIRS)
    metrics = {
        **measure(vectors, original, read_all(prepared / PAIRS)),
        "speed": speed_ratio(encoder, read_encoder(prepared / MODEL), texts.descriptions),
        "onnx": _measure_in_onnx_runtime(home, row.name, texts.descriptions, vectors["descriptions"]),
    }
    fit = _PLAIN
    if row.is_compressed:
        fit = read_json(folder.with_suffix(".json"))["tables"][0]["fit"]
    options = {name: value for name, value in fit["options"].items() if name != "words_per_width"}
    weights, before = (
        sum(file.stat().st_size for file in place.glob("*.safetensors"))
        for place in (folder, prepared / MODEL)
    )
    # What is not the table takes as much in all models.
    table = weights - before + table_bytes(prepared / MODEL)
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


def _measure_in_onnx_runtime(
    home: Path, row: str, sentences: Sequence[str], vectors: np.ndarray
) -> dict[str, float] | None:
    """Return the size of the exported model, its difference from the vectors of PyTorch ``(N, D)``, and its
    speed relative to the original; None, with a line that says why, where it is not exported as a whole.
    """
    encoders = []
    for folder in (model_folder(home, row), model_folder(home, ORIGINAL)):
        file = folder.with_suffix(".onnx")
        try:
            if not file.is_file() or file.stat().st_mtime < (folder / WEIGHTS).stat().st_mtime:
                places: list[str | Path] = ["--model", folder, "--output", file]
                run_command(COMMAND, ["export", *places, "--format", "onnx", "--force"])
            encoders.append(read_onnx(file, folder))
        except FileNotFoundError:
            raise UserError(f"{folder}: no model; run train.sh {ORIGINAL}") from None
        except (UserError, SystemExit):
            encoders.append(None)
    exported, original = encoders
    if exported is None or original is None:
        print(f"{row}: not run in ONNX Runtime: export wrote no file with the whole encoder", flush=True)
        return None
    difference = np.abs(exported.encode(sentences[:_COMPARED]) - vectors[:_COMPARED]).max()
    return {
        "bytes": model_folder(home, row).with_suffix(".onnx").stat().st_size,
        "difference": float(difference),
        "speed": speed_ratio(exported, original, sentences),
    }


def evaluate_decoder(home: Path, row: ShrinkRow) -> None:
    """As `evaluate_encoder`, for a decoder; a row whose result is of the same files is not measured again."""
    folder, source = model_folder(home, row.name), home / "data" / row.decoder
    windows = windows_file(home, row.decoder)
    known = find_result(home, row.name) or {}
    checksums = {"model": sha256(folder / WEIGHTS), "windows": sha256(windows)}
    if known.get("checksums") == checksums:
        print(f"{row.name}: up to date", flush=True)
        return
    original = Predictions(windows.with_suffix(".json"), {**checksums, "model": sha256(source / WEIGHTS)})
    ours = Predictions(folder.with_suffix(".windows.json"), checksums)
    if checksums == original.checksums:
        ours = original
    with np.load(windows) as stored:
        texts = {text: torch.from_numpy(array) for text, array in stored.items()}
    original.add(source, texts)
    ours.add(folder, texts)
    fit, table, shape = _PLAIN, table_bytes(source), read_json(source / "config.json")
    if row.is_compressed:
        report = read_json(folder.with_suffix(".json"))["tables"][0]
        fit, table = report["fit"], report["stored_bytes"]["after"]
    asked = {"calibration": row.calibration, "only_text": row.only_text, "recover": row.recover}
    path = write_result(
        home,
        row.name,
        config={
            "trim": row.trim,
            **({"peer": row.peer} if row.peer else {"given": row.embedding, **asked}),
            "embedding": {"method": fit["method"]},
        },
        counts={
            "weights": shape["vocab_size"] * shape["hidden_size"],
            # A folder of a peer holds decoded numbers.
            "folder_bytes": None if row.peer else bytes_on_disk(folder),
            "folder_bytes_before": bytes_on_disk(source),
            "stored_bits": 8 * table,
        },
        metrics={"texts": ours.compare(original), "relative_error": fit["relative_error"]},
        data_checksum=checksums["windows"],
        checksums=checksums,
    )
    print(f"{row.name}: wrote {path}", flush=True)
    if ours is not original:
        ours.path.unlink()


def write_report(rows: Mapping[str, ShrinkRow], results: Path, readme: Path) -> None:
    """Put the results of the rows into a README, and draw the figure next to it."""
    records = {record["row"]: record for record in read_results(results)}
    encoders: list[Record] = []
    decoders: list[Record] = []
    of_static: list[Record] = []
    for name, row in rows.items():
        config = {"trim": row.trim, "embedding": row.embedding or {"method": "standard"}}
        record = records.get(name, {"row": name, "config": config, "counts": {}, "metrics": {}})
        (decoders if row.decoder else of_static if row.static else encoders).append(record)
    update_readme(readme, MARKER, table(encoders))
    if of_static:
        update_readme(readme, STATIC, static_table(of_static))
    if decoders:
        update_readme(readme, DECODERS, decoder_table(decoders))
        draw_decoders(decoders, readme.with_name(DECODER_PICTURE))
    draw([record for record in encoders if record["metrics"]], readme.with_name(PICTURE))
    print(f"wrote the results into {readme}")


def table(records: Sequence[Record]) -> str:
    """Return the Markdown table of all rows of the encoder."""
    original: Record = next((row["counts"] for row in records if row["row"] == ORIGINAL), {})
    sets = next((list(record["metrics"]["rho"]) for record in records if record["metrics"]), [])

    def replaced(record: Record) -> str:
        method = str(record["config"]["embedding"]["method"])
        return "plain" if method == "standard" else f"{method}, {describe_options(record)}"

    columns = [
        Column("row", lambda r: r["row"], always=True),
        Column("table", replaced),
        Column("words", number("{:,}", "counts", "words")),
        Column("folder, MB", number("{:.1f}", "counts", "folder_bytes", factor=1e-6)),
        Column("table, MB", number("{:.2f}", "counts", "stored_bits", factor=1 / 8e6)),
        Column("table smaller", lambda r: f"{original['stored_bits'] / r['counts']['stored_bits']:.1f}x"),
        *quality_columns(sets),
        Column("speed", number("{:.2f}x", "metrics", "speed")),
        Column("ONNX, MB", number("{:.1f}", "metrics", "onnx", "bytes", factor=1e-6)),
        Column("ONNX, difference", number("{:.0e}", "metrics", "onnx", "difference")),
        Column("ONNX, speed", number("{:.2f}x", "metrics", "onnx", "speed")),
    ]
    return markdown_table(records, columns)


def higher(text: str, record: Record) -> str:
    """Return how much higher the perplexity of a text is, maybe +0.0 %; of an original its own."""
    if not series(record):
        return f"{record['metrics']['texts'][text]['perplexity']:.1f}"
    rise = loss(record, text)
    return f"{round(rise, 1) + 0.0:+.1f} %" if rise < _MOST_LOSS else f"> {_MOST_LOSS} %"


def worst_language(record: Record) -> str:
    """Return the language whose perplexity rises most, and how much; KeyError without languages."""
    languages = [text for text in record["metrics"]["texts"] if text not in NO_LANGUAGE and series(record)]
    name = max(languages, key=partial(loss, record), default="")
    return f"{name} {higher(name, record)}"


def decoder_table(records: Sequence[Record]) -> str:
    """Return the Markdown table of the measured rows of decoders, and the names of the others."""
    done = [record for record in records if "texts" in (record.get("metrics") or {})]
    columns = [
        Column("row", lambda r: r["row"], always=True),
        Column("bits a weight", lambda record: f"{bits_a_weight(record):.2f}"),
        Column("table, MB", number("{:.1f}", "counts", "stored_bits", factor=1 / 8e6)),
        Column("folder, MB", number("{:.1f}", "counts", "folder_bytes", factor=1e-6)),
        Column("greedy kept", number("{:.1f} %", "metrics", "texts", "wikitext2", "kept", factor=100)),
        Column("worst language", worst_language),
        *(
            Column(TITLES.get(text, text), partial(higher, text))
            for text in dict.fromkeys(text for record in done for text in record["metrics"]["texts"])
        ),
    ]
    others = ", ".join(f"`{record['row']}`" for record in records if record not in done)
    return markdown_table(done, columns, NONE) + (f"\nNot run: {others}." if others else "")


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw quality of the measured rows against the bytes of the table, a panel per metric, as PNG."""
    shown = [
        {**record, "metrics": {key: 100 * record["metrics"][key] for key in PANELS}} for record in records
    ]
    plain = [record for record in shown if shown_method(record) == PLAIN]
    others = [record for record in shown if record not in plain]
    figure, panels = new_figure(len(PANELS), "A sentence encoder with a smaller table", shared=False)
    for axes, (metric, title) in zip(panels, PANELS.items(), strict=True):
        draw_lines(axes, others, metric)
        draw_points(axes, shown, metric, lambda row: row["row"].replace("_", " ") if row in plain else "")
        axes.set_ylabel(f"{title} (%)")
    finish(figure, panels, path)


def draw_decoders(records: Sequence[Record], path: Path) -> None:
    """Draw decoders at the bits of a weight as lines from their best to their worst text, as PNG.

    A panel for each original; rows without texts in other languages and those of many bits are left out.
    """
    measured = [record for record in records if has_languages(record)]
    shown = [record for record in measured if series(record) and bits_a_weight(record) < _MOST_BITS]
    shown.sort(key=bits_a_weight)
    of_decoder = {name: [row for row in shown if row["row"].startswith(name)] for name in DECODER_NAMES}
    of_decoder = {name: rows for name, rows in of_decoder.items() if rows}
    if not of_decoder:
        return
    figure, panels = new_figure(len(of_decoder), "Decoders with a smaller table", False, 1)
    figure.set_figwidth(9)
    for axes, (name, rows) in zip(panels, of_decoder.items(), strict=True):
        for record in rows:
            look, bits = numbered_style(SERIES.index(series(record))), bits_a_weight(record)
            near = [other for other in rows if abs(bits_a_weight(other) - bits) < 0.2]
            place = bits + _APART * (near.index(record) - (len(near) - 1) / 2)
            losses = [drawn_loss(record, text) for text in record["metrics"]["texts"]]
            axes.plot([place] * 2, [min(losses), max(losses)], **look, markersize=4)
            where: Any = {"textcoords": "offset points", "rotation": 90, "ha": "center", "va": "bottom"}
            axes.annotate(
                label(record), (place, max(losses)), (0, 5), **where, fontsize=8, color=look["color"]
            )
        axes.set_yscale("log")
        axes.set_ylim(top=90 * axes.get_ylim()[1])  # for the names
        axes.yaxis.set_major_formatter("{x:g} %")
        axes.set_ylabel(f"higher perplexity, best to worst text ({LEAST_LOSS:g} to {_MOST_LOSS} %)")
        axes.set_title(DECODER_NAMES[name], fontsize=10)
        axes.grid(alpha=0.3, linewidth=0.6)
    panels[-1].set_xlabel("bits of a weight, all counted; about equal ones side by side")
    write_png(figure, path)


def series(record: Record) -> str:
    """Return a record's series in the picture of decoders; empty for originals."""
    config = record["config"]
    if config["embedding"]["method"] == "standard":
        return ""
    if "peer" in config:
        return str(config["peer"]["package"])
    if config["given"].get("codec") != "spectral":
        return "rounded" if config["calibration"] == "none" else "for a runtime"
    if config.get("recover"):
        return "recovered"
    if config["calibration"] == "none":
        return "not calibrated"
    return "only the text" if config.get("only_text") else "default"


def label(record: Record) -> str:
    """Return how the table of a row was made: options of `compress`, or a type of another package."""
    config, name = record["config"], series(record)
    if "peer" in config:
        package, kind = config["peer"].values()
        return f"{PEERS.get(package, package)} {kind}, rounded"
    bits = f"{config['given']['bits']:g}"
    if name == "rounded":
        return f"rounded to {bits} bits"
    if name == "for a runtime":
        runtime, _, grid = record["row"].partition("_for_")[2].partition("_")
        return f"--for llama.cpp {grid.upper()}" if runtime == "llama" else f"--for {runtime} {grid}"
    recover = f" --recover {config.get('recover') or 0:g}min"
    options = {"only the text": " --only-text", "not calibrated": " --calibration none", "recovered": recover}
    return f"--bits {bits}{options.get(name, '')}"


def bits_a_weight(record: Record) -> float:
    """Return the bits of codes and scales for each number of the table."""
    return float(record["counts"]["stored_bits"] / record["counts"]["weights"])


def has_languages(record: Record) -> bool:
    """Return whether a row was measured in other languages, too."""
    return "German" in record["metrics"].get("texts", ())


def drawn_loss(record: Record, text: str) -> float:
    """Return the `loss` that pictures show, within the limits of their axes."""
    return min(max(LEAST_LOSS, loss(record, text)), _MOST_LOSS)


def loss(record: Record, text: str) -> float:
    """Return by how many percent a decoder has a higher perplexity than the original."""
    result = record["metrics"]["texts"][text]
    return float(100 * (result["perplexity"] / result["original_perplexity"] - 1))
