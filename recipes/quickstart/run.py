"""Train a plain and several compressed translation models on a synthetic corpus, and compare them.

All output is in ``runs/quickstart/SOURCE-TARGET``; models with the same settings and data are not trained
again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipes.common.plot import quality_size_plot
from recipes.common.recipe import Recipe
from recipes.common.results import SMOKE_FOLDER, find_result, write_result
from recipes.common.rows import Row
from recipes.common.smoke import LINES, SMOKE, SMOKE_HELP, TEST_LINES
from recipes.common.tools import read_json, read_lines, write_json, write_lines, write_yaml
from recipes.quickstart import report
from recipes.quickstart.corpus import SIZES
from recipes.quickstart.jobs import Job, run_jobs
from recipes.quickstart.languages import Tokenizer
from recipes.quickstart.prepare import CorpusSettings, Data, prepare
from recipes.quickstart.report import scores
from recipes.translation.train import complete_checkpoints, read_speed
from shared_embeddings.utils.command_line import Parser, positive
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import locked
from shared_embeddings.utils.path_options import PathOption

BASELINE = "standard"
EXAMPLES = 4
# Defaults for --smoke.
SMOKE_DEFAULTS = {
    "train": LINES,
    "valid": TEST_LINES,
    "test": TEST_LINES,
    "steps": 20,
    "rows": "standard,funnel",
}
# More threads do not make such small models faster.
MAXIMUM_THREADS = 4


@dataclass(frozen=True)
class Machine:
    """Resources of the commands.

    Attributes:
        at_once: concurrent trainings; two with one thread each are faster than one with two threads.
        threads: threads per training.
        keep_open: file descriptor of the lock, which commands inherit.
    """

    at_once: int
    threads: int
    keep_open: tuple[int, ...]

    def environment(self, threads: int) -> dict[str, str]:
        """Return the environment variables of a command with `threads` threads on the CPU."""
        return {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Model:
    """A row with its data and folder."""

    row: Row
    data: Data
    checksum: str
    folder: Path

    @property
    def name(self) -> str:
        """The name of the row."""
        return self.row.name

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of settings and data."""
        key = json.dumps([asdict(self.row), self.checksum], sort_keys=True)
        return hashlib.sha256(key.encode()).hexdigest()

    @property
    def result(self) -> dict[str, Any] | None:
        """The result of the row, if there is one."""
        return find_result(self.folder.parent, self.name)

    @property
    def training(self) -> Path:
        """The file with the record of a finished training."""
        return self.folder / "training.json"

    @property
    def words(self) -> Path:
        """The file with the tokenized translation of the test set."""
        return self.folder / "test.words"

    @property
    def translation(self) -> Path:
        """The file with the translation of the test set."""
        return self.folder / "test.translation"

    def checkpoint(self) -> Path | None:
        """Return the latest complete checkpoint."""
        found = complete_checkpoints(self.folder)
        return found[-1].path if found else None

    def is_evaluated(self) -> bool:
        """Return whether the results are up to date."""
        return self._is_current(self.result) and self.translation.exists()

    def is_trained(self) -> bool:
        """Return whether the trained model is up to date."""
        return self._is_current(read_json(self.training)) and self.checkpoint() is not None

    def _is_current(self, record: dict[str, Any] | None) -> bool:
        """Return whether a record has the same settings and data."""
        return (record or {}).get("fingerprint") == self.fingerprint


def train(models: Sequence[Model], machine: Machine) -> None:
    """Train models concurrently, with a progress bar each."""
    started = {}
    for model in models:
        shutil.rmtree(model.folder, ignore_errors=True)
        config = model.folder / "train.yaml"
        options = {
            **model.data.training_options(),
            "save_model": str(model.folder / "model"),
            **model.row.train,
            "embedding": model.row.embedding,
        }
        write_yaml(config, options)
        steps = model.row.train["train_steps"]
        job = Job(
            model.name, [_command("onmt_train"), "-config", str(config)], model.folder / "train.log", steps
        )
        started[model.name] = model, job

    def finished(job: Job) -> None:
        model, _ = started[job.name]
        facts = {
            "fingerprint": model.fingerprint,
            "seconds": round(job.seconds, 1),
            "tokens_per_second": round(job.tokens_per_second),
            "peak_memory_mib": job.peak_memory_mib,
        }
        write_json(model.training, facts)
        _print(f"{job.name}: trained in {job.seconds:.0f} s, {job.tokens_per_second:,.0f} tokens/s")

    jobs = [job for _, job in started.values()]
    run_jobs(jobs, machine.at_once, machine.environment(machine.threads), machine.keep_open, finished)


def translate(models: Sequence[Model], machine: Machine) -> dict[str, Job]:
    """Translate the test set with models concurrently; return the jobs by model."""
    jobs = {}
    for model in models:
        config = model.folder / "translate.yaml"
        write_yaml(config, {**model.row.translate, "report_time": True})
        command = [_command("onmt_translate"), "-config", str(config), "-model", str(model.checkpoint())]
        command += ["-src", str(model.data.words("test", model.data.settings.source))]
        command += ["-output", str(model.words), "-transforms", "none"]  # the data are tokenized
        jobs[model.name] = Job(f"{model.name}: translating", command, model.folder / "translate.log")
    environment = machine.environment(machine.threads)
    run_jobs(list(jobs.values()), machine.at_once, environment, machine.keep_open)
    return jobs


def evaluate(model: Model, translating: Job, machine: Machine) -> None:
    """Score the translated test set, and write the result."""
    # Importing torch takes seconds.
    import torch

    from nmt.models import describe_checkpoint

    checkpoint = model.checkpoint()
    assert checkpoint is not None
    target = model.data.settings.target
    lines = [Tokenizer.join(line.split()) for line in read_lines(model.words)]
    result = scores(lines, read_lines(model.data.text("test", target)), target)
    write_lines(model.translation, lines)
    training = read_json(model.training)
    counts = describe_checkpoint(checkpoint)
    del counts["config"]  # all options of training, most of them defaults
    torch.set_num_threads(machine.threads)
    write_result(
        model.folder.parent,
        model.name,
        config={**model.row.settings(), "corpus": asdict(model.data.settings)},
        counts=counts,
        metrics={
            **result,
            "tokens_per_second": read_speed(translating.log),
            "training_seconds": training["seconds"],
            "training_tokens_per_second": training["tokens_per_second"],
        },
        data_checksum=model.checksum,
        peak_memory_mib={
            "training": training["peak_memory_mib"],
            "translation": translating.peak_memory_mib,
        },
        at_once=machine.at_once,
        fingerprint=model.fingerprint,
    )
    _print(f"{model.name}: BLEU {result['bleu']:.1f}")


def _command(name: str) -> str:
    """Return the path of a command in this Python environment."""
    return str(Path(sys.executable).with_name(name))


def _print(text: str) -> None:
    """Print a line immediately, above any progress bars."""
    tqdm.write(text)
    sys.stdout.flush()


def show(models: Sequence[Model], folder: Path) -> None:
    """Print the table and example translations, and plot quality over size."""
    records = [result for model in models if (result := model.result)]
    data = models[0].data
    source, target = data.languages
    texts = {model.name: read_lines(model.translation) for model in models}
    originals = read_lines(data.text("test", source)), read_lines(data.text("test", target))
    _print("\n" + report.side_by_side(*originals, texts, EXAMPLES))
    _print("\n" + report.table(records))
    picture = folder / "quality_size.png"
    quality_size_plot(records, picture, "bleu", "Quickstart: a generated corpus")
    _print(f"quality against size: {picture}")


def rows_to_run(recipe: Recipe, names: str | None, steps: int | None) -> list[Row]:
    """Return the named rows of the recipe (default: all), baseline first.

    Args:
        recipe: the recipe.
        names: comma-separated names.
        steps: training steps that override the configured number.

    Raises:
        UserError: a name is unknown.
    """
    wanted = set(names.split(",")) if names else recipe.rows.keys()
    rows = [recipe.row(name) for name in sorted(wanted, key=lambda name: (name != BASELINE, name))]
    return [_shortened(row, steps) for row in rows] if steps else rows


def _shortened(row: Row, steps: int) -> Row:
    """Return a row with another number of training steps."""
    lengths = {"train_steps": steps, "save_checkpoint_steps": steps}
    for name in ("valid_steps", "report_every"):
        lengths[name] = min(steps, row.train[name])
    return replace(row, train={**row.train, **lengths})


def parse(recipe: Recipe, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    default = recipe.home
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
        "--output", type=PathOption.FOLDER, default=default, help="output folder (default: %(default)s)"
    )
    parser.add_argument("--fresh", action="store_true", help="delete previous output and start over")
    parser.add_argument(
        SMOKE, action="store_true", help=f"{SMOKE_HELP}, and train two models for a few steps"
    )
    if SMOKE in arguments:
        parser.set_defaults(**SMOKE_DEFAULTS, output=default / SMOKE_FOLDER)
    return parser.parse_args(arguments)


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Run the whole recipe."""
    options = parse(recipe, arguments)
    folder = options.output.absolute() / f"{options.source}-{options.target}"
    try:
        with locked(folder / "lock") as lock:
            _run(recipe, options, folder, lock)
    except BlockingIOError:
        raise
    except OSError as error:
        name = error.filename or folder
        raise UserError(f"{name}: {error.strerror}; --output chooses another folder") from error


def _run(recipe: Recipe, options: argparse.Namespace, folder: Path, lock: int) -> None:
    started = time.monotonic()
    rows = rows_to_run(recipe, options.rows, options.steps)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    at_once = min(options.jobs or cores, len(rows))
    machine = Machine(at_once, max(1, min(MAXIMUM_THREADS, cores // at_once)), (lock,))
    if options.fresh:
        _remove_all_but_lock(folder)
    sizes = {part: getattr(options, part) for part in SIZES}
    settings = CorpusSettings(options.source, options.target, options.seed, sizes)
    environment = machine.environment(machine.threads)
    data = prepare(settings, folder / "data", _command("onmt_build_vocab"), environment, machine.keep_open)
    checksum = data.checksum()
    _print(f"{sizes['train']:,} sentence pairs {options.source}-{options.target} in {data.folder}")
    models = [Model(row, data, checksum, folder / row.name) for row in rows]
    _train_and_evaluate(models, machine)
    show(models, folder)
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    _print(f"finished in {minutes}:{seconds:02} min; results, logs and models: {folder}")


def _train_and_evaluate(models: Sequence[Model], machine: Machine) -> None:
    """Train and evaluate models that are not up to date."""
    for model in models:
        if model.is_evaluated():
            _print(f"{model.name}: up to date")
    unfinished = [model for model in models if not model.is_evaluated()]
    untrained = [model for model in unfinished if not model.is_trained()]
    if untrained:
        _print(
            f"training {', '.join(model.name for model in untrained)}: {machine.at_once} at once, "
            f"{machine.threads} {'thread' if machine.threads == 1 else 'threads'} each"
        )
        train(untrained, machine)
    if unfinished:
        _print(f"translating {unfinished[0].data.settings.sizes['test']:,} sentences with each model")
    jobs = translate(unfinished, machine)
    for model in unfinished:
        evaluate(model, jobs[model.name], machine)


def _remove_all_but_lock(folder: Path) -> None:
    """Remove all files of a folder except the lock."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()
