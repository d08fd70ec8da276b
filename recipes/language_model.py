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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lm.data.corpus import VOCABULARY, load_corpus
from lm.data.datasets import SOURCES, locate
from lm.data.vocabulary import EOS
from recipes.common.recipe import Recipe, Row, parse_row
from recipes.common.results import write_result
from recipes.common.smoke import CLASSES, LINES, SMOKE, SMOKE_HELP, TEST_LINES, generated_words, sentence
from recipes.common.tools import (
    Segment,
    fit_model,
    kept_segments,
    parse_settings,
    peak_memory_of_children,
    read_json,
    run_module,
    run_step,
    with_overrides,
    write_json,
    write_yaml,
)
from shared_embeddings.utils import reading
from shared_embeddings.utils.command_line import environment_number
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import locked, remove_leftovers, write_lines
from shared_embeddings.words.classes import make_classes, regroup

SMALL = "small"
LAST, BEST = "last.pt", "best.pt"
# Options of lm_train and lm_evaluate that the scripts set.
OWN_OPTIONS = {
    "train": ("config", "data", "embedding", "output_dir"),
    "eval": ("data", "model", "output", "split"),
}
PREPROCESS_USAGE = """usage: preprocess.sh [{choices}]

Prepares texts from $DATA_DIR/{folder} or from the network, and semantic word classes, in $RUNS/{recipe}/data.
Steps that are up to date are skipped.
"""
SMALL_USAGE = "  small    prepare $DATA_DIR/{folder} in $RUNS/{recipe}/data_small, for the rows small_*"
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
    classes: Mapping[str, Any]
    small: str | None = None


def read_settings(recipe: Recipe) -> DataSettings:
    """Read the settings of the recipe's data."""
    where, content = recipe.data_settings()
    settings = parse_settings(where, DataSettings, content)
    for key in ("dataset", SMALL):
        value = getattr(settings, key)
        if value is not None and value not in SOURCES:
            raise UserError(f"{where}: {key} is {value!r}; it may be {', '.join(SOURCES)}")
    for name, each in settings.classes.items():
        parse_settings(f"{where}: classes {name}", ClassSettings, each)
    return settings


def preprocess(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare the data of a recipe: its texts and class files, those of its small rows, or generated ones."""
    settings, downloads = read_settings(recipe), recipe.home / "downloads"
    command = ["-downloads", str(downloads), "-force"]
    if arguments and arguments[0] in ("-h", "--help"):
        names = {"folder": SOURCES[settings.dataset].folder, "recipe": recipe.name}
        choices, lines = SMOKE, [f"  {SMOKE}  {SMOKE_HELP}"]
        if settings.small is not None:
            choices = f"{SMALL} | {SMOKE}"
            small = SMALL_USAGE.format(folder=SOURCES[settings.small].folder, recipe=recipe.name)
            lines.insert(0, small)
        print("\n".join([PREPROCESS_USAGE.format(choices=choices, **names), *lines]))
        raise SystemExit(0)
    if list(arguments) == [SMALL]:
        if settings.small is None:
            raise UserError(f"{recipe.name} has no {SMALL} data; small rows use the data of preprocess.sh")
        output = recipe.home / f"data_{SMALL}"
        run_module("lm.data.prepare", ["-dataset", settings.small, "-output", output, *command])
    elif list(arguments) == [SMOKE]:
        recipe = recipe.smoke()
        texts = write_smoke_corpus(settings.dataset, recipe.home / "raw")
        named: list[str | Path] = [part for split, path in texts.items() for part in (f"-{split}", path)]
        run_module("lm.data.prepare", [*named, "-output", recipe.data, "-force"])
        classes = {name: {"num_classes": CLASSES, "epochs": 1} for name in settings.classes}
        _make_class_files(recipe, [texts["train"]], classes)
    elif not arguments:
        run_module("lm.data.prepare", ["-dataset", settings.dataset, "-output", recipe.data, *command])
        data_dir = os.environ.get("DATA_DIR")
        found = locate(settings.dataset, Path(data_dir) if data_dir else None, downloads)["train"]
        _make_class_files(recipe, found, settings.classes)
    else:
        given = " ".join(arguments)
        raise UserError(f"{given!r} is not an argument of preprocess.sh; see preprocess.sh --help")


def _make_class_files(recipe: Recipe, texts: Sequence[Path], classes: Mapping[str, Any]) -> None:
    """Create class files unless they are up to date; files with equal epochs share word vectors."""
    trained: dict[int, Path] = {}
    vocabulary = recipe.data / VOCABULARY
    for name, settings in classes.items():
        output, epochs = recipe.home / name, settings["epochs"]
        first = trained.setdefault(epochs, output)
        make, inputs = partial(make_classes, texts, vocabulary, epochs=epochs), [*texts, vocabulary]
        if output != first:
            make, inputs = partial(regroup, first), [first]
        make = partial(make, num_classes=settings["num_classes"], output=output, force=True)
        run_step(recipe.data / "steps", output.stem, inputs, [output], make, **settings)


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


def check_options(options: Sequence[str], step: str) -> None:
    """Raise `UserError` for an option that the script of a step sets."""
    for option in options:
        name = option.lstrip("-").partition("=")[0]
        if option.startswith("-") and name in OWN_OPTIONS[step]:
            raise UserError(f"-{name} is set by the row and $RUNS; remove it")


def is_first_process() -> bool:
    """Return whether this is the only process, or the first one of torchrun."""
    return environment_number("RANK", 0) == 0


def data_folder(recipe: Recipe, row: Row) -> Path:
    """Return the folder of the prepared data of a row."""
    return recipe.home / str(row.data.get("folder", "data"))


def train_command(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Train the row of the command line."""
    recipe, row, options = parse_row(recipe, TRAIN_USAGE, arguments)
    check_options(options, "train")
    train(recipe, row, options)


def train(recipe: Recipe, row: Row, options: Sequence[str]) -> None:
    """Train a row with options of ``lm_train``; with ``finetune``, a second time from the best model."""
    checksum = recipe.describe_data(data_folder(recipe, row))["checksum"]
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
            embedding = recipe.with_files(row.embedding, recipe.home)
            counts, text = data_folder(recipe, row) / "vocabulary.tsv", run / "train.txt"
            if row.fit.get("calibrate"):
                write_training_text(data_folder(recipe, row), text)
            fit_model(teacher, embedding, counts, [text], row.train.get("seed", 0), run / BEST, row.fit)
            segment["ended"] = time.time()
            _write_log(run, [segment], checksum, options)


def write_training_text(data: Path, output: Path) -> None:
    """Write the training tokens of prepared data as lines of words."""
    corpus = load_corpus(data)
    text = " ".join(corpus.vocabulary.words[token] for token in corpus.train)
    write_lines(output, [line.strip() for line in text.split(EOS)])


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
    own = {
        "data": str(data_folder(recipe, row)),
        "output_dir": str(folder),
        "embedding": recipe.with_files(row.embedding, recipe.home),
    }
    write_yaml(folder / "settings.yaml", {**own, **settings})
    arguments = ["-config", str(folder / "settings.yaml"), *options]
    if not is_first_process():
        run_module("lm.train.command", arguments)
        return

    def saved() -> float | None:
        return (folder / LAST).stat().st_mtime if (folder / LAST).exists() else None

    with locked(folder / "lock") as lock:
        log = read_json(folder / "training.json") or {"segments": []}
        before = saved()
        segments = kept_segments(log["segments"], before)
        segment: Segment = {"started": time.time(), "ended": None}
        _write_log(folder, [*segments, segment], checksum, options)
        run_module("lm.train.command", arguments, keep_open=[lock])
        remove_leftovers(folder / "settings.yaml", folder / "training.json")  # of killed processes
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


def eval_command(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Evaluate the row of the command line."""
    recipe, row, options = parse_row(recipe, EVAL_USAGE, arguments)
    check_options(options, "eval")
    if is_first_process():
        print(f"results: {evaluate(recipe, row, options)}")


def evaluate(recipe: Recipe, row: Row, options: Sequence[str]) -> Path:
    """Evaluate a trained row on both texts with these options of ``lm_evaluate``; return the results file."""
    data, run = data_folder(recipe, row), recipe.home / row.name
    checksum = recipe.describe_data(data)["checksum"]
    folders = trained_folders(recipe, row)
    logs = [dict(read_json(folder / "training.json") or {}) for folder in folders]
    if any(log["data_checksum"] != checksum for log in logs):
        raise UserError(
            f"{run}: trained on different data than {data} contains now; move it away and train again"
        )
    found = {}
    for split in ("valid", "test"):
        output = run / f"{split}.json"
        own = ["-model", str(folders[-1] / BEST), "-data", str(data), "-split", split]
        own += ["-output", str(output), "-force", *as_options(row.evaluate)]
        run_module("lm.evaluate.command", with_overrides(own, options))
        found[split] = dict(reading.read_json(output))
    test, valid = found["test"], found["valid"]["metrics"]
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
    return write_result(
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


def as_options(settings: dict[str, Any]) -> list[str]:
    """Convert settings to command-line options: ``-name value``, mappings as JSON, true as flags."""
    arguments = []
    for name, value in settings.items():
        if value is not False and value is not None:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            arguments += [f"-{name}"] if value is True else [f"-{name}", text]
    return arguments
