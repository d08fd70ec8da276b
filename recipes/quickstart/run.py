"""Train a plain and several compressed translation models on a synthetic corpus, and compare them.

All output is in ``runs/quickstart/SOURCE-TARGET``; models with the same settings and data are not trained
again.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from recipes.common.plot import quality_size_plot
from recipes.common.recipe import Recipe, Row
from recipes.common.results import BASELINE, SMOKE_FOLDER, find_result, read_results
from recipes.common.table import markdown_table
from recipes.common.tools import (
    LINES,
    RUNNING,
    SMOKE,
    SMOKE_HELP,
    TEST_LINES,
    checksums_of,
    read_json,
    read_lines,
    run_command,
    run_step,
    write_json,
    write_yaml,
)
from recipes.quickstart.corpus import SIZES, Pair, WordTokenizer, make_corpus, write_corpus
from recipes.translation.train import data_options, evaluate, train_row
from shared_embeddings.utils.command_line import Parser, positive
from shared_embeddings.utils.files import locked, remove, write_lines
from shared_embeddings.utils.paths import output_path

TRANSLATION = "test.translation"
SMOKE_DEFAULTS = {
    **{"train": LINES, "valid": TEST_LINES, "test": TEST_LINES},
    **{"steps": 20, "rows": "standard,funnel"},
}
COLUMNS = ("row", "embedding", "smaller", "total", "bleu", "difference", "speed")
# Files and packages that determine the text, in addition to the settings.
SOURCES = [Path(__file__).with_name(name) for name in ("corpus.py", "templates.yaml")]
PACKAGES = ("babel", "num2words", "sacremoses")


@dataclass(frozen=True)
class Quickstart(Recipe):
    """The recipe with a folder for a pair of languages, and maybe another number of training steps."""

    output: Path = Path()
    steps: int | None = None

    @property
    def home(self) -> Path:
        return self.output

    def rows_named(self, names: str | None) -> list[Row]:
        """Return the rows with these comma-separated names (default: all), baseline first."""
        wanted = set(names.split(",")) if names else self.rows.keys()
        rows = [self.row(name) for name in sorted(wanted, key=lambda name: (name != BASELINE, name))]
        if not self.steps:
            return rows
        shorter = {"train_steps": self.steps, "save_checkpoint_steps": self.steps}
        limits = {name: min(self.steps, rows[0].train[name]) for name in ("valid_steps", "report_every")}
        return [replace(row, train={**row.train, **shorter, **limits}) for row in rows]


def prepare(recipe: Recipe, languages: Pair, sizes: dict[str, int], seed: int) -> None:
    """Create the corpus, also as words, and the joint vocabulary unless they are up to date."""
    folder, step_folder = recipe.data, recipe.data / "steps"
    names = [f"{part}.{language}" for part in sizes for language in languages]
    texts, words = [folder / "text" / name for name in names], [folder / name for name in names]
    vocabulary = folder / "vocabulary"

    def write_text() -> None:
        parts = make_corpus(*languages, sizes, seed)
        write_corpus(parts, folder / "text", *languages)
        for side, language in enumerate(languages):
            split = WordTokenizer(language).split
            for part, pairs in parts.items():
                write_lines(folder / f"{part}.{language}", (" ".join(split(pair[side])) for pair in pairs))

    def build_vocabulary() -> None:
        config, log = folder / "vocabulary.yaml", folder / "vocabulary.log"
        train = {"path_src": str(words[0]), "path_tgt": str(words[1])}
        shared = {"src_vocab": str(vocabulary), "tgt_vocab": str(vocabulary), "share_vocab": True}
        samples = {"n_sample": -1, "save_data": str(folder / "samples")}
        write_yaml(config, {"data": {"train": train}, **shared, **samples})
        run_command("onmt_build_vocab", ["-config", config, "-overwrite"], log)

    settings = {"source": languages[0], "target": languages[1], "seed": seed, "sizes": sizes}
    versions = {package: metadata.version(package) for package in PACKAGES}
    run_step(step_folder, "corpus", SOURCES, [*texts, *words], write_text, **settings, versions=versions)
    run_step(step_folder, "vocabulary", words[:2], [vocabulary], build_vocabulary)
    entries = {"kind": "words", "vocabulary": len(read_lines(vocabulary))}
    checksums = checksums_of(folder, [*texts, *words, vocabulary])
    write_json(folder / "data.json", {**settings, **entries, **checksums})


def train(recipe: Recipe, row: Row) -> None:
    """Train a row unless its model has the same settings and data."""
    description, run = recipe.describe_data(recipe.data), recipe.home / row.name
    log = read_json(run / "training.json") or {}
    settings = {**row.train, "embedding": row.embedding}
    if (log.get("settings"), log.get("data_checksum")) != (settings, description["checksum"]):
        shutil.rmtree(run, ignore_errors=True)
    if (run / TRANSLATION).exists():
        print(f"{row.name}: up to date", flush=True)
        return
    data = data_options(recipe.data, description, row)
    train_row(row, run, data, description["checksum"], [], run / "train.output")


def translate(recipe: Recipe, row: Row) -> None:
    """Translate and score the test set with the model of a row unless that was done."""
    run = recipe.home / row.name
    if find_result(recipe.home, row.name) is None or not (run / TRANSLATION).exists():
        evaluate(recipe, row, [], run / "translate.output")


def run_rows(recipe: Recipe, rows: Sequence[Row], work: Callable[[Recipe, Row], None], at_once: int) -> None:
    """Do a step of all rows, some at a time, and print how far they are; after a failure, stop the others."""
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(work, recipe, row) for row in rows]
        try:
            pending = set(futures)
            while pending:
                done, pending = wait(pending, 10.0, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                for row, future in zip(rows, futures, strict=True):
                    log = recipe.home / row.name / "train.log"
                    if future in pending and log.is_file():
                        steps = re.findall(r"Step\s+(\d+)/\s*\d+;.*?(\d+) tok/s", log.read_text("utf-8"))
                        if steps:
                            number, speed = steps[-1]
                            total = row.train["train_steps"]
                            print(f"{row.name}: step {number} of {total}, {speed} tokens/s", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(RUNNING):
                process.terminate()
            raise


def show(recipe: Recipe, rows: Sequence[Row]) -> None:
    """Print the table and example translations, and plot quality over size."""
    names = [row.name for row in rows]
    results = {record["row"]: record for record in read_results(recipe.home)}
    records = [results[name] for name in names]
    data = recipe.describe_data(recipe.data)
    texts = {name: read_lines(recipe.home / name / TRANSLATION) for name in names}
    source, target = (
        read_lines(recipe.data / "text" / f"test.{data[side]}") for side in ("source", "target")
    )
    print(f"\n{side_by_side(source, target, texts, count=4)}\n")
    print(markdown_table(records, COLUMNS), flush=True)
    picture = recipe.home / "quality_size.png"
    quality_size_plot(records, picture, "bleu", "Quickstart: a generated corpus")
    print(f"quality against size: {picture}")


def side_by_side(
    sources: Sequence[str], references: Sequence[str], translations: Mapping[str, Sequence[str]], count: int
) -> str:
    """Show `count` sentences: source, reference and translations; ``=`` marks those equal to the reference.

    Up to half of them are translated correctly by every model.
    """
    numbers = range(len(references))
    wrong = [n for n in numbers if any(lines[n] != references[n] for lines in translations.values())]
    right = [number for number in numbers if number not in set(wrong)][: count // 2]
    width = max(len(name) for name in [*translations, "reference"])
    blocks = []
    for number in sorted([*right, *wrong[: count - len(right)]]):
        lines = [f"{'source':<{width}}  {sources[number]}", f"{'reference':<{width}}  {references[number]}"]
        for name, texts in translations.items():
            mark = "=" if texts[number] == references[number] else " "
            lines.append(f"{name:<{width}} {mark}{texts[number]}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare the data, train and evaluate the models that are not up to date, and show all of them."""
    import torch

    started, default = time.monotonic(), recipe.home
    parser = Parser("quickstart", description=__doc__.split("\n")[0])
    parser.add_argument("--source", default="en", help="source language, a CLDR name (default: %(default)s)")
    parser.add_argument("--target", default="de", help="target language, a CLDR name (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the corpus (default: %(default)s)")
    for part, size in SIZES.items():
        parser.add_argument(
            f"--{part}", type=positive, default=size, help=f"sentence pairs in {part} (default: %(default)s)"
        )
    parser.add_argument("--rows", help=f"comma-separated models (default: {','.join(recipe.rows)})")
    parser.add_argument("--steps", type=positive, help="training steps (default: of the row)")
    parser.add_argument("--jobs", type=positive, help="concurrent trainings (default: one per core)")
    parser.add_argument(
        "--output", type=output_path, default=default, help="output folder (default: %(default)s)"
    )
    parser.add_argument("--fresh", action="store_true", help="delete previous output and start over")
    parser.add_argument(
        SMOKE, action="store_true", help=f"{SMOKE_HELP}, and train two models for a few steps"
    )
    if SMOKE in arguments:
        parser.set_defaults(**SMOKE_DEFAULTS, output=default / SMOKE_FOLDER)
    options = parser.parse_args(arguments)
    languages = (options.source, options.target)
    pair = Quickstart(
        recipe.folder, output=options.output.absolute() / "-".join(languages), steps=options.steps
    )
    rows = pair.rows_named(options.rows)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Two trainings with one thread each are faster than one with two threads; such small models are not
    # faster with more than four.
    at_once = min(options.jobs or cores, len(rows))
    threads = max(1, min(4, cores // at_once))
    os.environ |= {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(threads)
    with locked(pair.home / "lock"):
        if options.fresh:
            for path in pair.home.iterdir():
                if path.name != "lock":
                    remove(path)
        prepare(pair, languages, {part: getattr(options, part) for part in SIZES}, options.seed)
        print(f"training {', '.join(row.name for row in rows)}: {at_once} at once", flush=True)
        run_rows(pair, rows, train, at_once)
        run_rows(pair, rows, translate, at_once)
        show(pair, rows)
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    print(f"finished in {minutes}:{seconds:02} min; results, logs and models: {pair.home}")
