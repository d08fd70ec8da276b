"""Train a plain and several compressed translation models on a synthetic corpus, and compare them.

All output is in ``runs/quickstart/SOURCE-TARGET``; models with the same settings and data are not trained
again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU
from tqdm import tqdm

from recipes.common.plot import quality_size_plot
from recipes.common.recipe import Recipe, Row
from recipes.common.results import SMOKE_FOLDER, find_result, write_result
from recipes.common.smoke import LINES, SMOKE, SMOKE_HELP, TEST_LINES
from recipes.common.table import markdown_table
from recipes.common.tools import checksums_of, read_json, read_lines, run_step, write_json, write_yaml
from recipes.quickstart.corpus import SIZES, Tokenizer, make_corpus, write_corpus
from recipes.translation.train import complete_checkpoints, corpus_scores, read_speed
from shared_embeddings.utils.command_line import Parser, positive
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import locked, write_lines
from shared_embeddings.utils.path_options import PathOption

BASELINE = "standard"
EXAMPLES = 4
# In the folder of a model: the record of a finished training, and the test set as tokens and as text.
TRAINING, WORDS, TRANSLATION = "training.json", "test.words", "test.translation"
SMOKE_DEFAULTS = {
    **{"train": LINES, "valid": TEST_LINES, "test": TEST_LINES},
    **{"steps": 20, "rows": "standard,funnel"},
}
# More threads do not make such small models faster.
MAXIMUM_THREADS = 4
COLUMNS = ("row", "embedding", "smaller", "total", "bleu", "difference", "speed")
# sacreBLEU's default tokenization would treat a sentence in these languages as one word.
UNSPACED_LANGUAGES = ("ja", "th", "zh", "yue", "lo", "km", "my")
# Files and packages that determine the text, in addition to the settings.
SOURCES = [Path(__file__).with_name(name) for name in ("corpus.py", "templates.yaml")]
PACKAGES = ("babel", "num2words", "sacremoses")

# Jobs: a line of onmt_train's log has the step, and the speed on the target side.
_STEP = re.compile(r"Step\s+(\d+)/\s*\d+;.*?/\s*(\d+) tok/s")
_POLL_SECONDS = 0.2
# Interval between reports without a terminal.
_REPORT_SECONDS = 10.0
_LAST_LINES = 12
_BAR = "{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} {rate_fmt}, {remaining} left{postfix}"
_GRACE_SECONDS = 5.0


@dataclass
class Job:
    """A command to run, with its output in a log."""

    name: str
    command: Sequence[str]
    log: Path
    steps: int = 0  # number of steps for the progress bar, which follows "Step n/N" in the log; 0 if unknown
    seconds: float = 0.0  # duration, after the end
    peak_memory_mib: float = 0.0  # largest resident memory, after the end
    speeds: list[int] = field(default_factory=list)  # tokens per second in the log


def run_jobs(
    jobs: Sequence[Job],
    at_once: int,
    environment: dict[str, str],
    keep_open: Sequence[int] = (),
    finished: Callable[[Job], None] = lambda job: None,
) -> None:
    """Run jobs in order, at most `at_once` concurrently; after a failure or interruption, stop the others.

    They inherit the file descriptors `keep_open`, and each successful one is `finished`.
    """
    waiting, running = list(jobs), list[_Process]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                position = min(set(range(at_once)) - {process.position for process in running})
                running.append(_Process(waiting.pop(0), position, environment, keep_open))
            time.sleep(_POLL_SECONDS)
            for process in list(running):
                if process.poll():
                    running.remove(process)
                    finished(process.job)
    finally:
        for process in running:
            process.end()


class _Process:
    """A running job and its progress bar at a line `position`."""

    def __init__(
        self, job: Job, position: int, environment: dict[str, str], keep_open: Sequence[int]
    ) -> None:
        self.job, self.position = job, position
        self._started = self._reported = time.monotonic()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("wb") as log:
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            try:
                self._process = subprocess.Popen(job.command, **streams, env=environment, pass_fds=keep_open)
            except OSError as error:
                raise UserError(f"{job.command[0]}: {error.strerror}; run 'make setup'") from error
        self._reader = job.log.open(encoding="utf-8", errors="replace")
        self._partial = ""
        self._terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=job.steps or None,
            desc=f"{job.name:<24}",
            unit="step",
            position=position,
            leave=False,
            disable=not self._terminal,
            dynamic_ncols=True,
            bar_format=_BAR if job.steps else "{desc} {elapsed}",
        )

    def poll(self) -> bool:
        """Update the progress; return whether the job has succeeded; raise if it failed."""
        ended, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        self._show_progress()
        if not ended:
            return False
        job, self._process.returncode = self.job, os.waitstatus_to_exitcode(status)
        job.seconds = time.monotonic() - self._started
        job.peak_memory_mib = round(usage.ru_maxrss / 1024, 1)
        self.end()
        if self._process.returncode:
            lines = job.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
            print("\n".join(f"  | {line}" for line in lines), file=sys.stderr)
            raise UserError(
                f"{job.name}: {Path(job.command[0]).name} failed with status {self._process.returncode}; "
                f"the last lines of {job.log} are above"
            )
        return True

    def end(self) -> None:
        """Terminate the job if it still runs; kill it after a grace period."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                self._process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._bar.close()
        self._reader.close()

    def _show_progress(self) -> None:
        """Parse steps and speeds in new lines of the log; without a terminal, print a line at intervals."""
        *lines, self._partial = (self._partial + self._reader.read()).split("\n")
        job, now, step = self.job, time.monotonic(), 0
        for found in filter(None, map(_STEP.search, lines)):
            step = int(found[1])
            job.speeds.append(int(found[2]))
        if self._terminal and step:
            self._bar.set_postfix_str(f"{job.speeds[-1]:,} tok/s", refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._terminal and not job.steps:
            self._bar.refresh()
        elif step and (now - self._reported >= _REPORT_SECONDS or step >= job.steps):
            self._reported = now
            left = (now - self._started) * (job.steps - step) / step
            text = f"{job.name}: step {step}/{job.steps}, {job.speeds[-1]:,} tok/s, {left:.0f} s left"
            print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Machine:
    """Resources of the commands."""

    at_once: int  # concurrent trainings; two with one thread each are faster than one with two threads
    threads: int  # threads per training
    lock: int  # file descriptor that commands inherit

    def run(self, jobs: Sequence[Job], finished: Callable[[Job], None] = lambda job: None) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "CUDA_VISIBLE_DEVICES": ""}
        run_jobs(jobs, self.at_once, environment, [self.lock], finished)


@dataclass(frozen=True)
class Data:
    """A corpus in two languages, by their CLDR names, with a seed and as many sentence pairs per split.

    The folder has sentences in ``text/SPLIT.LANGUAGE``, tokenized ones in ``SPLIT.LANGUAGE``, and the joint
    ``vocabulary``.
    """

    folder: Path
    source: str
    target: str
    seed: int
    sizes: dict[str, int]

    @property
    def languages(self) -> tuple[str, str]:
        return self.source, self.target

    def settings(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "folder"}

    def text(self, part: str, language: str) -> Path:
        return self.folder / "text" / f"{part}.{language}"

    def words(self, part: str, language: str) -> Path:
        return self.folder / f"{part}.{language}"

    def files(self) -> list[Path]:
        """Return all files that results depend on, the vocabulary last."""
        sides = [(part, language) for part in self.sizes for language in self.languages]
        texts = [place(*side) for place in (self.text, self.words) for side in sides]
        return [*texts, self.folder / "vocabulary"]

    def checksum(self) -> str:
        found = checksums_of({str(path.relative_to(self.folder)): path for path in self.files()})
        return str(found["checksum"])

    def training_options(self) -> dict[str, Any]:
        corpora = {
            part: {
                f"path_{side}": str(self.words(part, language))
                for side, language in zip(("src", "tgt"), self.languages)
            }
            for part in ("train", "valid")
        }
        vocabulary = str(self.folder / "vocabulary")
        return {"data": corpora, "src_vocab": vocabulary, "tgt_vocab": vocabulary}


def prepare(data: Data, machine: Machine) -> None:
    """Create the data unless they are up to date."""
    folder, (*texts, vocabulary) = data.folder, data.files()
    versions = {package: metadata.version(package) for package in PACKAGES}

    def write_text() -> None:
        parts = make_corpus(*data.languages, data.sizes, data.seed)
        write_corpus(parts, folder / "text", *data.languages)
        for side, language in enumerate(data.languages):
            split = Tokenizer(language).split
            for part, pairs in parts.items():
                write_lines(data.words(part, language), (" ".join(split(pair[side])) for pair in pairs))

    def build_vocabulary() -> None:
        config, options = folder / "vocabulary.yaml", data.training_options()
        options["data"].pop("valid")
        save_data = str(folder / "samples")
        write_yaml(config, {**options, "share_vocab": True, "n_sample": -1, "save_data": save_data})
        command = [_command("onmt_build_vocab"), "-config", str(config), "-overwrite"]
        machine.run([Job("vocabulary", command, folder / "vocabulary.log")])

    step = partial(run_step, folder / "steps")
    step("corpus", SOURCES, texts, write_text, **data.settings(), versions=versions)
    words = [data.words("train", language) for language in data.languages]
    step("vocabulary", words, [vocabulary], build_vocabulary)


@dataclass(frozen=True)
class Model:
    """A row with its data, the SHA-256 of both, and its folder."""

    row: Row
    data: Data
    fingerprint: str
    folder: Path

    @property
    def name(self) -> str:
        return self.row.name

    def checkpoint(self) -> Path | None:
        found = complete_checkpoints(self.folder)
        return found[-1].path if found else None

    def is_evaluated(self) -> bool:
        result = find_result(self.folder.parent, self.name) or {}
        return result.get("fingerprint") == self.fingerprint and (self.folder / TRANSLATION).exists()

    def is_trained(self) -> bool:
        record = read_json(self.folder / TRAINING) or {}
        return record.get("fingerprint") == self.fingerprint and self.checkpoint() is not None


def train(models: Sequence[Model], machine: Machine) -> None:
    """Train models concurrently, with a progress bar each."""
    jobs = []
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
        command = [_command("onmt_train"), "-config", str(config)]
        jobs.append(Job(model.name, command, model.folder / "train.log", model.row.train["train_steps"]))
    by_name = {model.name: model for model in models}

    def finished(job: Job) -> None:
        model, speed = by_name[job.name], sum(job.speeds) / len(job.speeds) if job.speeds else 0.0
        facts = {
            "fingerprint": model.fingerprint,
            "seconds": round(job.seconds, 1),
            "tokens_per_second": round(speed),
            "peak_memory_mib": job.peak_memory_mib,
        }
        write_json(model.folder / TRAINING, facts)
        _print(f"{job.name}: trained in {job.seconds:.0f} s, {speed:,.0f} tokens/s")

    machine.run(jobs, finished)


def translate(models: Sequence[Model], machine: Machine) -> dict[str, Job]:
    """Translate the test set with models concurrently; return the jobs by model."""
    jobs = {}
    for model in models:
        config = model.folder / "translate.yaml"
        write_yaml(config, {**model.row.translate, "report_time": True})
        command = [_command("onmt_translate"), "-config", str(config), "-model", str(model.checkpoint())]
        command += ["-src", str(model.data.words("test", model.data.source))]
        command += ["-output", str(model.folder / WORDS), "-transforms", "none"]  # the data are tokenized
        jobs[model.name] = Job(f"{model.name}: translating", command, model.folder / "translate.log")
    machine.run(list(jobs.values()))
    return jobs


def evaluate(model: Model, translating: Job, machine: Machine) -> None:
    """Score the translated test set, and write the result."""
    # Importing torch takes seconds.
    import torch

    from nmt.models import describe_checkpoint

    checkpoint = model.checkpoint()
    assert checkpoint is not None
    target = model.data.target
    lines = [Tokenizer.join(line.split()) for line in read_lines(model.folder / WORDS)]
    result = scores(lines, read_lines(model.data.text("test", target)), target)
    write_lines(model.folder / TRANSLATION, lines)
    training = read_json(model.folder / TRAINING)
    counts = describe_checkpoint(checkpoint)
    del counts["config"]  # all options of training, most of them defaults
    torch.set_num_threads(machine.threads)
    write_result(
        model.folder.parent,
        model.name,
        config={**model.row.settings(), "corpus": model.data.settings()},
        counts=counts,
        metrics={
            **result,
            "tokens_per_second": read_speed(translating.log),
            "training_seconds": training["seconds"],
            "training_tokens_per_second": training["tokens_per_second"],
        },
        data_checksum=model.data.checksum(),
        peak_memory_mib={
            "training": training["peak_memory_mib"],
            "translation": translating.peak_memory_mib,
        },
        at_once=machine.at_once,
        fingerprint=model.fingerprint,
    )
    _print(f"{model.name}: BLEU {result['bleu']:.1f}")


def scores(hypotheses: Sequence[str], references: Sequence[str], language: str) -> dict[str, Any]:
    """Compute BLEU and chrF; BLEU is over characters for languages without spaces between words."""
    result = corpus_scores(hypotheses, references)
    if language.replace("-", "_").split("_")[0] in UNSPACED_LANGUAGES:
        metric = BLEU(tokenize="char")
        result["bleu"] = metric.corpus_score(list(hypotheses), [list(references)]).score
        result["bleu_signature"] = str(metric.get_signature())
    return result


def _command(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _print(text: str) -> None:
    """Print a line immediately, above any progress bars."""
    tqdm.write(text)
    sys.stdout.flush()


def show(models: Sequence[Model], folder: Path) -> None:
    """Print the table and example translations, and plot quality over size."""
    records = [result for model in models if (result := find_result(folder, model.name))]
    data = models[0].data
    texts = {model.name: read_lines(model.folder / TRANSLATION) for model in models}
    sources, references = (read_lines(data.text("test", language)) for language in data.languages)
    _print("\n" + side_by_side(sources, references, texts, EXAMPLES))
    _print("\n" + table(records))
    picture = folder / "quality_size.png"
    quality_size_plot(records, picture, "bleu", "Quickstart: a generated corpus")
    _print(f"quality against size: {picture}")


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the results as a Markdown table with aligned columns, numbers to the right."""
    markdown = markdown_table(records, COLUMNS).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in markdown]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows[1] = ["-" * width for width in widths]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            cell.rjust(width) if number > 1 and cell[:1] in "+-0123456789" else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


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


def rows_to_run(recipe: Recipe, names: str | None, steps: int | None) -> list[Row]:
    """Return the rows with these comma-separated names (default: all), baseline first.

    `steps` overrides their number of training steps.
    """
    wanted = set(names.split(",")) if names else recipe.rows.keys()
    rows = [recipe.row(name) for name in sorted(wanted, key=lambda name: (name != BASELINE, name))]
    if not steps:
        return rows
    return [
        replace(
            row,
            train={
                **row.train,
                **{"train_steps": steps, "save_checkpoint_steps": steps},
                **{name: min(steps, row.train[name]) for name in ("valid_steps", "report_every")},
            },
        )
        for row in rows
    ]


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
    """Prepare the data, train and evaluate the models that are not up to date, and show all of them."""
    started = time.monotonic()
    rows = rows_to_run(recipe, options.rows, options.steps)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    at_once = min(options.jobs or cores, len(rows))
    machine = Machine(at_once, max(1, min(MAXIMUM_THREADS, cores // at_once)), lock)
    if options.fresh:
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()
    sizes = {part: getattr(options, part) for part in SIZES}
    data = Data(folder / "data", options.source, options.target, options.seed, sizes)
    prepare(data, machine)
    _print(f"{sizes['train']:,} sentence pairs {options.source}-{options.target} in {data.folder}")
    models, unfinished, checksum = [], [], data.checksum()
    for row in rows:
        key = json.dumps([asdict(row), checksum], sort_keys=True)
        model = Model(row, data, hashlib.sha256(key.encode()).hexdigest(), folder / row.name)
        models.append(model)
        if model.is_evaluated():
            _print(f"{model.name}: up to date")
        else:
            unfinished.append(model)
    if untrained := [model for model in unfinished if not model.is_trained()]:
        threads = f"{machine.threads} {'thread' if machine.threads == 1 else 'threads'}"
        names = ", ".join(model.name for model in untrained)
        _print(f"training {names}: {machine.at_once} at once, {threads} each")
        train(untrained, machine)
    if unfinished:
        _print(f"translating {sizes['test']:,} sentences with each model")
    jobs = translate(unfinished, machine)
    for model in unfinished:
        evaluate(model, jobs[model.name], machine)
    show(models, folder)
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    _print(f"finished in {minutes}:{seconds:02} min; results, logs and models: {folder}")
