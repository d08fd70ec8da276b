"""The front of the project's README, from results: a sentence, a picture, and tables of what models gain."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from recipes.common.plot import new_figure, numbered_style, write_png
from recipes.common.results import FILE as RESULTS
from recipes.common.results import Record, read_results
from recipes.common.table import NONE, Column, markdown, markdown_table
from recipes.shrink_a_model.models import (
    DECODER_NAMES,
    LEAST_LOSS,
    SERIES,
    TITLES,
    bits_a_weight,
    drawn_loss,
    has_languages,
    higher,
    label,
    loss,
    series,
    worst_language,
)

PICTURE = Path(__file__).with_name("summary.png")
_ADDRESS = "recipes/shrink_a_model/summary.png"
# The rows of Gemma that are shown if they have results in all languages, and those of the sentence.
ROWS = (
    *("original", "gguf_iq4_nl", "for_llama_iq4_nl", "mlx_4bit_64", "for_mlx_4_64"),
    *("spectral_4", "spectral_3", "spectral_2"),
)
_FOUR, _ROUNDED = "gemma_spectral_4", ("gemma_mlx_4bit_64", "gemma_gguf_iq4_nl")
_COLUMNS = (*TITLES, "German", "Python")
# Models in the table of who gains: title, the rows before and after.
_MODELS = (
    ("Gemma 3 270M", "gemma_original", _FOUR),
    ("SmolLM2 135M", "smollm_original", "smollm_spectral_4"),
    ("all-MiniLM-L6-v2", "original", "whole_int4_calibrated"),
    ("WordLlama, a static model", "wordllama_float16", "wordllama_spectral_4"),
)
# Codes of runtimes: their names, and the rows with calibrated codes and with the runtime's rounding to them.
_RUNTIMES = {
    **{f"MLX `{bits}_64`": (f"for_mlx_{bits}_64", f"mlx_{bits}bit_64") for bits in (4, 3, 2)},
    **{
        f"llama.cpp `{kind.upper()}`": (f"for_llama_{kind}", f"gguf_{kind}")
        for kind in ("iq4_nl", "q4_0", "q4_1")
    },
    "transformers `int4`": ("for_transformers_int4", "rows_int4"),
}
# A 7B model in 16 bits that was not measured: its input and output tables, and all of its weights.
_LARGE, _LARGE_TABLES, _LARGE_WEIGHTS = "Mistral 7B", 2 * 32_000 * 4096, 7_241_732_096


def results_by_row() -> dict[str, Record]:
    """Return the measured rows of the recipe by name."""
    return {record["row"]: record for record in read_results(Path(__file__).with_name(RESULTS))}


def whole_bytes(record: Record) -> float:
    """Return the bytes of a model with the table of a row."""
    counts = record["counts"]
    if "folder_bytes_before" not in counts:
        return float(counts["folder_bytes"])
    rest = counts["folder_bytes_before"] - 2 * counts["weights"]  # the folder before has its table in 16 bits
    return float(rest + counts["stored_bits"] / 8)


def measured_rows(records: Mapping[str, Record]) -> list[Record]:
    """Return the rows of Gemma that were measured in all languages: the original, then the largest first."""
    rows = [records[name] for name in (f"gemma_{row}" for row in ROWS) if name in records]
    return sorted(filter(has_languages, rows), key=lambda row: (bool(series(row)), -bits_a_weight(row)))


def best_and_worst(record: Record) -> tuple[str, str]:
    """Return the texts whose perplexity rises least and most."""
    texts = sorted(record["metrics"]["texts"], key=lambda text: loss(record, text))
    return texts[0], texts[-1]


def sentence(records: Mapping[str, Record]) -> str:
    """Return what four bits do to Gemma, and what rounding does to the same table."""
    four, rounded = records[_FOUR], [records[row] for row in _ROUNDED if row in records]
    before, (_, worst) = four["counts"]["folder_bytes_before"] / 1e6, best_and_worst(four)
    rises = [loss(record, text) for record in rounded for text in best_and_worst(record)]
    languages = len([text for text in four["metrics"]["texts"] if text not in _COLUMNS])
    return (
        f"Gemma 3 270M shrinks from {before:.0f} to {whole_bytes(four) / 1e6:.0f} MB, and its perplexity "
        f"rises by at most {loss(four, worst):.1f} % in English, German, Python and {languages} other "
        f"languages; rounded to 4.5 bits by llama.cpp or MLX, by {min(rises):.0f} to {max(rises):.0f} %."
    )


def front(records: Mapping[str, Record]) -> str:
    """Return the sentence, the picture with the sentence as its text, and the table of Gemma."""
    columns = [
        Column("Table", lambda record: label(record) if series(record) else "original, 16 bits"),
        Column("Calibrated", is_calibrated),
        Column("Whole model, MB", lambda record: f"{whole_bytes(record) / 1e6:.0f}"),
        *(Column(TITLES.get(text, text), partial(higher, text)) for text in _COLUMNS),
        Column("Worst language", lambda record: worst_language(record) if series(record) else NONE),
    ]
    text = sentence(records)
    return f"**{text}**\n\n![{text}]({_ADDRESS})\n\n{markdown_table(measured_rows(records), columns, NONE)}"


def is_calibrated(record: Record) -> str:
    """Return whether codes were chosen for predictions: yes or no, or nothing for an original."""
    if not series(record):
        return NONE
    return "no" if "peer" in record["config"] or record["config"]["calibration"] == "none" else "yes"


def gains(records: Mapping[str, Record]) -> str:
    """Return the table of models: the share of their embedding table, their sizes, and what 4 bits cost."""
    titles = ["Model", "Table's share", "Whole model, MB", "With 4 bits", "What it costs"]
    rows = []
    for title, before, after in _MODELS:
        old, new = records[before], records[after]
        if "texts" in new["metrics"]:
            folder, table = new["counts"]["folder_bytes_before"], 2 * new["counts"]["weights"]
            worst = best_and_worst(new)[1]
            cost = f"perplexity at most {higher(worst, new)} ({TITLES.get(worst, worst)})"
        else:
            folder, table = old["counts"]["folder_bytes"], old["counts"]["stored_bits"] / 8
            cost = f"{100 * new['metrics']['top10']:.1f} % of ten nearest texts kept"
        sizes = [f"{folder / 1e6:.1f}", f"{whole_bytes(new) / 1e6:.1f}"]
        rows.append([title, f"{100 * table / folder:.0f} %", *sizes, cost])
    share = f"{100 * _LARGE_TABLES / _LARGE_WEIGHTS:.0f} %"
    large, small = 2e-6 * _LARGE_WEIGHTS, (2 * _LARGE_WEIGHTS - 1.5 * _LARGE_TABLES) / 1e6
    rows.append([_LARGE, share, f"{large:,.0f}", f"{small:,.0f}", "not measured, and not worth it"])
    return markdown(pd.DataFrame(rows, columns=titles), right=titles[1:4])


def runtimes(records: Mapping[str, Record]) -> str:
    """Return the table of runtimes' codes: rises in perplexity with calibrated and with rounded codes."""
    titles = ["Model", "Codes", "Bits", *(TITLES.get(text, text) for text in _COLUMNS), "Worst language"]
    rows = []
    for decoder, title in DECODER_NAMES.items():
        for codes, names in _RUNTIMES.items():
            pair = [records[row] for row in (f"{decoder}_{name}" for name in names) if row in records]
            if len(pair) < 2 or not all(map(has_languages, pair)):
                continue
            cells = [
                [*(higher(text, record) for text in _COLUMNS), worst_language(record)] for record in pair
            ]
            rises = [" / ".join(both).replace(" %", "").replace("+", "") for both in zip(*cells)]
            rows.append([title, codes, f"{bits_a_weight(pair[0]):.2f}", *rises])
    return markdown(pd.DataFrame(rows, columns=titles), right=titles[2:])


def draw_front(records: Mapping[str, Record], path: Path = PICTURE) -> None:
    """Draw a line from the best to the worst text for every size of Gemma, the largest at the top, as PNG."""
    original, *others = measured_rows(records)
    figure, (axes,) = new_figure(1, f"{DECODER_NAMES['gemma']} with a smaller embedding table", False)
    figure.set_size_inches(9, 1.6 + 0.4 * len(others))
    where: Any = {"textcoords": "offset points", "va": "center", "fontsize": 9}
    for place, record in enumerate(others):
        look = numbered_style(SERIES.index(series(record)))
        texts = best_and_worst(record)
        rises = [drawn_loss(record, text) for text in texts]
        axes.plot(rises, [place] * 2, **look, markersize=6)
        for text, rise, distance, side in zip(texts, rises, (-8, 8), ("right", "left"), strict=True):
            note = f"{TITLES.get(text, text)} {higher(text, record)}"
            axes.annotate(note, (rise, place), (distance, 0), **where, ha=side, color=look["color"])
    names = [f"{label(record)}, {whole_bytes(record) / 1e6:.0f} MB" for record in others]
    axes.set_yticks(range(len(others)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(LEAST_LOSS / 8, 400)  # with places for the names
    axes.set_xticks([LEAST_LOSS, 1, 10, 100])
    axes.xaxis.set_major_formatter("{x:g} %")
    before = original["counts"]["folder_bytes_before"] / 1e6
    axes.set_xlabel(f"rise in perplexity over the original of {before:.0f} MB, best to worst of all texts")
    axes.margins(y=0.15)
    axes.grid(alpha=0.3, linewidth=0.6)
    write_png(figure, path)
