"""The steps of recipes for language models: texts and class files, training (maybe under torchrun), scores.

The ``data`` of ``rows.yaml`` has ``dataset``, a name in `lm.data.datasets.SOURCES`, and ``classes``: the
class files for UnClE by name, each with ``num_classes`` and the ``epochs`` of the word vectors. The optional
``small`` names the dataset of rows with ``data: data_small``.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shared_embeddings as se
from lm.adapter import NGRAMS, TrainedLanguageModel
from lm.data.corpus import EOS, VOCABULARY, load_corpus
from lm.data.datasets import SOURCES, locate
from recipes.common.recipe import Recipe, Row, parse_row
from recipes.common.results import write_result
from recipes.common.tools import (
    CLASSES,
    LINES,
    SMOKE,
    SMOKE_HELP,
    TEST_LINES,
    Segment,
    data_dir,
    fit_model,
    generated_words,
    kept_segments,
    peak_memory_of_children,
    read_json,
    run_command,
    run_step,
    sentence,
    with_overrides,
    write_json,
    write_yaml,
)
from shared_embeddings.utils import reading
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import locked, write_lines
from shared_embeddings.utils.options import parse_options
from shared_embeddings.words.classes import make_classes, regroup

SMALL = "small"
LAST, BEST = "last.pt", "best.pt"
TRAIN_USAGE = """usage: train.sh ROW [--smoke] [option of lm_train ...]

Trains ROW in $RUNS/{recipe}/ROW, or resumes its training. Run preprocess.sh first, and train.sh for the
teacher of ROW if it has one. With --smoke, trains a tiny network in $RUNS/{recipe}/smoke/ROW on the data of
preprocess.sh --smoke."""
EVAL_USAGE = """usage: eval.sh ROW [--smoke] [option of lm_evaluate ...]

Evaluates ROW on the validation and the test text and writes a line to $RUNS/{recipe}/results.jsonl. Run
train.sh first; use --smoke for both or neither."""


@dataclass(frozen=True)
class ClassSettings:
    """A class file: the number of classes, and the epochs of the word vectors that they are found with."""

    num_classes: int
    epochs: int


@dataclass(frozen=True)
class DataSettings:
    """The ``data`` in ``rows.yaml``: corpora, and the settings of each class file by name."""

    dataset: str
    classes: dict[str, ClassSettings]
    small: str | None = None


def read_settings(recipe: Recipe) -> DataSettings:
    """Read the settings of the recipe's data."""
    where, content = recipe.data_settings()
    return parse_options(where, DataSettings, content)


def preprocess(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare texts from $DATA_DIR or from the network, and semantic word classes, below $RUNS."""
    settings, downloads = read_settings(recipe), recipe.home / "downloads"
    parser = Parser("preprocess.sh", description=preprocess.__doc__)
    if settings.small is not None:
        what = f"prepare {SOURCES[settings.small].folder} in data_{SMALL}, for the rows {SMALL}_*"
        parser.add_argument("part", nargs="?", choices=[SMALL], help=what)
    parser.add_argument(SMOKE, action="store_true", help=SMOKE_HELP)
    options = parser.parse_args(arguments)
    if options.smoke:
        recipe = recipe.smoke()
        texts = write_smoke_corpus(settings.dataset, recipe.home / "raw")
        named: list[str | Path] = [part for split, path in texts.items() for part in (f"-{split}", path)]
        run_command("lm_prepare", [*named, "-output", recipe.data, "-force"])
        classes = dict.fromkeys(settings.classes, ClassSettings(CLASSES, epochs=1))
        _make_class_files(recipe, [texts["train"]], classes)
        return
    is_small = settings.small is not None and options.part == SMALL
    dataset = str(settings.small) if is_small else settings.dataset
    output = recipe.home / f"data_{SMALL}" if is_small else recipe.data
    places: list[str | Path] = ["-output", output, "-downloads", downloads]
    run_command("lm_prepare", ["-dataset", dataset, *places, "-force"])
    if not is_small:
        train = locate(dataset, data_dir(), downloads)["train"]
        _make_class_files(recipe, train, settings.classes)


def _make_class_files(recipe: Recipe, texts: Sequence[Path], classes: Mapping[str, ClassSettings]) -> None:
    """Create class files unless they are up to date; files with equal epochs share word vectors."""
    trained: dict[int, Path] = {}
    vocabulary = recipe.data / VOCABULARY
    for name, settings in classes.items():
        output = recipe.home / name
        first = trained.setdefault(settings.epochs, output)
        make, inputs = partial(make_classes, texts, vocabulary, epochs=settings.epochs), [*texts, vocabulary]
        if output != first:
            make, inputs = partial(regroup, first), [first]
        make = partial(make, num_classes=settings.num_classes, output=output, force=True)
        run_step(recipe.data / "steps", output.stem, inputs, [output], make, **asdict(settings))


def write_smoke_corpus(dataset: str, folder: Path) -> dict[str, Path]:
    """Write generated text for each split, with the file names and layout of `dataset`.

    The Penn Treebank has lowercase sentences without punctuation, with ``N`` for numbers; the others have
    articles with headings in equals signs, one paragraph per line, and empty lines between them.
    """
    texts = {}
    for seed, (split, name) in enumerate(SOURCES[dataset].files.items()):
        lines = list(generated_words(LINES if split == "train" else 5 * TEST_LINES, seed))
        written = [f" {' '.join(['<unk>', *words, 'N'])} " for words in lines]
        if dataset != "ptb":
            written = []
            for start in range(0, len(lines), 10):
                title, *paragraph = lines[start : start + 10]
                text = " ".join(sentence(words).replace(".", " .") for words in paragraph)
                heading = " ".join(title[:3]).title()
                written += [" ", f" = {heading} = ", " ", f" {text} 3 @.@ 5 <unk> "]
        texts[split] = folder / name
        write_lines(texts[split], written)
    return texts


def is_first_process() -> bool:
    """Return whether this is the only process, or the first one of torchrun."""
    return os.environ.get("RANK", "0") == "0"


def data_folder(recipe: Recipe, row: Row) -> Path:
    """Return the folder of the prepared data of a row."""
    return recipe.home / str(row.data.get("folder", "data"))


def train(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Train the row of the command line; with ``finetune``, a second time from the best model."""
    recipe, row, options = parse_row(recipe, TRAIN_USAGE, arguments)
    data = data_folder(recipe, row)
    checksum = recipe.describe_data(data)["checksum"]
    run = recipe.home / row.name
    settings = dict(row.train)
    if row.teacher is not None:
        try:
            teacher = trained_folders(recipe, recipe.row(row.teacher))[-1] / BEST
        except UserError as error:
            raise UserError(f"{row.name} starts from {row.teacher}; {error}") from error
        settings["embedding_distillation"] = {**(row.distill or {}), "teacher": str(teacher)}
    if row.fit is None:
        _train_stage(recipe, row, run, settings, options, checksum)
        if row.finetune is not None:
            second = {**row.finetune, "init_from": str(run / BEST)}
            _train_stage(recipe, row, run / "finetune", second, (), checksum)
        return
    if options:
        raise UserError(f"{row.name} is fitted, not trained: {options[0]} has no effect; remove it")
    if is_first_process():
        with locked(run / "lock"):
            segment: Segment = {"started": time.time(), "ended": None}
            _write_log(run, [segment], checksum, options)
            text = run / "train.txt"
            if row.fit.get("calibrate"):
                corpus = load_corpus(data)
                words = " ".join(corpus.vocabulary.words[token] for token in corpus.train)
                write_lines(text, [line.strip() for line in words.split(EOS)])
            if row.fit.get("fp8"):
                round_ngrams(teacher, run / BEST)
            else:
                embedding, seed = recipe.with_files(row.embedding, recipe.home), row.train.get("seed", 0)
                fit_model(teacher, embedding, data / VOCABULARY, [text], seed, run / BEST, row.fit)
            segment["ended"] = time.time()
            _write_log(run, [segment], checksum, options)


def round_ngrams(source: Path, output: Path) -> None:
    """Write a copy of a model with its n-grams rounded to FP8 (e4m3), with one scale for all numbers."""
    model = TrainedLanguageModel(source)
    [table] = [part.table for part in model.tables() if part.name == NGRAMS]
    scale = table.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    rounded = (table / scale).to(torch.float8_e4m3fn).float() * scale
    model.place({NGRAMS: se.fit("standard", rounded)[0]})
    model.write(output, model.tensors())


def trained_folders(recipe: Recipe, row: Row) -> list[Path]:
    """Return the folder of each training of a row; the last one has the final model."""
    run = recipe.home / row.name
    folders = [run] if row.finetune is None else [run, run / "finetune"]
    logs = [read_json(folder / "training.json") for folder in folders]
    is_there = (folders[-1] / BEST).exists() and all(logs)
    if not is_there or any(segment["ended"] is None for log in logs if log for segment in log["segments"]):
        raise UserError(f"{run}: training is not complete; run {recipe.command('train.sh', row.name)}")
    return folders


def _train_stage(
    recipe: Recipe, row: Row, folder: Path, settings: dict[str, Any], options: Sequence[str], checksum: str
) -> None:
    """Run ``lm_train`` in `folder`, and write time and memory to ``training.json`` there."""
    places = {
        "data": str(data_folder(recipe, row)),
        "output_dir": str(folder),
        "embedding": recipe.with_files(row.embedding, recipe.home),
    }
    write_yaml(folder / "settings.yaml", {**places, **settings})
    arguments = ["-config", str(folder / "settings.yaml"), *options]
    if not is_first_process():
        run_command("lm_train", arguments)
        return

    def saved() -> float | None:
        return (folder / LAST).stat().st_mtime if (folder / LAST).exists() else None

    with locked(folder / "lock"):
        log = read_json(folder / "training.json") or {"segments": []}
        before = saved()
        segments = kept_segments(log["segments"], before)
        segment: Segment = {"started": time.time(), "ended": None}
        _write_log(folder, [*segments, segment], checksum, options)
        run_command("lm_train", arguments)
        segment["ended"] = time.time()
        # Skip the segment if the run was already finished.
        _write_log(folder, segments if saved() == before else [*segments, segment], checksum, options)


def _write_log(folder: Path, segments: list[Segment], checksum: str, options: Sequence[str]) -> None:
    """Write the log of a training; its seconds are those of finished segments."""
    seconds = sum(part["ended"] - part["started"] for part in segments if part["ended"] is not None)
    before = read_json(folder / "training.json") or {}
    content = {
        "segments": segments,
        "data_checksum": checksum,
        "options": list(options),
        "seconds": round(seconds, 1),
        "peak_memory_mib": max(peak_memory_of_children(), before.get("peak_memory_mib", 0.0)),
    }
    write_json(folder / "training.json", content)


def evaluate(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Evaluate the trained row of the command line on both texts, and write its result."""
    recipe, row, options = parse_row(recipe, EVAL_USAGE, arguments)
    if not is_first_process():
        return
    data, run = data_folder(recipe, row), recipe.home / row.name
    checksum = recipe.describe_data(data)["checksum"]
    folders = trained_folders(recipe, row)
    logs = [dict(read_json(folder / "training.json") or {}) for folder in folders]
    if any(log["data_checksum"] != checksum for log in logs):
        raise UserError(
            f"{run}: trained on different data than {data} contains now; move it away and train again"
        )
    records = {}
    for split in ("valid", "test"):
        output = run / f"{split}.json"
        asked = ["-model", str(folders[-1] / BEST), "-data", str(data), "-split", split]
        asked += ["-output", str(output), "-force", *as_options(row.evaluate)]
        run_command("lm_evaluate", with_overrides(asked, options))
        records[split] = dict(reading.read_json(output))
    test, valid = records["test"], records["valid"]["metrics"]
    log = folders[0] / "train.log"
    text = log.read_text(encoding="utf-8") if log.is_file() else ""
    times = [float(number) for number in re.findall(r"([\d.]+) ms per step", text)]
    names = row.train.keys() | (row.finetune or {}).keys()
    config = {
        **row.settings(),
        "train": {name: test["config"][name] for name in sorted(names) if name in test["config"]},
        "train_options": list(logs[0]["options"]),
        "eval_options": list(options),
    }
    path = write_result(
        recipe.home,
        row.name,
        config={key: value for key, value in config.items() if value and key not in ("average", "finetune")},
        counts=test["counts"],
        metrics={
            **test["metrics"],
            **{f"valid_{name}": value for name, value in valid.items() if name.endswith("perplexity")},
            **({"training_ms": statistics.median(times)} if times else {}),
            "training_seconds": round(sum(log["seconds"] for log in logs), 1),
        },
        data_checksum=checksum,
        device=test["device"],
        peak_memory_mib={
            "training": max(log["peak_memory_mib"] for log in logs),
            "evaluation": test["peak_memory_mib"],
        },
    )
    print(f"results: {path}")


def as_options(settings: dict[str, Any]) -> list[str]:
    """Convert settings to command-line options: ``-name value``, mappings as JSON, true as flags."""
    arguments = []
    for name, value in settings.items():
        if value is not False and value is not None:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            arguments += [f"-{name}"] if value is True else [f"-{name}", text]
    return arguments
